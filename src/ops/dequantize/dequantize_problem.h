// A dequantization as data (see quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/quantize.h"
#include "runtime/support.h"

namespace narrowfloat {

enum class GlobalScaleAxis : int { kNone = 0, kTensor = 1, kRow = 2, kBatchRow = 3, kBatch = 4 };

struct DequantizeProblem {
  FormatId format = FormatId::kNvfp4;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  DType output = DType::kF32;
  Device device;
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t cols = 0;
  GlobalScaleAxis global_axis = GlobalScaleAxis::kNone;
  bool global_scale_divides = false;
  int64_t groups = 0;
};
std::string to_string(const DequantizeProblem& problem);

struct DequantizeArgs {
  const uint8_t* values = nullptr;
  int64_t value_row_bytes = 0;
  ScaleView scales;
  const float* global_scale = nullptr;
  std::span<const int64_t> row_offsets;
  void* output = nullptr;
  int64_t output_stride = 0;  // In elements.
};

struct DequantizeImpl {
  std::string_view name;
  Support (*supports)(const DequantizeProblem& problem);
  void (*run)(const DequantizeProblem& problem, const DequantizeArgs& args, Stream stream);
};

// Ordered, fastest first, the oracle last.
std::span<const DequantizeImpl> dequantize_impls();
extern const DequantizeImpl kDequantizeCpuReference;
extern const DequantizeImpl kDequantizeCpuBaseline;
extern const DequantizeImpl kDequantizeCpuAvx2;    // Only in builds for x86-64.
extern const DequantizeImpl kDequantizeCpuAvx512;  // Only in builds for x86-64.
extern const DequantizeImpl kDequantizeSm90;       // Only in builds with CUDA, like the next.
extern const DequantizeImpl kDequantizeSm80;

}  // namespace narrowfloat
