// Computes encode scales from decode scales on any device: the converter of a number (quantize.h)
// for F32 vectors.
//
//   exact:  RN(1 / d)      fast: the GPU's approximate reciprocal (spec 1.6)
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/quantize.h"
#include "runtime/support.h"

namespace narrowfloat {

struct ScaleInversionProblem {
  Device device;
  MathMode math = MathMode::kExact;
  int64_t count = 0;
};
std::string to_string(const ScaleInversionProblem& problem);

struct ScaleInversionImpl {
  std::string_view name;
  Support (*supports)(const ScaleInversionProblem& problem);
  void (*run)(const ScaleInversionProblem& problem, const float* decode, float* encode,
              Stream stream);
};

// The implementations, fastest first, the oracle last.
std::span<const ScaleInversionImpl> scale_inversion_impls();

// Builds with CUDA define these.
extern const ScaleInversionImpl kScaleInversionSm90;
extern const ScaleInversionImpl kScaleInversionSm80;

}  // namespace narrowfloat
