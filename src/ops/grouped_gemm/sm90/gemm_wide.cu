// Launchers of the GEMM for weights of 8 and 16 bits.
#include "ops/grouped_gemm/sm90/gemm_kernel_sm90.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"

namespace narrowfloat {

// The GEMM of bf16 weights.
void launch_gemm_bf16(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Bf16Weights, false>(params, shape, stream);
}

// The GEMM of MXFP8 weights.
void launch_gemm_mxfp8(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp8Weights, false>(params, shape, stream);
}

// The GEMM of E4M3 weights, per tensor and per 128 x 128.

namespace {

using RemainderShape = GemmShapeOf<Fp8Weights, true, 144>;

// Whether experts have about as many rows as one or two blocks of 64 of a tile. Around half of them
// then have a few more, for which a remainder saves a tile, or half of one; elsewhere pairs of
// CTAs that share weights are faster. The number of rows is a layer's to within a tile where it
// has all experts, too high where others have some, and too low where a caller's list of tiles has
// no room for more: any of it costs time alone.
bool has_many_remainders(const GemmParams& params) {
  constexpr int64_t kRemainder = RemainderShape::kTokens - RemainderShape::kMTile;
  const int64_t experts = params.experts;
  const int64_t rows =
      params.max_tiles * int64_t{params.token_tile} - experts * (params.token_tile - int64_t{1});
  const auto is_around = [&](int64_t full) {
    return rows >= experts * (full - kRemainder / 2) && rows <= experts * (full + kRemainder);
  };
  return is_around(64) || is_around(128);
}

// Whether tokens are routed to the rows: gathered ones, and those that a layer lays one after the
// other. A caller's may be the same number for each expert.
bool are_routed(const GemmParams& params) {
  return params.row_to_token != nullptr || params.next_tile != nullptr;
}

}  // namespace

void launch_gemm_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  if (shape.tokens == 128 && are_routed(params) && has_many_remainders(params)) {
    launch_multiply_groups<RemainderShape>(params, shape, stream);
  } else if (shape.tokens == 128 && takes_tma_kernel(params)) {
    launch_gemm_fp8_tma(params, shape, stream);
  } else {
    launch_gemm<Fp8Weights, true>(params, shape, stream);
  }
}

}  // namespace narrowfloat
