// The all-reduce from first principles: every output of a call from the inputs of all ranks, one
// token and one element at a time, by the formulas of docs/allreduce.md. It shares nothing with
// the library but the conversions of single elements. tests/golden/allreduce_golden.txt judges it.
#pragma once

#include <cstdint>
#include <vector>

#include "narrowfloat/allreduce.h"

namespace narrowfloat::testing {

// The tensors that differ from rank to rank, as the bytes of dense tensors. What the pattern does
// not use is empty.
struct GoldenRank {
  std::vector<uint8_t> input;

  std::vector<uint8_t> expert_rows;
  std::vector<float> expert_scales;
  std::vector<uint8_t> token_input;

  std::vector<uint8_t> permuted_rows;
  std::vector<int32_t> slot_to_row;
  std::vector<float> slot_weights;  // Empty: 1. Of the element type: rounded to it.
  std::vector<uint8_t> shared_expert;
};

struct GoldenInputs {
  AllReduceProblem problem;
  std::vector<GoldenRank> ranks;
  std::vector<uint8_t> residual;
  std::vector<uint8_t> gamma;
  float eps = 1e-6F;
  float weight_bias = 0.0F;
  float global_scale = 1.0F;
  // Reduction: all rows, and how many of them count. Finalize: rows of permuted_rows, and slots.
  int64_t experts = 0;
  int64_t active_experts = 0;
  int64_t rows = 0;
  int64_t top_k = 0;
  float routed_scaling = 1.0F;
  int64_t scale_words = 0;  // FP8 groups: the capacity of scale_out.
};

// The bytes of every output; empty where the pattern has none. Outputs that the MoE patterns leave
// out are computed, too.
struct GoldenOutputs {
  std::vector<uint8_t> ar_out;
  std::vector<uint8_t> residual_out;
  std::vector<uint8_t> norm_out;
  std::vector<uint8_t> quant_out;
  std::vector<uint8_t> scale_out;
  std::vector<uint8_t> row_scale_out;

  // Values of each token.
  std::vector<float> sums_of_squares;
  std::vector<float> inverse_rms;
};

GoldenOutputs allreduce_golden(const GoldenInputs& inputs);

// The offset of a block scale in a layout (spec 8.2), and the bytes of all, with padding.
int64_t golden_scale_offset(ScaleLayoutId layout, int64_t row, int64_t block, int64_t blocks);
int64_t golden_scale_bytes(ScaleLayoutId layout, int64_t rows, int64_t blocks);
// Words of FP8 group exponents: the last column has all rows, or only those of tokens.
int64_t golden_group_words(int64_t tokens, int64_t groups, bool is_short);

}  // namespace narrowfloat::testing
