// Factors, bias and rounding of the sums of a strip (strip_epilogue.h), in vectors of all of its 16
// outputs:
//
//   v = (scale[n] * row_scale) * (weight * sum[n]) + bias[n]        each operation rounded
#pragma once

#include <cstdint>

namespace narrowfloat {

// A row of the output. Places are those of the first strip.
struct EpilogueRow {
  const float* sums;
  float weight;
  float row_scale;
  void* output;
};

// A strip, and the numbers of sums and of outputs from those of the first strip to its own.
struct EpilogueStrip {
  const float* scales;  // [16]
  const float* bias;    // [16]
  int64_t sums;
  int64_t outputs;
};

struct EpilogueKernels {
  using Store = void (*)(const EpilogueStrip& strip, const EpilogueRow* rows, int64_t count);

  Store store_fp32;
  Store store_bf16;
};

extern const EpilogueKernels kEpilogueKernelsAvx2;
extern const EpilogueKernels kEpilogueKernelsAvx512;

}  // namespace narrowfloat
