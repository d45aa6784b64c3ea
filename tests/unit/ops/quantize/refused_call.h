// A quantizer call that works, its buffers, and what one violation of a requirement must do to it.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ops/quantize/quantize_checks.h"
#include "support/tensors.h"

namespace narrowfloat::testing {

inline constexpr int64_t kCallRows = 6;
inline constexpr int64_t kCallCols = 128;

// Calls the public function of the call's source.
void call(const QuantizeCall& c);

// A call that works, and its buffers. FP8 1x128 has one batch (row groups need that).
struct Working {
  Matrix input;
  Matrix residual;
  Matrix vector;
  Matrix norm_output;
  QuantizedTensor output;
  QuantizedTensor extra;
  Vector scales{DType::kF32, 16};
  Vector rows = Vector::of<int32_t>(DType::kI32, {1, 2});
  Vector offsets = Vector::of<int64_t>(DType::kI64, {0, 2, 6});
  QuantizeCall call;

  Working(FormatId format, RowSourceKind source);

  [[nodiscard]] TensorView scale_view(int64_t count) const {
    return TensorView::contiguous(scales.buffer().data(), DType::kF32, {count});
  }
  [[nodiscard]] std::vector<std::vector<uint8_t>> outputs() const {
    return {output.values.copy(), output.scales.copy(),        output.global_scale.copy(),
            extra.scales.copy(),  norm_output.buffer().copy(), residual.buffer().copy()};
  }
};

// Changes a working call so that it breaks one requirement.
using Apply = void (*)(QuantizeCall& call, const Working& working);

struct Violation {
  const char* name;
  FormatId format;
  RowSourceKind source;
  Apply apply;
  std::vector<std::string> fragments;
};

inline void PrintTo(const Violation& violation, std::ostream* out) { *out << violation.name; }
inline std::string name_of(const ::testing::TestParamInfo<Violation>& test) {
  return test.param.name;
}

// The tables of violations are readable with short names.
using C = QuantizeCall;
using W = Working;
inline constexpr auto kNv = FormatId::kNvfp4;
inline constexpr auto kTok = FormatId::kNvfp4PerToken;
inline constexpr auto kMx4 = FormatId::kMxfp4;
inline constexpr auto kMx8 = FormatId::kMxfp8;
inline constexpr auto kF1 = FormatId::kFp8Block1x128;
inline constexpr auto kF128 = FormatId::kFp8Block128x128;
inline constexpr auto kFt = FormatId::kFp8Tensor;
inline constexpr auto kPlain = RowSourceKind::kPlain;
inline constexpr auto kSilu = RowSourceKind::kSiluMul;
inline constexpr auto kSmooth = RowSourceKind::kSmooth;
inline constexpr auto kNorm = RowSourceKind::kRmsNorm;
inline constexpr auto kAdd = RowSourceKind::kAddRmsNorm;
inline const Device kGpu{.type = DeviceType::kCuda, .index = 1};

// The broken call throws kInvalidArgument with the fragments and writes nothing; the call without
// the violation works.
void expect_refused(const Violation& violation);

}  // namespace narrowfloat::testing
