// How weights are quantized: the settings, which of them a format has a use for, and the words of
// `narrowfloat.settings`, by which files record how they were made.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/conventions/convention.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// The key in the metadata of files.
inline constexpr const char* kSettingsKey = "narrowfloat.settings";

struct EncodeSettings {
  MathMode math = MathMode::kExact;
  Ue8m0Rounding mx_scale = Ue8m0Rounding::kUp;
  ScaleSearch scale_search = ScaleSearch::kAmax;
};

// "amax", "4over6" or "full", and the reverse; none for another word.
std::string_view name(ScaleSearch search);
std::optional<ScaleSearch> find_scale_search(std::string_view text);

// Throws kInvalidArgument for settings that the convention's format has no use for.
void check_encode_settings(const EncodeSettings& settings, const ConventionSpec& spec);

// "math=exact mx_scale=up scale_search=amax".
std::string settings_text(const EncodeSettings& settings);
// " gptq=FINGERPRINT" and " activation_moments=FINGERPRINT" follow them, of the files of
// statistics.
std::string gptq_text(std::string_view fingerprint);
std::string activation_moments_text(std::string_view fingerprint);

// How a checkpoint was made, as its files record it.
struct RecordedSettings {
  // Empty unless they are of quantize_checkpoint(), without rules.
  std::optional<EncodeSettings> encode;
  bool has_gptq = false;
  // The words about statistics of calibration, each after a space. They are true of what is made of
  // the weights, too.
  std::string statistics;

  // Calibration was part of it: GPTQ, or weights of a search.
  [[nodiscard]] bool has_statistics() const { return !statistics.empty(); }
};
RecordedSettings parse_settings(std::string_view text);
// Those of the files of a checkpoint.
RecordedSettings recorded_settings(const Checkpoint& checkpoint);

}  // namespace narrowfloat
