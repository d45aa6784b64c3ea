// Encodes whole blocks of a row with the kernels of a vector level, and gives the bytes of
// BlockEncoder. What the kernels do not cover, block_encoder.h computes: NaN in a block, factors
// that are no positive normal numbers, numbers that `fast` flushes, 4-over-6 in `fast`.
#pragma once

#include <array>

#include "base/int_math.h"
#include "ops/quantize/block_encoder.h"
#include "ops/quantize/x86/block_kernels.h"
#include "tensor/element_io.h"

namespace narrowfloat {

// Consecutive elements of a row. dtype: F32, BF16 or F16.
struct ElementRun {
  const void* first;
  DType dtype;

  [[nodiscard]] ElementRun from(int64_t elem) const {
    return {element_pointer(first, dtype, elem), dtype};
  }
  [[nodiscard]] int kernel_input() const {
    const KernelInput input = dtype == DType::kBF16  ? KernelInput::kBf16
                              : dtype == DType::kF16 ? KernelInput::kF16
                                                     : KernelInput::kF32;
    return static_cast<int>(input);
  }
};

// The bits of the largest magnitude among `count` elements, a multiple of 16; NaN is ignored.
inline uint32_t run_amax_bits(const BlockKernels& kernels, const ElementRun& run, int64_t count) {
  constexpr int64_t kAtOnce = 2048;
  std::array<float, kAtOnce / 16> maxima;
  std::array<float, kAtOnce> buffer;
  AbsMax amax;
  for (int64_t done = 0; done < count; done += kAtOnce) {
    const int64_t n = std::min(kAtOnce, count - done);
    const bool has_128s = n % 128 == 0;
    const KernelBlock block = has_128s ? KernelBlock::k128 : KernelBlock::k16;
    const int64_t blocks = n / (has_128s ? 128 : 16);
    const ElementRun part = run.from(done);
    const auto kernel = kernels.maxima[part.kernel_input()][static_cast<int>(block)];
    if (kernel(part.first, blocks, maxima.data())) {
      amax.add(maxima.data(), blocks);
    } else {
      widen(part.dtype, part.first, n, buffer.data());
      amax.add(buffer.data(), n);
    }
  }
  return float_bits(amax.or_zero());
}

// Whether the kernels give the codes of products with a multiplier. They keep denormal elements:
// with a multiplier within the limit these have the code 0 or -0, as `fast` gives them, which
// flushes them.
template <class Math>
bool has_kernel_codes(float multiplier) {
  return std::fabs(multiplier) <= (Math::kMode == MathMode::kFast ? 0x1p100F : kFloatMax);
}

template <BlockFormat Format, class Math>
class KernelEncoder {
 public:
  using Stored = typename Format::Stored;
  static constexpr int64_t kCols = Format::kBlockCols;
  KernelEncoder(const QuantizeProblem& problem, const BlockKernels& kernels)
      : problem_(problem), encoder_(problem), kernels_(kernels) {}

  // Stores the scales and packed codes of up to kMaxKernelBlocks blocks; `scales` has room for as
  // many.
  void encode(const ElementRun& run, int64_t blocks, const RowScaling& row, Stored* scales,
              uint8_t* codes) const {
    if constexpr (Format::kHasGlobalScale) {
      if (problem_.four_over_six.enabled) {
        return encode_four_over_six(run, blocks, row, scales, codes);
      }
    }
    const ScalePair& pair = row.pair;
    std::array<float, kMaxKernelBlocks> maxima;
    std::array<float, kMaxKernelBlocks> multipliers;
    const int input = run.kernel_input();
    const bool is_finite =
        kernels_.maxima[input][static_cast<int>(kBlock)](run.first, blocks, maxima.data());
    const bool is_covered =
        is_finite && kernel_scales(maxima.data(), blocks, pair, scales, multipliers.data());
    if (!is_covered) {
      for (int64_t i = 0; i < blocks; ++i) {
        const auto index = static_cast<size_t>(i);
        const float amax = is_nan(maxima[index]) ? amax_with_nan(run, i) : maxima[index];
        const BlockScale<Stored> scale = encoder_.block_scale(amax, pair);
        scales[i] = scale.stored;
        multipliers[index] = scale.multiplier;
      }
    }
    kernels_.codes[input][static_cast<int>(kCodes)](run.first, blocks, multipliers.data(), codes);
    if (is_covered && Math::kMode == MathMode::kExact) return;
    for (int64_t i = 0; i < blocks; ++i) {
      const auto index = static_cast<size_t>(i);
      const bool has_codes =
          std::fabs(maxima[index]) <= kFloatMax && has_kernel_codes<Math>(multipliers[index]);
      if (!has_codes) encode_block(run, i, multipliers[index], codes);
    }
  }

 private:
  using Element = typename Format::Element;
  static constexpr KernelBlock kBlock = kCols == 16   ? KernelBlock::k16
                                        : kCols == 32 ? KernelBlock::k32
                                                      : KernelBlock::k128;
  static constexpr KernelCodes kCodes = Element::kBits == 4 && kCols == 16 ? KernelCodes::kE2M1Of16
                                        : Element::kBits == 4              ? KernelCodes::kE2M1Of32
                                        : kCols == 32                      ? KernelCodes::kE4M3Of32
                                                      : KernelCodes::kE4M3Of128;
  static bool is_positive_normal(float x) { return x >= 0x1p-126F && x <= kFloatMax; }
  static bool is_covered(const ScalePair& pair) {
    return is_positive_normal(pair.encode) && is_positive_normal(pair.decode);
  }

