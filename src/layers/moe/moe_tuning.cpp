// The file is JSON that people read and compare, with one object a line. Times in microseconds are
// written unrounded, so that a file read and written again is the same.
#include "narrowfloat/moe_tuning.h"

#include <algorithm>
#include <bit>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/throw_error.h"
#include "checkpoint/file_io.h"
#include "checkpoint/json_guard.h"
#include "layers/moe/moe_checks.h"
#include "layers/moe/tuned_tiles.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kFormat = "narrowfloat moe tuning";
constexpr int kFormatVersion = 2;
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 20U;
constexpr int32_t kMaxTile = 1024;

[[noreturn]] void refuse(size_t index, std::string_view message) {
  throw_error(ErrorKind::kCorruptData, "moe tuning: entry {}: {}", index, message);
}

void check_entry(const MoeTuningEntry& entry, size_t index) {
  if (entry.first_tokens < 1 || entry.last_tokens < entry.first_tokens) {
    refuse(index, fmt::format("expected tokens from 1 on in ascending order, got {} to {}",
                              entry.first_tokens, entry.last_tokens));
  }
  for (const int32_t tile : {entry.token_tile, entry.rule_tile}) {
    if (tile < 1 || tile > kMaxTile || !std::has_single_bit(static_cast<uint32_t>(tile))) {
      refuse(index,
             fmt::format("expected tiles that are powers of two up to {}, got {}", kMaxTile, tile));
    }
  }
  // NaN is refused, too.
  if (!(entry.us > 0 && entry.us * MoeTuning::kMinGain <= entry.rule_us)) {
    refuse(index, fmt::format("expected a time at least {:.0f} % below that of the rule, got {} us "
                              "and {} us",
                              100 * (MoeTuning::kMinGain - 1), entry.us, entry.rule_us));
  }
}

bool overlap(const MoeTuningEntry& a, const MoeTuningEntry& b) {
  return a.key == b.key && a.first_tokens <= b.last_tokens && b.first_tokens <= a.last_tokens;
}

Json entry_json(const MoeTuningEntry& entry) {
  const MoeTuningKey& key = entry.key;
  return Json{{"machine", key.machine},
              {"version", key.version},
              {"mode", name(key.mode)},
              {"activation", name(key.activation)},
              {"hidden", key.hidden},
              {"inter", key.inter},
              {"slots", key.slots},
              {"experts", key.experts},
              {"local_experts", key.local_experts},
              {"first_tokens", entry.first_tokens},
              {"last_tokens", entry.last_tokens},
              {"token_tile", entry.token_tile},
              {"rule_tile", entry.rule_tile},
              {"us", entry.us},
              {"rule_us", entry.rule_us}};
}

// Reads the members of one entry; each is read once, and none may be left.
class EntryReader {
 public:
  EntryReader(const Json& object, size_t index) : object_(object), index_(index) {
    if (!object.is_object()) refuse(index, "expected an object");
  }

  std::string text(const char* member) {
    const Json& value = at(member);
    if (!value.is_string()) refuse(index_, fmt::format("{}: expected a string", member));
    return value.get<std::string>();
  }
  int64_t integer(const char* member) {
    constexpr int64_t kMax = int64_t{1} << 31U;
    const Json& value = at(member);
    const bool fits = value.is_number_integer() && value >= 0 && value < kMax;
    if (!fits) refuse(index_, fmt::format("{}: expected a number below 2^31", member));
    return value.get<int64_t>();
  }
  int32_t small_integer(const char* member) { return static_cast<int32_t>(integer(member)); }
  double number(const char* member) {
    const Json& value = at(member);
    if (!value.is_number()) refuse(index_, fmt::format("{}: expected a number", member));
    return value.get<double>();
  }
  void finish() const {
    if (num_read_ != object_.size()) refuse(index_, "there are unknown members");
  }

 private:
  const Json& at(const char* member) {
    const auto found = object_.find(member);
    if (found == object_.end()) refuse(index_, fmt::format("{} is missing", member));
    ++num_read_;
    return *found;
  }

  const Json& object_;
  size_t index_;
  size_t num_read_ = 0;
};

