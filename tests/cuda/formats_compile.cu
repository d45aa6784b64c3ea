// Compiles the rules of every format as device code in exact mode: the types that CPU and CUDA
// share must stay free of host-only calls. Never launched.
#include "base/portable_math.h"
#include "formats/four_over_six.h"
#include "formats/fp8_input.h"
#include "formats/registry.h"
#include "formats/rms_norm.h"
#include "formats/silu.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {

template <BlockFormat Format>
__global__ void encode_one_block_kernel(const float* global_input, uint8_t* global_codes,
                                        typename Format::Stored* global_scale, BlockRules rules) {
  AbsMax amax;
  constexpr int kCols = Format::kBlockCols == 0 ? 1 : static_cast<int>(Format::kBlockCols);
  for (int i = 0; i < kCols; ++i) amax.add(global_input[i]);
  const float maximum = Format::kAmaxOfNanIsNan ? amax.or_nan() : amax.or_zero();
  const auto scale = Format::template block_scale<ExactMath>(maximum, ScalePair{}, rules);
  for (int i = 0; i < kCols; ++i) {
    global_codes[i] = Format::template encode<ExactMath>(global_input[i], scale.multiplier);
  }
  *global_scale = scale.stored;
}

template <typename Layout>
__global__ void scale_offset_kernel(int64_t* global_offset, ScaleExtents extents) {
  *global_offset = Layout::offset(threadIdx.x, blockIdx.x, extents);
}

__global__ void shared_functions_kernel(float* global_values) {
  global_values[8] = sigmoid_by_tanh(exp_portable(normal_cdf(global_values[8])));
  global_values[0] = silu_mul<ExactMath>(global_values[0], global_values[1]);
  global_values[2] = rms_norm_element(global_values[2], rsqrt_rn(global_values[3]), 1.0F);
  global_values[4] = Fp8Input<ExactMath>::widen(3, Fp8Input<ExactMath>::factor(global_values[4]));
  const auto row = Nvfp4PerToken::row_scale<ExactMath>(global_values[6], global_values[7]);
  global_values[6] = row.stored + Fp8Tensor::given_scale(global_values[7]).multiplier;
  const FourOverSixBlock block = FourOverSixSearch<ExactMath>::encode(
      global_values, 1.0F, Nvfp4::scale_pair<ExactMath>(1.0F), FourOverSixRules{});
  global_values[5] = E4M3::decode(block.stored) + UE8M0::decode(block.codes[0]);
}

template __global__ void encode_one_block_kernel<Nvfp4>(const float*, uint8_t*, uint8_t*,
                                                        BlockRules);
template __global__ void encode_one_block_kernel<Mxfp4>(const float*, uint8_t*, uint8_t*,
                                                        BlockRules);
template __global__ void encode_one_block_kernel<Mxfp8>(const float*, uint8_t*, uint8_t*,
                                                        BlockRules);
template __global__ void encode_one_block_kernel<Fp8Block1x128>(const float*, uint8_t*, float*,
                                                                BlockRules);
template __global__ void encode_one_block_kernel<Nvfp4PerToken>(const float*, uint8_t*, uint8_t*,
                                                                BlockRules);
template __global__ void encode_one_block_kernel<Fp8Block128x128>(const float*, uint8_t*, float*,
                                                                  BlockRules);
template __global__ void encode_one_block_kernel<Fp8Tensor>(const float*, uint8_t*, float*,
                                                            BlockRules);
template __global__ void scale_offset_kernel<Swizzled128x4Layout>(int64_t*, ScaleExtents);
template __global__ void scale_offset_kernel<Swizzled8x4Layout>(int64_t*, ScaleExtents);
template __global__ void scale_offset_kernel<MnMajorLayout>(int64_t*, ScaleExtents);
template __global__ void scale_offset_kernel<LinearLayout>(int64_t*, ScaleExtents);

}  // namespace narrowfloat
