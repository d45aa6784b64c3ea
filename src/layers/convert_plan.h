// The weights that a conversion writes, and the rows of the source that each consists of.
//
// Most weights are one weight of the source. Stacked experts (gpt-oss) become one weight for each
// matrix of each expert, and the way back; rows of gate and up are interleaved where they are
// stacked (gate 0, up 0, gate 1, ...), and their biases likewise.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/conventions/convention.h"
#include "checkpoint/shard_plan.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// Rows first, first + stride, ... of a tensor of the source: of the code matrix of a weight, or
// elements of a bias.
struct SourceRows {
  const LogicalTensor* tensor = nullptr;
  int64_t first = 0;
  int64_t stride = 1;
};

// A matrix of `experts` times `rows` rows. Expert e has the sources [e * ways(), (e + 1) * ways()),
// whose rows alternate.
struct TargetWeight {
  std::string name;  // The unquantized weight's.
  std::vector<int64_t> shape = {};
  const ConventionSpec* spec = nullptr;
  int64_t experts = 1;
  int64_t rows = 0;  // Rows of one expert.
  int64_t cols = 0;
  std::vector<SourceRows> sources = {};
  TensorGroup parts = {};  // Values, scales, and the global scale where there is one.

  [[nodiscard]] int64_t all_rows() const { return experts * rows; }
  [[nodiscard]] int64_t ways() const { return static_cast<int64_t>(sources.size()) / experts; }
  // Whether the rows are those of one weight of the source, in ranges of any rows.
  [[nodiscard]] bool is_simple() const { return sources.size() == 1; }
};

// A bias of stacked experts, or of one expert: `experts` rows of `cols` elements.
struct TargetBias {
  TensorSpec tensor;
  int64_t experts = 1;
  int64_t cols = 0;
  std::vector<SourceRows> sources;  // As those of a weight, of elements.
};

struct ConvertPlan {
  std::vector<TargetWeight> weights;
  std::vector<TargetBias> biases;
  std::vector<const LogicalTensor*> copies;  // Tensors that stay as they are.
};

// Pointers into `tensors`. `keep_formats`: as in ConvertCheckpointOptions. Throws kUnsupported for
// a weight that the convention cannot hold, kCorruptData for stacked experts, or experts to be
// stacked, that do not fit together.
ConvertPlan plan_conversion(std::span<const LogicalTensor> tensors, const ConventionSpec& to,
                            bool keep_formats, const std::string& path);

}  // namespace narrowfloat
