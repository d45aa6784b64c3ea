// The kernels of epilogue_kernels.h, written against a vector of fp32.
//
// Level is a type of an unnamed namespace with kLanes, the number of fp32 in its vectors, and
//   floats(x), load(from), mul(a, b), add(a, b)
//   store(to, x)      to fp32 or, rounded, to bf16; NaN become the canonical one of the type
#pragma once

#include "ops/grouped_gemm/x86/epilogue_kernels.h"

namespace narrowfloat::epilogue_kernels {

template <class Level, typename Output>
void store(const EpilogueStrip& strip, const EpilogueRow* rows, int64_t count) {
  constexpr int kStripLanes = 16;
  for (const EpilogueRow* row = rows; row != rows + count; ++row) {
    const auto weight = Level::floats(row->weight);
    const auto row_scale = Level::floats(row->row_scale);
    auto* out = static_cast<Output*>(row->output) + strip.outputs;
    for (int lane = 0; lane < kStripLanes; lane += Level::kLanes) {
      const auto sum = Level::mul(weight, Level::load(row->sums + strip.sums + lane));
      const auto factor = Level::mul(Level::load(strip.scales + lane), row_scale);
      const auto value = Level::add(Level::mul(factor, sum), Level::load(strip.bias + lane));
      Level::store(out + lane, value);
    }
  }
}

template <class Level>
constexpr EpilogueKernels epilogue_kernels_of() {
  return {.store_fp32 = store<Level, float>, .store_bf16 = store<Level, uint16_t>};
}

}  // namespace narrowfloat::epilogue_kernels
