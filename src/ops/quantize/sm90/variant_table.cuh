// The variants of a kernel that are compiled, most specific first. A variant has
//
//   is_compiled<Math>()                                     whether it exists for an arithmetic
//   takes<Format, Math>(problem, params)                    whether it runs the problem
//   launch_kernel<Format, Math>(problem, params, stream)    its launch
#pragma once

#include "narrowfloat/quantize.h"
#include "ops/quantize/sm90/quantize_params.h"

namespace narrowfloat {

template <class... Variants>
struct VariantTable {
  // Launches the first variant that takes the problem; returns false if none does.
  template <class Format, class Math>
  static bool launch_first(const QuantizeProblem& problem, const QuantizeParams& params,
                           Stream stream) {
    return (launch_if<Variants, Format, Math>(problem, params, stream) || ...);
  }

 private:
  template <class Variant, class Format, class Math>
  static bool launch_if(const QuantizeProblem& problem, const QuantizeParams& params,
                        Stream stream) {
    if constexpr (Variant::template is_compiled<Math>()) {
      if (!Variant::template takes<Format, Math>(problem, params)) return false;
      Variant::template launch_kernel<Format, Math>(problem, params, stream);
      return true;
    } else {
      return false;
    }
  }
};

// The arithmetics that a variant is compiled for.
struct BothMaths {
  template <class Math>
  static constexpr bool is_compiled() {
    return true;
  }
};
struct ExactMathOnly {
  template <class Math>
  static constexpr bool is_compiled() {
    return Math::kMode == MathMode::kExact;
  }
};

}  // namespace narrowfloat