MoeMode mode_of(const std::string& text, size_t index) {
  for (const MoeModeInfo& info : all_moe_modes()) {
    if (info.name == text) return info.id;
  }
  refuse(index, fmt::format("mode: there is no mode '{}'", printable(text)));
}

ActivationKind activation_of(const std::string& text, size_t index) {
  for (const ActivationInfo& info : all_activations()) {
    if (info.name == text) return info.id;
  }
  refuse(index, fmt::format("activation: there is no activation '{}'", printable(text)));
}

MoeTuningEntry read_entry(const Json& object, size_t index) {
  EntryReader reader(object, index);
  MoeTuningEntry entry;
  entry.key.machine = reader.text("machine");
  entry.key.version = reader.text("version");
  entry.key.mode = mode_of(reader.text("mode"), index);
  entry.key.activation = activation_of(reader.text("activation"), index);
  entry.key.hidden = reader.integer("hidden");
  entry.key.inter = reader.integer("inter");
  entry.key.slots = reader.small_integer("slots");
  entry.key.experts = reader.small_integer("experts");
  entry.key.local_experts = reader.small_integer("local_experts");
  entry.first_tokens = reader.integer("first_tokens");
  entry.last_tokens = reader.integer("last_tokens");
  entry.token_tile = reader.small_integer("token_tile");
  entry.rule_tile = reader.small_integer("rule_tile");
  entry.us = reader.number("us");
  entry.rule_us = reader.number("rule_us");
  reader.finish();
  return entry;
}

MoeTuning parse_text(std::string_view text, std::string_view source) {
  JsonVisitor ignore;
  scan_json_object(text, source, {}, ignore);
  const Json document = Json::parse(text);
  if (document.value("format", Json()) != kFormat) {
    throw_error(ErrorKind::kCorruptData, "{}: expected \"format\": \"{}\"", source, kFormat);
  }
  const Json form = document.value("format_version", Json());
  if (form == 1) {
    throw_error(ErrorKind::kCorruptData,
                "{}: \"format_version\": 1 does not say for which activation an entry is; measure "
                "again (narrowfloat moe tune)",
                source);
  }
  if (form != kFormatVersion) {
    throw_error(ErrorKind::kCorruptData, "{}: expected \"format_version\": {}", source,
                kFormatVersion);
  }
  const auto list = document.find("entries");
  if (list == document.end() || !list->is_array()) {
    throw_error(ErrorKind::kCorruptData, "{}: expected a list \"entries\"", source);
  }
  std::vector<MoeTuningEntry> entries;
  for (const Json& object : *list) entries.push_back(read_entry(object, entries.size()));
  return MoeTuning(std::move(entries));
}

// The first difference of two keys in words; empty if they are equal.
std::string difference(const MoeTuningKey& entry, const MoeTuningKey& wanted) {
  if (entry.machine != wanted.machine) return "machine '" + printable(entry.machine) + "'";
  if (entry.version != wanted.version) return "version " + printable(entry.version);
  if (entry.mode != wanted.mode) return fmt::format("mode {}", name(entry.mode));
  if (entry.activation != wanted.activation) {
    return fmt::format("activation {}", name(entry.activation));
  }
  if (entry.hidden != wanted.hidden || entry.inter != wanted.inter) {
    return fmt::format("hidden size {}, intermediate {}", entry.hidden, entry.inter);
  }
  if (entry != wanted) {
    return fmt::format("{} of {} experts, {} a token", entry.local_experts, entry.experts,
                       entry.slots);
  }
  return "";
}

// The reason why no entry matches: the number of entries for other keys, in the order of the file.
std::string reason_against(const MoeTuning& tuning, const MoeTuningKey& key) {
  if (tuning.entries().empty()) return "no tuning is given, or it is empty";
  std::vector<std::pair<std::string, int>> others;
  for (const MoeTuningEntry& entry : tuning.entries()) {
    std::string what = difference(entry.key, key);
    if (what.empty()) {
      what = fmt::format("{} to {} tokens", entry.first_tokens, entry.last_tokens);
    }
    const auto known = std::find_if(others.begin(), others.end(),
                                    [&](const auto& other) { return other.first == what; });
    if (known == others.end()) {
      others.emplace_back(what, 1);
    } else {
      ++known->second;
    }
  }
  std::string text = "entries are for other layers, machines or numbers of tokens:";
  for (const auto& [what, count] : others) text += fmt::format(" {} for {};", count, what);
  text.pop_back();
  return text;
}

