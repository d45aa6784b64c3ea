// The cases that `narrowfloat bench --device ...` measures: every combination of what was asked
// for, without those that a format does not have.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cli/arguments.h"
#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

enum class BenchOp : int {
  kQuantize,
  kDequantize,
  kAmax,
  kRowAmax,
  kRelayout,
  kActivation,
  kGroupQuantize,
  kKvQuantize,
  kKvDequantize,
  kKvAppend,
  kShuffle,
  kPackBits
};
std::string_view name(BenchOp op);
std::string_view name(QuantizeSource source);

struct SweepCase {
  BenchOp op = BenchOp::kQuantize;
  FormatId format = FormatId::kNvfp4;  // Where has_format().
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  MathMode math = MathMode::kExact;
  DType dtype = DType::kBF16;  // Of the high-precision side.
  QuantizeSource source = QuantizeSource::kPlain;
  bool is_scale_given = true;  // Counts where has_tensor_scale(format).
  bool has_four_over_six = false;
  int64_t rows = 0;  // kActivation: 0, the routing says how many.
  int64_t cols = 0;  // Of the quantized matrix; kActivation: of the result.
  ActivationShape activation;
  int64_t tokens = 0;  // kActivation only.

  [[nodiscard]] bool has_format() const {
    return op == BenchOp::kQuantize || op == BenchOp::kDequantize || op == BenchOp::kRelayout;
  }
};

// NVFP4 per tensor and FP8 per tensor: one scale of the whole tensor, given or computed.
bool has_tensor_scale(FormatId format);

// Where relayout() takes its scales from, so that `layout` is another one.
ScaleLayoutId source_layout(FormatId format, ScaleLayoutId layout);

// Of the operations from kGroupQuantize on: whether the library takes the shape and the type.
bool is_small_case_possible(const SweepCase& what);

// Throws kInvalidArgument where nothing is left.
std::vector<SweepCase> cases_of(const BenchArguments& arguments);

}  // namespace narrowfloat::cli
