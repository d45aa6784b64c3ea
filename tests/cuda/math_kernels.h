// Functions that CPU and GPU must compute with the same bits, evaluated on the GPU.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "support/device_buffer.h"

namespace narrowfloat::testing {

enum class UnaryFunction : int {
  kExp = 0,
  kTanh = 1,
  kSigmoid = 2,
  kNormalCdf = 3,
  kReciprocalRoot = 4,
  kReciprocal = 5,  // rcp.approx.ftz
  kToE4m3 = 6,
  kToE2m1 = 7,
  kNewtonReciprocal = 8,
  kRouterSigmoid = 9,
  kE2m1Grid = 10,
  kGroupScale = 11,       // quick_group_scale(),
  kGroupMultiplier = 12,  // and its multiplier.
};

// Bit patterns first, first + stride, ... as arguments.
struct BitRange {
  uint32_t first = 0;
  uint32_t stride = 1;
  int64_t count = 0;
};

// Waits. `results`: one word per argument; codes in the lowest byte.
void evaluate_on_gpu(UnaryFunction function, const BitRange& range, const DeviceBuffer& results);

enum class BinaryFunction : int {
  kMultiply = 0,  // Math of `fast` mode.
  kAdd = 1,
  kDivide = 2,
  kTokenEncodeScale = 3,  // token_row_scale(): a row's maximum, a base decode scale.
  kTokenDecodeScale = 4,
  kDivideByKnown = 5,
};

std::vector<float> evaluate_on_gpu(BinaryFunction function, std::span<const float> a,
                                   std::span<const float> b);

}  // namespace narrowfloat::testing
