// An 8-bit group quantization as data (see quantize_problem.h), and its arithmetic (spec 6.9).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/float_ops.h"
#include "formats/minifloat.h"
#include "narrowfloat/group_quantize.h"
#include "runtime/support.h"

namespace narrowfloat {

struct GroupQuantizeProblem {
  DType input = DType::kBF16;
  DType output = DType::kF8E4M3;
  Device device;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t group_size = 0;  // Divides cols.
  GroupScaleOrder scale_order = GroupScaleOrder::kRowMajor;
  bool power_of_two_scales = false;
};
std::string to_string(const GroupQuantizeProblem& problem);

struct GroupQuantizeArgs {
  const void* input = nullptr;
  int64_t input_stride = 0;  // In elements.
  uint8_t* values = nullptr;
  float* scales = nullptr;
  int64_t scale_rows = 0;  // Column-major: step from a group to the next.
  float eps = 0.0F;
};

struct GroupQuantizeImpl {
  std::string_view name;
  Support (*supports)(const GroupQuantizeProblem& problem);
  void (*run)(const GroupQuantizeProblem& problem, const GroupQuantizeArgs& args, Stream stream);
};

// Ordered, fastest first, the oracle last.
std::span<const GroupQuantizeImpl> group_quantize_impls();
extern const GroupQuantizeImpl kGroupQuantizeCpuReference;
extern const GroupQuantizeImpl kGroupQuantizeCpuBaseline;
extern const GroupQuantizeImpl kGroupQuantizeSm90;  // Only in builds with CUDA, like the next.
extern const GroupQuantizeImpl kGroupQuantizeSm80;

// The largest code of an output type.
constexpr float largest_code(DType output) {
  if (output == DType::kF8E4M3) return E4M3::kMaxFinite;
  return output == DType::kF8E5M2 ? E5M2::kMaxFinite : 127.0F;
}

// S for the maximum of a group; an infinite maximum stays infinite.
NF_HOST_DEVICE inline float group_scale_of(float amax, float eps, float largest,
                                           bool is_power_of_two) {
  const float scale = div_rn(amax < eps ? eps : amax, largest);
  if (!is_power_of_two) return scale;
  const uint32_t bits = float_bits(scale < 1e-10F ? 1e-10F : scale);
  return bits_float((bits + 0x7FFFFFU) & 0x7F800000U);
}

// floor(x + 0.5) within [-128, 127].
NF_HOST_DEVICE inline uint8_t to_int8(float x) {
  if (is_nan(x)) return 0;
  const float clamped = x < -128.0F ? -128.0F : x > 127.0F ? 127.0F : x;
  const float shifted = add_rn(clamped, 0.5F);
  const auto toward_zero = static_cast<int>(shifted);
  const int floor = toward_zero - (static_cast<float>(toward_zero) > shifted ? 1 : 0);
  return static_cast<uint8_t>(floor);
}

}  // namespace narrowfloat
