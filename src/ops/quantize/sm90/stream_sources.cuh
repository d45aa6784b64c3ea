// The sources of rows that stream through shared memory (quantize_stream.cuh). A source has
//   Row, read(ring)              a thread's part of a row, its run of 16 elements of each input
//   kInputs                      tensors side by side in a row of input
//   kIsNorm                      finish() needs 1 / rms of the row
//   Vector, load_vector(params)  a thread's part of the norm's weight or the smoothing factors
//   Elements, finish(row, vector, reciprocal_rms)
//                                the elements that are quantized (spec 1.3, 6.12)
#pragma once

#include "device/ptx/keep.cuh"
#include "formats/rms_norm.h"
#include "ops/quantize/sm90/norm_rows.cuh"
#include "ops/quantize/sm90/row_ring.cuh"
#include "ops/quantize/sm90/row_sources.cuh"

namespace narrowfloat {

template <class Half>
using StreamElements = PackedElements<Half, kRowRun>;

// This thread's run of params.vector.
template <class Half, class Params>
__device__ inline StreamElements<Half> load_vector_run(const Params& params) {
  StreamElements<Half> vector{};
  if (threadIdx.x < params.runs_per_row) {
    const uint8_t* address = params.vector + threadIdx.x * kRowRunBytes;
    vector = load_elements<StreamElements<Half>>(address);
  }
  return vector;
}

template <class HalfType>
struct StreamNorm {
  using Half = HalfType;
  using Elements = StreamElements<Half>;
  using Vector = Elements;
  using Row = FloatElements<kRowRun>;
  static constexpr int kInputs = 1;
  static constexpr bool kIsNorm = true;

  // The elements are widened once for the sum and the norm.
  template <class Ring>
  __device__ static Row read(const Ring& ring) {
    const auto h = ring.template read<Elements>(0);
    Row row;
#pragma unroll
    for (int i = 0; i < kRowRun; ++i) row.words[i] = keep_in_register(float_bits(h[i]));
    return row;
  }

  // A weight of -0 counts as +0.
  template <class Params>
  __device__ static Vector load_vector(const Params& params) {
    Vector vector = load_vector_run<Half>(params);
#pragma unroll
    for (uint32_t& word : vector.words) word = Half::add(word, 0);
    return vector;
  }

  // Applies rms_norm_element() to every element.
  __device__ static Elements finish(const Row& h, const Vector& weight, float reciprocal_rms) {
    const auto element = [&](int i) { return mul_rn(mul_rn(h[i], reciprocal_rms), weight[i]); };
    Elements y;
#pragma unroll
    for (int i = 0; i < Elements::kWords; ++i) {
      y.words[i] = Half::pack(element(2 * i), element(2 * i + 1));
    }
    return y;
  }
};

// silu(gate) * up
template <class HalfType, class Math>
struct StreamSilu {
  using Half = HalfType;
  using Elements = StreamElements<Half>;
  struct Vector {};
  using Row = typename SiluRows<Half, Math>::template Input<kRowRun>;
  static constexpr int kInputs = 2;
  static constexpr bool kIsNorm = false;

  template <class Ring>
  __device__ static Row read(const Ring& ring) {
    return {ring.template read<Elements>(0), ring.template read<Elements>(1)};
  }
  template <class Params>
  __device__ static Vector load_vector(const Params& /*params*/) {
    return {};
  }
  __device__ static Elements finish(const Row& row, const Vector& /*vector*/,
                                    float /*reciprocal_rms*/) {
    return SiluRows<Half, Math>::finish(row);
  }
};

// input * smooth[col], bf16.
struct StreamSmooth {
  using Half = PackedBf16;
  using Elements = StreamElements<Half>;
  using Vector = Elements;
  using Row = Elements;
  static constexpr int kInputs = 1;
  static constexpr bool kIsNorm = false;

  template <class Ring>
  __device__ static Row read(const Ring& ring) {
    return ring.template read<Elements>(0);
  }
  template <class Params>
  __device__ static Vector load_vector(const Params& params) {
    return load_vector_run<Half>(params);
  }
  __device__ static Elements finish(const Row& x, const Vector& smooth, float /*reciprocal_rms*/) {
    Elements y;
#pragma unroll
    for (int i = 0; i < Elements::kWords; ++i) {
      y.words[i] =
          Half::pack(mul_rn(x[2 * i], smooth[2 * i]), mul_rn(x[2 * i + 1], smooth[2 * i + 1]));
    }
    return y;
  }
};

}  // namespace narrowfloat
