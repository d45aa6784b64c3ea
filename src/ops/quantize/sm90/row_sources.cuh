// The rows to quantize, as runs of elements in a thread's registers, for every source: what the
// 16-bit tensor of the unfused operation would hold (spec 1.3, 6.12). The GPU's counterpart of
// row_source.h; norms, which need a statistic of the whole row, are in norm_rows.cuh.
//
// A source has
//   Elements<n>                       n elements in registers
//   kInputBytes                       bytes of an input element
//   load<n>(params, row, col, factor) elements [col, col + n) of the row that starts at `row`
// and, where load() computes more than the next kernel should wait for,
//   Input<n>, load_input<n>(params, row, col), finish(input)
//                                     the two steps of load()
// where params has at least the members `cols` and `vector` of QuantizeParams.
#pragma once

#include "device/device_math.cuh"
#include "device/elements.cuh"
#include "device/silu.cuh"
#include "device/vector_io.cuh"
#include "formats/fp8_input.h"
#include "ops/quantize/sm90/quantize_params.h"

namespace narrowfloat {

// A tensor of a 16-bit type, unchanged.
template <class Half>
struct PlainRows {
  template <int kCount>
  using Elements = PackedElements<Half, kCount>;
  static constexpr int kInputBytes = 2;

  template <int kCount, class Params>
  __device__ static Elements<kCount> load(const Params& /*params*/, const uint8_t* row, int64_t col,
                                          float /*factor*/) {
    return load_elements<Elements<kCount>>(row + col * kInputBytes);
  }
};

struct FloatRows {
  template <int kCount>
  using Elements = FloatElements<kCount>;
  static constexpr int kInputBytes = 4;

  template <int kCount, class Params>
  __device__ static Elements<kCount> load(const Params& /*params*/, const uint8_t* row, int64_t col,
                                          float /*factor*/) {
    return load_elements<Elements<kCount>>(row + col * kInputBytes);
  }
};

// E4M3 codes times `factor`, as fp16.
template <class Math>
struct E4m3Rows {
  template <int kCount>
  using Elements = PackedElements<PackedF16, kCount>;
  static constexpr int kInputBytes = 1;

  template <int kCount, class Params>
  __device__ static Elements<kCount> load(const Params& /*params*/, const uint8_t* row, int64_t col,
                                          float factor) {
    const Codes<kCount> codes = load_codes<kCount>(row + col);
    Elements<kCount> elements;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const uint32_t pair = e4m3x2_to_f16x2(codes.pair(i));
      elements.words[i] = to_f16x2(widened(f16_low_to_float(pair), factor),
                                   widened(f16_high_to_float(pair), factor));
    }
    return elements;
  }

 private:
  template <int kCount>
  struct Codes {
    uint32_t words[kCount / 4];
    __device__ uint16_t pair(int i) const {
      return static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    }
  };

  template <int kCount>
  __device__ static Codes<kCount> load_codes(const uint8_t* address) {
    Codes<kCount> codes;
    static_assert(kCount == 16, "one 16-byte load");
    const uint4 all = load_readonly<uint4>(address);
    codes.words[0] = all.x;
    codes.words[1] = all.y;
    codes.words[2] = all.z;
    codes.words[3] = all.w;
    return codes;
  }

  // The value before the rounding to fp16. NaN passes both comparisons.
  __device__ static float widened(float value, float factor) {
    constexpr float kF16Max = 65504.0F;
    float h = Math::mul(value, factor);
    if constexpr (Math::kMode == MathMode::kExact) {
      if (h > kF16Max) h = kF16Max;
      if (h < -kF16Max) h = -kF16Max;
    }
    return h;
  }
};

// silu(gate) * up; the gate is the first half of a row.
template <class Half, class Math>
struct SiluRows {
  template <int kCount>
  using Elements = PackedElements<Half, kCount>;
  static constexpr int kInputBytes = 2;

  template <int kCount>
  struct Input {
    Elements<kCount> gate;
    Elements<kCount> up;
  };

  template <int kCount, class Params>
  __device__ static Elements<kCount> load(const Params& params, const uint8_t* row, int64_t col,
                                          float /*factor*/) {
    return finish(load_input<kCount>(params, row, col));
  }

  template <int kCount, class Params>
  __device__ static Input<kCount> load_input(const Params& params, const uint8_t* row,
                                             int64_t col) {
    return {load_elements<Elements<kCount>>(row + col * kInputBytes),
            load_elements<Elements<kCount>>(row + (params.cols + col) * kInputBytes)};
  }

  template <int kCount>
  __device__ static Elements<kCount> finish(const Input<kCount>& input) {
    const Elements<kCount>& gate = input.gate;
    const Elements<kCount>& up = input.up;
    Elements<kCount> y;
    // One branch for all elements, so that their dependency chains interleave.
    if (gates_in_range(gate)) {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        y.words[i] = silu_mul_in_range<Math, Half>(gate.words[i], up.words[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        y.words[i] = silu_mul_plain<Math, Half>(gate.words[i], up.words[i]);
      }
    }
    return y;
  }

 private:
  // NaN propagates and is out of range.
  template <int kCount>
  __device__ static bool gates_in_range(const Elements<kCount>& gate) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) largest = Half::max_or_nan(largest, gate.words[i]);
    return silu_gates_in_range<Half>(largest & 0x7FFF7FFFU);
  }
};

// input * smooth[col], bf16.
struct SmoothRows {
  template <int kCount>
  using Elements = PackedElements<PackedBf16, kCount>;
  static constexpr int kInputBytes = 2;

  template <int kCount, class Params>
  __device__ static Elements<kCount> load(const Params& params, const uint8_t* row, int64_t col,
                                          float /*factor*/) {
    const auto x = load_elements<Elements<kCount>>(row + col * kInputBytes);
    const auto smooth = load_elements<Elements<kCount>>(params.vector + col * kInputBytes);
    Elements<kCount> y;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      y.words[i] = PackedBf16::pack(mul_rn(x[2 * i], smooth[2 * i]),
                                    mul_rn(x[2 * i + 1], smooth[2 * i + 1]));
    }
    return y;
  }
};

// load() in two steps; the second does nothing for most sources.
template <class Source, int kCount, class Params>
__device__ inline auto load_source_input(const Params& params, const uint8_t* row, int64_t col) {
  if constexpr (requires { typename Source::template Input<kCount>; }) {
    return Source::template load_input<kCount>(params, row, col);
  } else {
    return Source::template load<kCount>(params, row, col, 1.0F);
  }
}
template <class Source, class Input>
__device__ inline auto finish_source_input(const Input& input) {
  if constexpr (requires { Source::finish(input); }) {
    return Source::finish(input);
  } else {
    return input;
  }
}

}  // namespace narrowfloat
