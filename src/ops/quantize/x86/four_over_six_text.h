// The choice of formats/four_over_six.h for kLanes blocks at once, written against the level of
// block_kernels_text.h: lane j of every vector belongs to block j, so that the errors of a block
// are summed in the order of its elements.
//
// Signs do not matter: a code has its element's sign, and the arithmetic is symmetric.
#pragma once

#include "ops/quantize/x86/block_kernels_text.h"

namespace narrowfloat::four_over_six {

inline constexpr int kBlock = 16;

// Element i's magnitude of kLanes blocks; those from block `blocks` on are 0.
template <class Level, KernelInput kInput>
void load_blocks(const void* x, int64_t first_block, int64_t blocks,
                 typename Level::Floats (&elements)[kBlock]) {
  constexpr int kLanes = Level::kLanes;
  for (int first = 0; first < kBlock; first += kLanes) {
    typename Level::Ints rows[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t block = first_block + j;
      rows[j] = block < blocks
                    ? Level::bits(Level::template load<kInput>(x, block * kBlock + first))
                    : Level::ints(0);
    }
    Level::transpose(rows);
    for (int i = 0; i < kLanes; ++i) {
      elements[first + i] = Level::floats(Level::bit_and(rows[i], block_kernels::kMagnitude));
    }
  }
}

// 1 / (scale * decode).
template <class Level, bool kIsFast>
typename Level::Floats multiplier_of(typename Level::Floats scale, float decode) {
  const auto product = Level::mul(scale, Level::floats(decode));
  if constexpr (kIsFast) return fast_math_text::rcp_approx<Level>(product);
  return Level::min(Level::div(Level::floats(1.0F), product), Level::floats(0x1.fffffep127F));
}

// A scale to try, and what it gives.
template <class Level, bool kIsFast>
struct Candidate {
  block_kernels::RoundedE4m3<Level> scale;
  typename Level::Floats multiplier;
  typename Level::Floats error;

  Candidate(typename Level::Floats unrounded, const FourOverSixKernelRule& rule)
      : scale(block_kernels::round_to_e4m3<Level>(unrounded)),
        multiplier(multiplier_of<Level, kIsFast>(scale.values, rule.decode)),
        error(Level::floats(0.0F)) {}

  void add_error(typename Level::Floats x, const FourOverSixKernelRule& rule) {
    using Difference = FourOverSixKernelRule::Difference;
    const auto scaled = Level::mul(rounded(Level::mul(x, multiplier)), scale.values);
    auto decoded = scaled;
    auto element = x;
    if (rule.difference == Difference::kFast) {
      element = Level::mul(x, Level::floats(rule.encode));
    } else if (rule.difference == Difference::kStrictPerToken) {
      decoded = Level::div(Level::mul(scaled, Level::floats(rule.row_amax)),
                           Level::floats(rule.code_range));
    } else {
      decoded = Level::mul(scaled, Level::floats(rule.decode));
    }
    const auto error_of_x = Level::sub(decoded, element);
    const auto term =
        rule.is_squared
            ? Level::mul(error_of_x, error_of_x)
            : Level::floats(Level::bit_and(Level::bits(error_of_x), block_kernels::kMagnitude));
    error = Level::add(error, term);
  }

  // The nearest number of E2M1 (formats/e2m1_grid.h).
  static typename Level::Floats rounded(typename Level::Floats x) {
    const auto number = Level::min(x, Level::floats(6.0F));
    const auto power = Level::max(number, Level::floats(0x1.000008p0F));
    const auto shifted = Level::fmsub(power, Level::floats(0x1p22F), number);
    return Level::fmsub(power, Level::floats(0x1p22F), shifted);
  }
};

template <class Level, bool kIsFast>
typename Level::Floats scale_of_six(typename Level::Floats amax, float encode) {
  if constexpr (kIsFast) {
    constexpr float kOneSixth = 1.0F / 6.0F;
    return Level::mul(Level::floats(encode), Level::mul(amax, Level::floats(kOneSixth)));
  }
  return Level::mul(Level::div(amax, Level::floats(6.0F)), Level::floats(encode));
}

// Sets is_covered: in `fast` a multiplier beyond the limit, as of a scale of 0, is not.
template <class Level, KernelInput kInput, bool kIsFast>
[[gnu::noinline]] void choose_scales(const void* x, int64_t blocks, const float* maxima,
                                     const FourOverSixKernelRule* rule_of_call, uint8_t* stored,
                                     float* multipliers, bool* is_covered) {
  const FourOverSixKernelRule& rule = *rule_of_call;
  using Floats = typename Level::Floats;
  const auto limit = Level::bits(Level::floats(kIsFast ? 0x1p100F : 0x1.fffffep127F));
  auto uncovered = Level::none();
  for (int64_t block = 0; block < blocks; block += Level::kLanes) {
    Floats elements[kBlock];
    load_blocks<Level, kInput>(x, block, blocks, elements);
    const Floats amax = Level::template load<KernelInput::kF32>(maxima, block);
    const Floats unrounded = scale_of_six<Level, kIsFast>(amax, rule.encode);
    Candidate<Level, kIsFast> six(unrounded, rule);
    Candidate<Level, kIsFast> four(Level::mul(unrounded, Level::floats(1.5F)), rule);
    for (const Floats& element : elements) {
      six.add_error(element, rule);
      four.add_error(element, rule);
    }
    // Ties and NaN keep 6.
    const auto is_four = Level::is_less(four.error, six.error);
    constexpr int32_t kLeast = kIsFast ? block_kernels::kSmallestNormal : 1;
    const auto is_zero = Level::greater(Level::ints(kLeast), Level::bits(amax));
    const auto or_zero = [&](typename Level::Ints bits) {
      return Level::select(is_zero, Level::ints(0), bits);
    };
    const auto chosen = [&](typename Level::Ints of_four, typename Level::Ints of_six) {
      return or_zero(Level::select(is_four, of_four, of_six));
    };
    const auto larger =
        or_zero(Level::max(Level::bits(six.multiplier), Level::bits(four.multiplier)));
    uncovered = Level::either(uncovered, Level::greater(larger, limit));
    Level::store_bytes(stored + block, chosen(four.scale.codes, six.scale.codes));
    Level::store(multipliers + block,
                 Level::floats(chosen(Level::bits(four.multiplier), Level::bits(six.multiplier))));
  }
  *is_covered = !Level::any(uncovered);
}

template <class Level, KernelInput kInput>
bool scales(const void* x, int64_t blocks, const float* maxima, const FourOverSixKernelRule& rule,
            uint8_t* stored, float* multipliers) {
  bool is_covered = false;
  if (rule.is_fast) {
    fast_math_text::with_flushes<Level>(choose_scales<Level, kInput, true>, x, blocks, maxima,
                                        &rule, stored, multipliers, &is_covered);
  } else {
    choose_scales<Level, kInput, false>(x, blocks, maxima, &rule, stored, multipliers, &is_covered);
  }
  return is_covered;
}

}  // namespace narrowfloat::four_over_six
