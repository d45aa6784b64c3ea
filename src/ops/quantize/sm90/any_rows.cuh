// One type for the rows of every source, which branches on the source at run time. The kernels of
// the general path use it, which would otherwise be compiled once per source. Elements are fp32 in
// registers whatever the input type; their values are those of the typed sources.
#pragma once

#include "formats/registry.h"
#include "ops/quantize/sm90/row_sources.cuh"

namespace narrowfloat {

template <class Half, int kCount>
__device__ inline FloatElements<kCount> widened(const PackedElements<Half, kCount>& elements) {
  FloatElements<kCount> wide;
#pragma unroll
  for (int i = 0; i < kCount; ++i) wide.words[i] = float_bits(elements[i]);
  return wide;
}
template <int kCount>
__device__ inline FloatElements<kCount> widened(const FloatElements<kCount>& elements) {
  return elements;
}

// Converts back to a 16-bit type, exactly where the elements came from it.
template <class Half, int kCount>
__device__ inline PackedElements<Half, kCount> narrowed(const FloatElements<kCount>& elements) {
  PackedElements<Half, kCount> halves;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    halves.words[i] = Half::pack(elements[2 * i], elements[2 * i + 1]);
  }
  return halves;
}

// All sources but norms. Math is the arithmetic of the format; SiLU uses the problem's, which
// differs only for FP8 rules without a fast form (effective_math).
template <BlockFormat Format, class Math>
struct AnyRows {
  static constexpr bool kTakesE4m3 =
      Format::kId == FormatId::kNvfp4 || Format::kId == FormatId::kMxfp4;

  __device__ static bool is_e4m3(const QuantizeParams& params) {
    return kTakesE4m3 && params.row_input == RowInput::kE4m3;
  }

  // `factor` is that of E4M3 input (spec 6.10).
  template <int kCount>
  __device__ static FloatElements<kCount> load(const QuantizeParams& params, const uint8_t* row,
                                               int64_t col, float factor) {
    const auto load_of = [&]<class Source>() {
      return widened(Source::template load<kCount>(params, row, col, factor));
    };
    switch (params.row_input) {
      case RowInput::kF32:
        return load_of.template operator()<FloatRows>();
      case RowInput::kF16:
        return load_of.template operator()<PlainRows<PackedF16>>();
      case RowInput::kSmooth:
        return load_of.template operator()<SmoothRows>();
      case RowInput::kSiluBf16:
        return load_silu<PackedBf16, kCount>(params, row, col);
      case RowInput::kSiluF16:
        return load_silu<PackedF16, kCount>(params, row, col);
      case RowInput::kE4m3:
        if constexpr (kTakesE4m3) return load_of.template operator()<E4m3Rows<Math>>();
        break;
      default:
        break;
    }
    return load_of.template operator()<PlainRows<PackedBf16>>();
  }

 private:
  template <class Half, int kCount>
  __device__ static FloatElements<kCount> load_silu(const QuantizeParams& params,
                                                    const uint8_t* row, int64_t col) {
    if constexpr (Math::kMode == MathMode::kExact && !kHasByteScales<Format>) {
      if (params.is_fast) {
        return widened(SiluRows<Half, DeviceFastMath>::template load<kCount>(params, row, col, 1));
      }
    }
    return widened(SiluRows<Half, Math>::template load<kCount>(params, row, col, 1));
  }
};

}  // namespace narrowfloat
