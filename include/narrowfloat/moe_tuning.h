// Token tiles that measured faster than the rule default_token_tile() on one kind of machine, for
// one shape, by `narrowfloat moe tune`. A file of them is readable JSON; a layer takes the entries
// that match it and ignores the others.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/activation.h"
#include "narrowfloat/export.h"
#include "narrowfloat/moe.h"

namespace narrowfloat {

// The subject of an entry: every member must be equal.
struct MoeTuningKey {
  std::string machine;  // Name of the GPU, or model of the CPU.
  std::string version;  // Library version: kernels differ.
  MoeMode mode = MoeMode::kBf16;
  ActivationKind activation = ActivationKind::kSwiglu;  // Without its parameters.
  int64_t hidden = 0;
  int64_t inter = 0;
  int32_t slots = 0;          // Experts of a token: k + S.
  int32_t experts = 0;        // E
  int32_t local_experts = 0;  // EL + S

  bool operator==(const MoeTuningKey&) const = default;
};
// The key of a layer on `device`: machine and version are those of this process.
NARROWFLOAT_API MoeTuningKey moe_tuning_key(const MoeConfig& config, Device device = {});

struct MoeTuningEntry {
  MoeTuningKey key;
  int64_t first_tokens = 0;  // First number of tokens
  int64_t last_tokens = 0;   // and last one that the entry covers.
  int32_t token_tile = 0;
  int32_t rule_tile = 0;  // Tile by the rule for `first_tokens`, where both were measured.
  double us = 0;          // Median time of a run with token_tile, in microseconds.
  double rule_us = 0;     // The same with rule_tile.
};

class NARROWFLOAT_API MoeTuning {
 public:
  // An entry must be faster than the rule by this factor: less may be chance.
  static constexpr double kMinGain = 1.03;

  MoeTuning() = default;
  // Throws kCorruptData for entries that contradict themselves or each other.
  explicit MoeTuning(std::vector<MoeTuningEntry> entries);

  // Both throw kCorruptData for text that to_json() cannot have written, files of format_version 1
  // (which do not name the activation) among them; load() throws kIo as well.
  static MoeTuning parse(std::string_view json);
  static MoeTuning load(const std::string& path);
  [[nodiscard]] std::string to_json() const;
  // Makes the file appear complete and on disk, or not at all. Throws kIo, also if it exists and is
  // not to be replaced.
  void save(const std::string& path, bool replace = false) const;

  [[nodiscard]] std::span<const MoeTuningEntry> entries() const { return entries_; }

 private:
  std::vector<MoeTuningEntry> entries_;
};

// The token tile of a run on `tokens` tokens, and its origin: config.token_tile, an entry of
// `tuning`, or the rule. The explanation's candidates are these three, with the reasons. Throws
// kInvalidArgument for a configuration that no layer can have.
struct TokenTileChoice {
  int32_t token_tile = 0;
  Explanation explanation;
};
NARROWFLOAT_API TokenTileChoice choose_token_tile(const MoeConfig& config, int64_t tokens,
                                                  Device device = {}, const MoeTuning& tuning = {});

}  // namespace narrowfloat
