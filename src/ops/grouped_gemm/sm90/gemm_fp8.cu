// The GEMM of E4M3 weights, per tensor and per 128 x 128.
#include <cstdlib>

#include "ops/grouped_gemm/sm90/fragments_fp8.cuh"
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {
namespace {

// Whether experts have about as many rows as one or two blocks of 64 of a tile, give or take a
// tail. Where rows are random, around half of the experts then have a few more, for which a tail
// saves a tile, or half of one. Elsewhere pairs of blocks that share weights are faster.
bool takes_tails(const GemmParams& params) {
  constexpr int64_t kTail = 16;
  // To within a tile: as many tiles as can be, but for rows that are there to fill them.
  const int64_t most_rows = int64_t{params.max_tiles} * params.token_tile;
  const int64_t rows = most_rows - int64_t{params.experts} * (params.token_tile - 1);
  const auto is_around = [&](int64_t blocks) {
    return std::abs(rows - params.experts * blocks * 64) <= params.experts * kTail;
  };
  return is_around(1) || is_around(2);
}

// A caller's rows that lie one behind the other may be as many for each expert as a tile has.
bool are_rows_random(const GemmParams& params) {
  return params.next_item != nullptr || !takes_long_tiles(params);
}

}  // namespace

void launch_gemm_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  if (shape.tokens == 128 && takes_tails(params) && are_rows_random(params)) {
    launch_multiply_groups<GemmShapeOf<Fp8Weights, true, 144>>(params, shape, stream);
  } else if (shape.tokens == 128 && takes_long_tiles(params)) {
    launch_gemm_fp8_long(params, shape, stream);
  } else {
    launch_gemm<Fp8Weights, true>(params, shape, stream);
  }
}

}  // namespace narrowfloat
