// The kernels of scale_search_kernels.h with AVX2 and FMA.
#include <immintrin.h>

#include "layers/x86/scale_search_kernels.h"

namespace narrowfloat {
namespace {

// The nearest number of E2M1 to x >= 0 (formats/e2m1_grid.h).
__m256 nearest_e2m1(__m256 x) {
  const __m256 shift = _mm256_set1_ps(0x1p22F);
  const __m256 number = _mm256_min_ps(x, _mm256_set1_ps(6.0F));
  const __m256 power = _mm256_max_ps(number, _mm256_set1_ps(0x1.000008p0F));
  return _mm256_fmsub_ps(power, shift, _mm256_fmsub_ps(power, shift, number));
}

// The nearest number of E4M3 to x >= 0 (formats/e4m3_rounding.h).
__m256 nearest_e4m3(__m256 x) {
  const __m256 shift = _mm256_set1_ps(0x1p20F);
  const __m256 number = _mm256_min_ps(x, _mm256_set1_ps(448.0F));
  const __m256 power = _mm256_max_ps(number, _mm256_set1_ps(0x1.00002p-6F));
  return _mm256_fmsub_ps(power, shift, _mm256_fmsub_ps(power, shift, number));
}

// sum + weight * (x - decoded)^2 in four lanes.
__m256d add_error(__m256d sum, __m256d x, __m256d weight, __m128 decoded) {
  const __m256d error = _mm256_sub_pd(x, _mm256_cvtps_pd(decoded));
  return _mm256_add_pd(sum, _mm256_mul_pd(_mm256_mul_pd(weight, error), error));
}

// Signs do not matter: a code has its element's sign.
template <__m256 (*kNearest)(__m256)>
void errors_of(const SearchedBlock& block, const float* multipliers, const float* factors,
               double* errors) {
  const __m256 multiplier = _mm256_loadu_ps(multipliers);
  const __m256 factor = _mm256_loadu_ps(factors);
  __m256d low = _mm256_setzero_pd();
  __m256d high = _mm256_setzero_pd();
  for (int64_t i = 0; i < block.cols; ++i) {
    const float magnitude = __builtin_fabsf(block.x[i]);
    const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(magnitude), multiplier);
    const __m256 decoded = _mm256_mul_ps(kNearest(scaled), factor);
    const __m256d x = _mm256_set1_pd(static_cast<double>(magnitude));
    const __m256d weight = _mm256_set1_pd(static_cast<double>(block.weights[i]));
    low = add_error(low, x, weight, _mm256_castps256_ps128(decoded));
    high = add_error(high, x, weight, _mm256_extractf128_ps(decoded, 1));
  }
  _mm256_storeu_pd(errors, low);
  _mm256_storeu_pd(errors + 4, high);
}

}  // namespace

const ScaleSearchKernels kScaleSearchKernelsAvx2 = {.of_e2m1 = errors_of<nearest_e2m1>,
                                                    .of_e4m3 = errors_of<nearest_e4m3>};

}  // namespace narrowfloat