std::string machine_name(Device device) {
  if (device.type == DeviceType::kCpu) return cpu_info().model;
  const std::vector<GpuInfo> gpus = gpu_info();
  const auto index = static_cast<size_t>(device.index);
  return device.index >= 0 && index < gpus.size() ? gpus[index].name : "";
}

}  // namespace

MoeTuningKey moe_tuning_key(const MoeConfig& config, Device device) {
  return {.machine = machine_name(device),
          .version = std::string(version()),
          .mode = config.mode,
          .activation = config.activation.kind,
          .hidden = config.hidden,
          .inter = config.inter,
          .slots = config.routing.top_k + config.routing.shared_experts,
          .experts = config.routing.experts,
          .local_experts = config.local_experts + config.routing.shared_experts};
}

MoeTuning::MoeTuning(std::vector<MoeTuningEntry> entries) : entries_(std::move(entries)) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    check_entry(entries_[i], i);
    for (size_t j = 0; j < i; ++j) {
      if (overlap(entries_[i], entries_[j])) {
        refuse(i, fmt::format("entry {} is about some of the same numbers of tokens", j));
      }
    }
  }
}

MoeTuning MoeTuning::parse(std::string_view json) { return parse_text(json, "moe tuning"); }

MoeTuning MoeTuning::load(const std::string& path) {
  return parse_text(read_file_bounded(path, kMaxFileBytes), printable(path));
}

void MoeTuning::save(const std::string& path, bool replace) const {
  write_file_atomically(path, to_json(), replace ? Replace::kYes : Replace::kNo);
}

std::string MoeTuning::to_json() const {
  std::string text = fmt::format(
      "{{\n \"format\": \"{}\",\n \"format_version\": {},\n"
      " \"entries\": [",
      kFormat, kFormatVersion);
  for (size_t i = 0; i < entries_.size(); ++i) {
    text += i == 0 ? "\n  " : ",\n  ";
    text += entry_json(entries_[i]).dump(-1, ' ', /*ensure_ascii=*/true);
  }
  return text + (entries_.empty() ? "]\n}\n" : "\n ]\n}\n");
}

TokenTileChoice choose_token_tile(const MoeConfig& config, int64_t tokens, Device device,
                                  const MoeTuning& tuning) {
  check_moe_config(config);
  if (tokens < 0) throw_invalid("tokens: expected >= 0, got {}", tokens);
  const MoeTuningKey key = moe_tuning_key(config, device);
  const std::optional<int32_t> tuned = TunedTiles(tuning, key).find(tokens);
  const int32_t rule = default_token_tile(tokens, key.slots, key.local_experts);
  TokenTileChoice choice;
  choice.token_tile = config.token_tile ? *config.token_tile : tuned.value_or(rule);
  Explanation& explanation = choice.explanation;
  explanation.op = "token_tile";
  explanation.problem =
      fmt::format("{} tokens, {} experts each, {} local experts on {}: {} rows a tile", tokens,
                  key.slots, key.local_experts, to_string(device), choice.token_tile);
  explanation.chosen = config.token_tile ? "config" : tuned ? "tuned" : "rule";
  explanation.candidates = {
      {"config", config.token_tile.has_value(), config.token_tile ? "" : "none is asked for"},
      {"tuned", tuned.has_value(), tuned ? "" : reason_against(tuning, key)},
      {"rule", true, ""}};
  bool is_decided = false;
  for (Candidate& candidate : explanation.candidates) {
    if (is_decided && candidate.supported) {
      candidate.reason = "passed over: " + explanation.chosen + " comes first";
    }
    is_decided = is_decided || candidate.supported;
  }
  return choice;
}

}  // namespace narrowfloat
