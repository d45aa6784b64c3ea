// Grouped GEMM calls with data of their own: canonical weights, quantized rows, a permutation made
// from a number of rows for each expert, and the decoded values of everything. Codes are decoded
// by element_codes.h, not by the library.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "narrowfloat/gemm.h"
#include "support/guarded_buffer.h"
#include "support/random.h"

namespace narrowfloat {
struct GemmCall;
struct GroupedGemmProblem;
}  // namespace narrowfloat

namespace narrowfloat::testing {

enum class GemmData : int {
  kRandom = 0,    // Finite, a scale of its own for every block.
  kIntegers = 1,  // Every product and sum is exact in fp32.
  kBits = 2,      // Any code, NaN too.
  // Rows are those of a unit matrix, and so results those of weights: column by column all finite
  // codes, and scales of all bytes, row by row.
  kEveryWeight = 3,
  kEveryInput = 4,      // The same with weights and rows exchanged.
  kNeedsPromotion = 5,  // Three groups of 128 products of 128, then a product of 1, then zeros.
};

struct GemmCaseSpec {
  MoeMode mode = MoeMode::kBf16;
  int64_t weight_rows = 32;
  int64_t cols = 128;
  std::vector<int64_t> expert_rows{3, 0, 5};
  int32_t token_tile = 8;
  bool gathers = false;
  bool fp32_rows = false;          // Modes with bf16 rows.
  bool transposed_scales = false;  // Input scales as [blocks, rows].
  bool has_slot_weights = false;
  std::optional<DType> bias;
  std::optional<GateOrder> gate_order;  // With a gate_scale per expert.
  bool knows_halves = false;            // Weights are prepared with the gate order.
  bool has_scale = false;               // One per expert.
  GemmData data = GemmData::kRandom;
  bool wide_scales = true;  // Random byte scales: over a range that E4M3 weights cannot follow.
  // Without wide_scales: experts whose scales are so; of UE8M0 up to 32.
  std::vector<int64_t> wide_experts;
  uint64_t seed = 1;
};
std::string to_string(const GemmCaseSpec& spec);

struct GemmRun {
  std::string implementation = "cpu_baseline";
  Accumulation accumulation = Accumulation::kFp32;
  DType output = DType::kF32;
  ScaleLayoutId layout =
      ScaleLayoutId::kLinear;  // Layout of weight scales, where the format has byte scales.
  uint8_t workspace_poison = 0xFF;
  // Runs in place of the implementation, with its packed weights.
  std::function<void(const GroupedGemmProblem&, const GemmCall&)> gemm = {};
};

class GemmCase {
 public:
  explicit GemmCase(const GemmCaseSpec& spec);
  GemmCase(const GemmCase&) = delete;
  GemmCase& operator=(const GemmCase&) = delete;

  // Output with 0xFF where nothing was written. Fails the test if guard bytes fell.
  [[nodiscard]] std::vector<uint8_t> run(const GemmRun& run) const;
  // The same where the first tile ends after `rows` rows.
  [[nodiscard]] std::vector<uint8_t> run_rows(const GemmRun& run, int32_t rows);

  [[nodiscard]] WeightView weights(ScaleLayoutId layout = ScaleLayoutId::kLinear) const;
  // Everything but the output.
  [[nodiscard]] GroupedGemmArgs args() const;
  [[nodiscard]] const GemmCaseSpec& spec() const { return spec_; }
  [[nodiscard]] int64_t experts() const { return static_cast<int64_t>(spec_.expert_rows.size()); }
  [[nodiscard]] int64_t max_rows() const { return static_cast<int64_t>(row_to_slot_.size()); }
  [[nodiscard]] int64_t input_rows() const { return input_rows_; }
  // Bytes of the canonical weights and linear scales.
  [[nodiscard]] int64_t weight_bytes() const;

  struct Row {
    int64_t row;
    int64_t expert;
    int64_t source;  // Row of `a`.
  };
  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }

  // Decoded, block scales and the rounding of kNvfp4Fp8Rounded included.
  [[nodiscard]] double weight(int64_t expert, int64_t row, int64_t col) const {
    return weight_values_[static_cast<size_t>((expert * spec_.weight_rows + row) * spec_.cols +
                                              col)];
  }
  [[nodiscard]] double input(int64_t row, int64_t col) const {
    return input_values_[static_cast<size_t>(row * spec_.cols + col)];
  }
  // sum, and sum with the magnitudes of all terms, of a weight row and a row.
  struct Expected {
    double value;
    double magnitude;  // Magnitude of the terms, by which an error is measured.
  };
  [[nodiscard]] Expected expected(const Row& row, int64_t weight_row) const;

  // The UE8M0 scale, not NaN, of a block of weight row `weight_row` of expert 0.
  void set_weight_scale(int64_t weight_row, int64_t block, uint8_t scale);
  // Zeros in a whole block of weight row `weight_row` of expert 0.
  void clear_weights(int64_t weight_row, int64_t block);
  // Zeros in the first block of weight row `weight_row` of expert 0, and NaN for its scale, which
  // weight() does not know; false where weights have no block scales in bytes.
  bool plant_nan_scale_of_zeros(int64_t weight_row);

  // Raw buffers that tests change before a run.
  std::vector<uint8_t> input_codes;
  std::vector<uint8_t> input_scales;
  std::vector<float> row_scale;

 private:
  void make_permutation(Random& random);
  void make_weights(Random& random);
  void make_inputs(Random& random);
  void make_epilogue(Random& random);
  void round_weights();
  [[nodiscard]] bool is_gate_row(int64_t weight_row) const;

  GemmCaseSpec spec_;
  int64_t input_rows_ = 0;
  std::vector<Row> rows_;
  std::vector<int32_t> row_to_token_;
  std::vector<int32_t> row_to_slot_;
  std::vector<int32_t> tile_to_expert_;
  std::vector<int32_t> tile_row_end_;
  std::vector<int32_t> num_tiles_;
  std::vector<uint8_t> weight_codes_;
  std::vector<uint8_t> weight_scales_;
  mutable std::vector<uint8_t> swizzled_scales_;
  std::vector<double> weight_scale_values_;
  std::vector<double> weight_values_;
  std::vector<double> input_values_;
  std::vector<float> slot_weights_;
  std::vector<float> scale_;
  std::vector<float> gate_scale_;
  std::vector<uint8_t> bias_codes_;
  std::vector<double> bias_values_;
};

// Element `index` of an output as double.
double output_element(DType dtype, const std::vector<uint8_t>& output, int64_t index);

}  // namespace narrowfloat::testing
