// A format that forgets one of the members every user of the list relies on.
#include "formats/registry.h"

struct Incomplete {
  static constexpr auto kId = narrowfloat::FormatId::kMxfp4;
  static constexpr std::string_view kName = "incomplete";
  static constexpr std::string_view kDescription = "has no scale type";
  static constexpr int64_t kBlockRows = 1;
  static constexpr int64_t kBlockCols = 32;
#if !defined(NF_MUST_FAIL)
  static constexpr auto kScaleType = narrowfloat::ScaleType::kUE8M0;
#endif
  static constexpr auto kDefaultLayout = narrowfloat::ScaleLayoutId::kLinear;
  static constexpr bool kHasGlobalScale = false;
  static constexpr bool kHasRowScale = false;
  static constexpr bool kAmaxOfNanIsNan = true;
  using Element = narrowfloat::E2M1;
  using Stored = uint8_t;
};

int main() { return narrowfloat::FormatList<Incomplete>::kSize; }
