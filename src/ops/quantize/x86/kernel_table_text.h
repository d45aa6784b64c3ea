// The table of block_kernels.h for a level of vector instructions.
#pragma once

#include "ops/quantize/x86/block_kernels_text.h"
#include "ops/quantize/x86/four_over_six_text.h"
#include "ops/quantize/x86/row_kernels_text.h"

namespace narrowfloat::block_kernels {

template <class Level>
constexpr BlockKernels block_kernels_of() {
  using enum KernelInput;
  using enum KernelCodes;
  return {
      .maxima = {{block_maxima<Level, kF32, 16>, block_maxima<Level, kF32, 32>,
                  block_maxima<Level, kF32, 128>},
                 {block_maxima<Level, kBf16, 16>, block_maxima<Level, kBf16, 32>,
                  block_maxima<Level, kBf16, 128>},
                 {block_maxima<Level, kF16, 16>, block_maxima<Level, kF16, 32>,
                  block_maxima<Level, kF16, 128>}},
      .codes = {{block_codes<Level, kF32, kE2M1Of16>, block_codes<Level, kF32, kE2M1Of32>,
                 block_codes<Level, kF32, kE4M3Of32>, block_codes<Level, kF32, kE4M3Of128>},
                {block_codes<Level, kBf16, kE2M1Of16>, block_codes<Level, kBf16, kE2M1Of32>,
                 block_codes<Level, kBf16, kE4M3Of32>, block_codes<Level, kBf16, kE4M3Of128>},
                {block_codes<Level, kF16, kE2M1Of16>, block_codes<Level, kF16, kE2M1Of32>,
                 block_codes<Level, kF16, kE4M3Of32>, block_codes<Level, kF16, kE4M3Of128>}},
      .nvfp4_scales = nvfp4_scales<Level>,
      .mx_scales = mx_scales<Level>,
      .fp8_scales = fp8_scales<Level>,
      .four_over_six_scales = {four_over_six::scales<Level, kF32>,
                               four_over_six::scales<Level, kBf16>,
                               four_over_six::scales<Level, kF16>},
      .stream = stream_text::stream<Level>,
      .finish_stream = Level::finish_stream,
      .rows = row_kernels::row_kernels_of<Level>(),
  };
}

}  // namespace narrowfloat::block_kernels
