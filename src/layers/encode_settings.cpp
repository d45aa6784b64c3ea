// See encode_settings.h. Words that are not known, of rules and of conversions, leave the settings
// of the weights open.
#include "layers/encode_settings.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/bad_enumerator.h"
#include "base/throw_error.h"

namespace narrowfloat {
namespace {

template <typename Value>
using Names = std::array<std::pair<std::string_view, Value>, 3>;

constexpr Names<ScaleSearch> kSearches = {{{"amax", ScaleSearch::kAmax},
                                           {"4over6", ScaleSearch::kFourOverSix},
                                           {"full", ScaleSearch::kFull}}};

constexpr std::string_view kGptq = "gptq";
constexpr std::string_view kMoments = "activation_moments";

// The value of the enumeration with that name(), if there is one.
template <typename Value, size_t kSize>
std::optional<Value> find_named(const std::array<Value, kSize>& values, std::string_view text) {
  const auto found =
      std::find_if(values.begin(), values.end(), [&](Value value) { return name(value) == text; });
  if (found == values.end()) return std::nullopt;
  return *found;
}

// Sets `target` and returns true if `value` is there.
template <typename Value>
bool take(const std::optional<Value>& value, Value& target) {
  if (value) target = *value;
  return value.has_value();
}

bool read_word(std::string_view key, std::string_view value, EncodeSettings& settings) {
  if (key == "math") {
    return take(find_named(std::array{MathMode::kExact, MathMode::kFast}, value), settings.math);
  }
  if (key == "mx_scale") {
    return take(
        find_named(std::array{Ue8m0Rounding::kUp, Ue8m0Rounding::kFloor, Ue8m0Rounding::kEven},
                   value),
        settings.mx_scale);
  }
  return key == "scale_search" && take(find_scale_search(value), settings.scale_search);
}

}  // namespace

std::string_view name(ScaleSearch search) {
  for (const auto& [text, value] : kSearches) {
    if (value == search) return text;
  }
  throw_bad_enumerator("scale_search", static_cast<int>(search));
}

std::optional<ScaleSearch> find_scale_search(std::string_view text) {
  for (const auto& [known, value] : kSearches) {
    if (known == text) return value;
  }
  return std::nullopt;
}

void check_encode_settings(const EncodeSettings& settings, const ConventionSpec& spec) {
  const FormatId format = spec.info.format;
  const bool is_mx = format == FormatId::kMxfp4 || format == FormatId::kMxfp8;
  if (settings.mx_scale != Ue8m0Rounding::kUp && !is_mx) {
    throw_invalid("option mx_scale: '{}' is for mxfp4 and mxfp8, not for {}; leave it at 'up'",
                  name(settings.mx_scale), spec.info.name);
  }
  if (settings.scale_search == ScaleSearch::kFourOverSix && format != FormatId::kNvfp4) {
    throw_invalid("option scale_search: 4over6 is for nvfp4, not for {}; leave it at 'amax'",
                  spec.info.name);
  }
  if (settings.scale_search == ScaleSearch::kFull && format != FormatId::kNvfp4 && !is_mx) {
    throw_invalid(
        "option scale_search: full is for nvfp4, mxfp4 and mxfp8, not for {}; leave it at 'amax'",
        spec.info.name);
  }
}

std::string settings_text(const EncodeSettings& settings) {
  return fmt::format("math={} mx_scale={} scale_search={}", name(settings.math),
                     name(settings.mx_scale), name(settings.scale_search));
}

std::string gptq_text(std::string_view fingerprint) {
  return fmt::format(" {}={}", kGptq, fingerprint);
}

std::string activation_moments_text(std::string_view fingerprint) {
  return fmt::format(" {}={}", kMoments, fingerprint);
}

RecordedSettings parse_settings(std::string_view text) {
  RecordedSettings found;
  EncodeSettings settings;
  bool is_known = !text.empty();
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t equals = std::min(word.find('='), word.size());
    const std::string_view key = word.substr(0, equals);
    if (key == kGptq || key == kMoments) {
      found.has_gptq = found.has_gptq || key == kGptq;
      found.statistics.append(" ").append(word);
    } else if (!read_word(key, word.substr(std::min(equals + 1, word.size())), settings)) {
      is_known = false;
    }
  }
  if (is_known) found.encode = settings;
  return found;
}

RecordedSettings recorded_settings(const Checkpoint& checkpoint) {
  for (const SafetensorsReader& shard : checkpoint.shards()) {
    const auto entry = shard.metadata().find(kSettingsKey);
    if (entry != shard.metadata().end()) return parse_settings(entry->second);
  }
  return {};
}

}  // namespace narrowfloat
