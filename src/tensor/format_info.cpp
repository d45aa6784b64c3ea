// The formats' properties as data, and the names of all enumerations.
#include <vector>

#include <fmt/ranges.h>

#include "base/bad_enumerator.h"
#include "base/throw_error.h"
#include "formats/registry.h"
#include "narrowfloat/format.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {
namespace {

// Spec 1.5: byte scales may be swizzled; F32 scales of 1x128 blocks may be mn_major.
template <BlockFormat Format>
constexpr std::array<bool, 4> legal_layouts() {
  if (kHasByteScales<Format>) return {true, true, true, false};
  return {true, false, false, Format::kId == FormatId::kFp8Block1x128};
}

template <BlockFormat Format>
constexpr FormatInfo make_info() {
  return {.id = Format::kId,
          .name = Format::kName,
          .description = Format::kDescription,
          .element_bits = Format::Element::kBits,
          .block_rows = Format::kBlockRows,
          .block_cols = Format::kBlockCols,
          .scale_type = Format::kScaleType,
          .default_layout = Format::kDefaultLayout,
          .layouts = legal_layouts<Format>(),
          .has_global_scale = Format::kHasGlobalScale,
          .has_row_scale = Format::kHasRowScale};
}

template <BlockFormat... Formats>
constexpr auto make_table(FormatList<Formats...> /*list*/) {
  return std::array{make_info<Formats>()...};
}

constexpr auto kFormats = make_table(AllFormats{});

// Looks `text` up among the names of enumerators 0, 1, ...
template <typename Enum, size_t kCount>
Enum parse(std::string_view what, std::string_view text) {
  std::vector<std::string_view> names;
  for (size_t i = 0; i < kCount; ++i) {
    const auto value = static_cast<Enum>(i);
    if (name(value) == text) return value;
    names.push_back(name(value));
  }
  throw_invalid("{}: expected one of {}, got \"{}\"", what, fmt::join(names, ", "), text);
}

}  // namespace

std::span<const FormatInfo> all_formats() { return kFormats; }

const FormatInfo& format_info(FormatId id) {
  const auto index = static_cast<size_t>(id);
  if (index >= kFormats.size()) throw_bad_enumerator("format", static_cast<int>(id));
  return kFormats[index];
}

std::string_view name(FormatId id) { return format_info(id).name; }

std::string_view name(ScaleType type) {
  switch (type) {
    case ScaleType::kE4M3:
      return "E4M3";
    case ScaleType::kUE8M0:
      return "UE8M0";
    case ScaleType::kF32:
      return "F32";
  }
  throw_bad_enumerator("scale type", static_cast<int>(type));
}

std::string_view name(ScaleLayoutId layout) {
  std::string_view result;
  visit_layout(layout, [&]<typename Layout>() { result = Layout::kName; });
  return result;
}

std::string_view name(MathMode mode) {
  switch (mode) {
    case MathMode::kExact:
      return "exact";
    case MathMode::kFast:
      return "fast";
  }
  throw_bad_enumerator("math mode", static_cast<int>(mode));
}

std::string_view name(Ue8m0Rounding rounding) {
  switch (rounding) {
    case Ue8m0Rounding::kUp:
      return "up";
    case Ue8m0Rounding::kFloor:
      return "floor";
    case Ue8m0Rounding::kEven:
      return "even";
  }
  throw_bad_enumerator("UE8M0 rounding", static_cast<int>(rounding));
}

std::string_view name(Fp8ScaleRule rule) {
  switch (rule) {
    case Fp8ScaleRule::kReciprocal:
      return "reciprocal";
    case Fp8ScaleRule::kReciprocalPow2:
      return "reciprocal_pow2";
    case Fp8ScaleRule::kAmaxDiv:
      return "amax_div";
    case Fp8ScaleRule::kPow2Ceil:
      return "pow2_ceil";
  }
  throw_bad_enumerator("FP8 scale rule", static_cast<int>(rule));
}

FormatId parse_format(std::string_view text) {
  return parse<FormatId, AllFormats::kSize>("format", text);
}
ScaleLayoutId parse_scale_layout(std::string_view text) {
  return parse<ScaleLayoutId, 4>("scale layout", text);
}
MathMode parse_math_mode(std::string_view text) { return parse<MathMode, 2>("math mode", text); }
Ue8m0Rounding parse_ue8m0_rounding(std::string_view text) {
  return parse<Ue8m0Rounding, 3>("UE8M0 rounding", text);
}

}  // namespace narrowfloat
