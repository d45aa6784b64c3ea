// The common part of the kernels of KV caches: a thread's flat number becomes three indices and a
// chunk of a row, for keys (blockIdx.y = 0) and values (1), in launches whose threads 32 bits
// number.
#pragma once

#include <algorithm>
#include <array>
#include <cuda_runtime.h>

#include "base/fast_division.h"
#include "base/int_math.h"
#include "ops/kv_cache/kv_problem.h"
#include "runtime/cuda/launch.h"
#include "runtime/support.h"

namespace narrowfloat {

inline constexpr int kKvThreads = 256;
inline constexpr int64_t kKvMaxThreads = INT32_MAX - kKvThreads;

// KvSteps for kernels.
struct KvStrides {
  int64_t i = 0;
  int64_t j = 0;
  int64_t k = 0;

  KvStrides() = default;
  explicit KvStrides(const KvSteps& steps) : i(steps[0]), j(steps[1]), k(steps[2]) {}
  [[nodiscard]] __device__ int64_t offset(int64_t to_i, int64_t to_j, int64_t to_k) const {
    return to_i * i + to_j * j + to_k * k;
  }
};

// The axes of one side: (i, j, k) and chunks of a row.
struct KvAxes {
  FastDivisor pieces;
  FastDivisor k;
  FastDivisor j;
  uint32_t num_threads = 0;  // Threads of this launch.
};

struct KvPlace {
  int64_t i = 0;
  uint32_t j = 0;
  uint32_t k = 0;
  uint32_t piece = 0;
};

__device__ inline KvPlace kv_place(const KvAxes& axes, int64_t first_i, uint32_t thread) {
  const uint32_t row = axes.pieces.quotient(thread);
  const uint32_t rest = axes.k.quotient(row);
  const uint32_t i_of_launch = axes.j.quotient(rest);
  return {.i = first_i + i_of_launch,
          .j = rest - i_of_launch * axes.j.divisor(),
          .k = row - rest * axes.k.divisor(),
          .piece = thread - row * axes.pieces.divisor()};
}

inline Support kv_fits(const std::array<int64_t, 3>& extents,
                       const std::array<int64_t, 2>& pieces) {
  const int64_t widest = std::max(pieces[0], pieces[1]);
  const auto rows = checked_mul(extents[1], extents[2]);
  const auto threads = rows ? checked_mul(*rows, widest) : std::nullopt;
  if (!threads || *threads > kKvMaxThreads || *rows > kKvMaxThreads || widest > kKvMaxThreads) {
    return Support::no("pages or rows of more than 2^31 chunks");
  }
  return Support::yes();
}

// Launches kernel(params) over all i. Params has axes[2] and first_i; pieces: chunks per row of
// each side.
template <typename Params>
void launch_kv(void (*kernel)(Params), Params params, const std::array<int64_t, 3>& extents,
               const std::array<int64_t, 2>& pieces, Stream stream) {
  const auto [num_i, num_j, num_k] = extents;
  const int64_t widest = num_j * num_k * std::max(pieces[0], pieces[1]);
  if (num_i == 0 || widest == 0) return;
  for (size_t side = 0; side < 2; ++side) {
    params.axes[side].pieces =
        FastDivisor(static_cast<uint32_t>(std::max<int64_t>(1, pieces[side])));
    params.axes[side].k = FastDivisor(static_cast<uint32_t>(num_k));
    params.axes[side].j = FastDivisor(static_cast<uint32_t>(num_j));
  }
  const int64_t per_launch = kKvMaxThreads / widest;
  for (int64_t first = 0; first < num_i; first += per_launch) {
    const int64_t rows = std::min(num_i - first, per_launch) * num_j * num_k;
    params.first_i = first;
    for (size_t side = 0; side < 2; ++side) {
      params.axes[side].num_threads = static_cast<uint32_t>(rows * pieces[side]);
    }
    const int64_t blocks = ceil_div(rows * std::max(pieces[0], pieces[1]), kKvThreads);
    const unsigned sides = pieces[1] > 0 ? 2 : 1;
    launch(kernel, {dim3(static_cast<unsigned>(blocks), sides), dim3(kKvThreads)}, stream, params);
  }
}

}  // namespace narrowfloat
