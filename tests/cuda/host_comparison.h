// Quantizing a host matrix on the GPU and on the host: the same bytes, or the first place where
// they differ with everything needed to understand it. And the requests that codecs are tested
// with.
#pragma once

#include <string>
#include <vector>

#include "support/tensors.h"

namespace narrowfloat::testing {

// A request in words. Options hold host values only.
struct QuantizeVariant {
  std::string name;
  QuantizeTo to;
};

// Every format in both math modes, with all the scales, rules and roundings that it knows; linear
// scales.
std::vector<QuantizeVariant> all_variants();
// One request for each format, layout and math mode; default options.
std::vector<QuantizeVariant> default_variants();

// Empty, or the difference in words. `encode_scales`, if not empty, replaces the variant's.
std::string compare_with_host(const Matrix& input, const QuantizeVariant& variant,
                              const std::vector<float>& encode_scales = {});

}  // namespace narrowfloat::testing
