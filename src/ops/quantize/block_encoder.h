// Encodes one block: from its elements as fp32 to its stored scale and its codes, one code per
// byte. The problem says whether the format's rule, the 4-over-6 search or the E4M3-input rule
// applies.
#pragma once

#include "formats/block_codes.h"
#include "formats/four_over_six.h"
#include "formats/fp8_input.h"
#include "formats/registry.h"
#include "ops/quantize/quantize_problem.h"

namespace narrowfloat {

// Parameters that all blocks of a row share.
struct RowScaling {
  ScalePair pair;
  float row_amax = 0.0F;  // Set for per-token scales only.
};

template <BlockFormat Format, class Math>
class BlockEncoder {
 public:
  using Stored = typename Format::Stored;

  explicit BlockEncoder(const QuantizeProblem& problem) : problem_(problem) {}

  Stored encode(const float* x, int64_t count, const RowScaling& row, uint8_t* codes) const {
    const float amax = block_amax<Format>(x, count);
    if constexpr (Format::kHasGlobalScale) {
      if (problem_.four_over_six.enabled) return encode_four_over_six(x, amax, row, codes);
    }
    const BlockScale<Stored> scale = block_scale(amax, row.pair);
    encode_values<Format, Math>(x, count, scale.multiplier, codes);
    return scale.stored;
  }

  // True where block_scale() and Format::encode describe a block completely.
  [[nodiscard]] bool is_plain() const { return !problem_.four_over_six.enabled; }

  [[nodiscard]] BlockScale<Stored> block_scale(float amax, const ScalePair& pair) const {
    if (problem_.input == DType::kF8E4M3) {
      if constexpr (Format::kId == FormatId::kNvfp4) return Fp8Input<Math>::nvfp4_scale(amax, pair);
      if constexpr (Format::kId == FormatId::kMxfp4) return Fp8Input<Math>::mxfp4_scale(amax, pair);
    }
    return Format::template block_scale<Math>(amax, pair, problem_.rules);
  }

 private:
  uint8_t encode_four_over_six(const float* x, float amax, const RowScaling& row,
                               uint8_t* codes) const {
    const FourOverSix& options = problem_.four_over_six;
    const FourOverSixRules rules{.error = options.error,
                                 .error_math = options.error_math,
                                 .code_range = static_cast<float>(options.e4m3_max) * 6.0F,
                                 .row_amax = row.row_amax};
    const FourOverSixBlock block = FourOverSixSearch<Math>::encode(x, amax, row.pair, rules);
    for (int i = 0; i < FourOverSixBlock::kSize; ++i) codes[i] = block.codes[i];
    return block.stored;
  }

  const QuantizeProblem& problem_;
};

// Calls visitor.template operator()<Format, Math>() for the problem's format and arithmetic.
template <typename Visitor>
void visit_format_and_math(const QuantizeProblem& problem, Visitor&& visitor) {
  visit_format(problem.format, [&]<BlockFormat Format>() {
    if (effective_math(problem) == MathMode::kExact) {
      visitor.template operator()<Format, ExactMath>();
    } else {
      visitor.template operator()<Format, FastMath>();
    }
  });
}

}  // namespace narrowfloat