  [[nodiscard]] float amax_with_nan(const ElementRun& run, int64_t block_idx) const {
    std::array<float, kCols> x;
    widen(run.dtype, run.from(block_idx * kCols).first, kCols, x.data());
    return block_amax<Format>(x.data(), kCols);
  }

  void encode_four_over_six(const ElementRun& run, int64_t blocks, const RowScaling& row,
                            uint8_t* scales, uint8_t* codes) const {
    std::array<float, kMaxKernelBlocks> maxima;
    std::array<float, kMaxKernelBlocks> multipliers;
    const int input = run.kernel_input();
    const bool is_finite =
        kernels_.maxima[input][static_cast<int>(kBlock)](run.first, blocks, maxima.data());
    const FourOverSix& options = problem_.four_over_six;
    using Difference = FourOverSixKernelRule::Difference;
    const FourOverSixKernelRule rule{
        .encode = row.pair.encode,
        .decode = row.pair.decode,
        .difference = options.error_math == FourOverSixMath::kFast ? Difference::kFast
                      : row.row_amax > 0.0F                        ? Difference::kStrictPerToken
                                                                   : Difference::kStrict,
        .is_fast = Math::kMode == MathMode::kFast,
        .is_squared = options.error == FourOverSixError::kMse,
        .row_amax = row.row_amax,
        .code_range = static_cast<float>(options.e4m3_max) * 6.0F};
    const bool has_scales = is_finite && is_covered(row.pair) &&
                            kernels_.four_over_six_scales[input](run.first, blocks, maxima.data(),
                                                                 rule, scales, multipliers.data());
    if (!has_scales) {
      std::array<float, kCols> x;
      std::array<uint8_t, kCols> block_codes;
      for (int64_t i = 0; i < blocks; ++i) {
        widen(run.dtype, run.from(i * kCols).first, kCols, x.data());
        scales[i] = encoder_.encode(x.data(), kCols, row, block_codes.data());
        pack_codes<Element>(block_codes.data(), i * kCols, kCols, codes);
      }
      return;
    }
    kernels_.codes[input][static_cast<int>(kCodes)](run.first, blocks, multipliers.data(), codes);
    // Blocks of zeros drop the signs of these.
    constexpr int64_t kBlockBytes = kCols * Element::kBits / 8;
    for (int64_t i = 0; i < blocks; ++i) {
      if (Math::flush(maxima[static_cast<size_t>(i)]) == 0.0F) {
        std::memset(codes + i * kBlockBytes, 0, static_cast<size_t>(kBlockBytes));
      }
    }
  }

  // Returns false where the kernels do not cover the scales.
  bool kernel_scales(const float* maxima, int64_t blocks, const ScalePair& pair, Stored* scales,
                     float* multipliers) const {
    if constexpr (Format::kScaleType == ScaleType::kF32) {
      if (Math::kMode == MathMode::kFast) return false;
      using Kind = Fp8KernelRule::Kind;
      const Fp8ScaleRule kind = problem_.rules.fp8_rule;
      const Fp8KernelRule rule{.kind = kind == Fp8ScaleRule::kAmaxDiv    ? Kind::kAmaxDiv
                                       : kind == Fp8ScaleRule::kPow2Ceil ? Kind::kPow2Ceil
                                       : kind == Fp8ScaleRule::kReciprocalPow2
                                           ? Kind::kReciprocalPow2
                                           : Kind::kReciprocal,
                               .eps = problem_.rules.fp8_eps,
                               .input_max = problem_.rules.input_max};
      return kernels_.fp8_scales(maxima, blocks, rule, scales, multipliers);
    } else if constexpr (Format::kScaleType == ScaleType::kUE8M0) {
      if (problem_.input == DType::kF8E4M3) return false;
      using Rounding = MxScaleRule::Rounding;
      const Ue8m0Rounding rounding = problem_.rules.mx_rounding;
      const MxScaleRule rule{.rounding = rounding == Ue8m0Rounding::kUp      ? Rounding::kUp
                                         : rounding == Ue8m0Rounding::kFloor ? Rounding::kFloor
                                                                             : Rounding::kEven,
                             .is_fast = Math::kMode == MathMode::kFast,
                             .reciprocal_of_largest = 1.0F / Element::kMaxFinite,
                             .max_exponent = Element::kMaxExponent,
                             .half_unit = 1 << (22 - Element::kMantissaBits)};
      return kernels_.mx_scales(maxima, blocks, rule, scales, multipliers);
    } else {
      if (problem_.input == DType::kF8E4M3 || !is_covered(pair)) return false;
      const Nvfp4ScaleRule rule{.encode = pair.encode,
                                .encode_sixth = mul_rn(pair.encode, kOneSixth),
                                .decode = pair.decode,
                                .is_fast = Math::kMode == MathMode::kFast};
      kernels_.nvfp4_scales(maxima, blocks, rule, scales, multipliers);
      return true;
    }
  }

  void encode_block(const ElementRun& run, int64_t block_idx, float multiplier,
                    uint8_t* codes) const {
    std::array<float, kCols> x;
    std::array<uint8_t, kCols> block_codes;
    widen(run.dtype, run.from(block_idx * kCols).first, kCols, x.data());
    encode_values<Format, Math>(x.data(), kCols, multiplier, block_codes.data());
    pack_codes<Element>(block_codes.data(), block_idx * kCols, kCols, codes);
  }

  const QuantizeProblem& problem_;
  BlockEncoder<Format, Math> encoder_;
  const BlockKernels& kernels_;
};

}  // namespace narrowfloat
