// See scale_originals.h. The bits are hexadecimal, as no decimal spelling is exact to every parser.
#include "layers/scale_originals.h"

#include <algorithm>
#include <bit>
#include <charconv>

#include <nlohmann/json.hpp>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "checkpoint/json_guard.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kMaxScalesBytes = uint64_t{64} << 20;
constexpr const char* kScalesFormat = "narrowfloat scales";

std::optional<uint32_t> parse_bits(const nlohmann::json& entry) {
  const auto found = entry.is_object() ? entry.find("bits") : entry.end();
  if (found == entry.end() || !found->is_string()) return std::nullopt;
  const std::string text = found->get<std::string>();
  uint32_t bits = 0;
  const char* const last = text.data() + text.size();
  if (text.size() != 10 || !text.starts_with("0x")) return std::nullopt;
  const auto [end, error] = std::from_chars(text.data() + 2, last, bits, 16);
  if (error != std::errc{} || end != last) return std::nullopt;
  return bits;
}

// Empty if the checkpoint has none.
std::string text_of(const Checkpoint& checkpoint) {
  if (!checkpoint.is_directory()) {
    const auto& metadata = checkpoint.shards().front().metadata();
    const auto entry = metadata.find(kScalesKey);
    return entry == metadata.end() ? "" : entry->second;
  }
  const std::vector<std::string>& files = checkpoint.auxiliary_files();
  if (std::find(files.begin(), files.end(), kScalesFileName) == files.end()) return "";
  return read_file_bounded(join_path(checkpoint.path(), kScalesFileName), kMaxScalesBytes);
}

}  // namespace

ScaleOriginals ScaleOriginals::read(const Checkpoint& checkpoint) {
  ScaleOriginals originals;
  const std::string text = text_of(checkpoint);
  if (text.empty()) return originals;
  const std::string source =
      checkpoint.is_directory()
          ? printable(join_path(checkpoint.path(), kScalesFileName))
          : fmt::format("{} (__metadata__, {})", printable(checkpoint.path()), kScalesKey);
  check_json_object(text, source);
  const nlohmann::json root = nlohmann::json::parse(text);
  const auto scales = root.find("scales");
  const auto refuse = [&](const std::string& what) {
    throw_error(ErrorKind::kCorruptData, "{}: {}; remove it: the scales are then inverted", source,
                what);
  };
  if (!root.contains("format") || root["format"] != kScalesFormat || scales == root.end() ||
      !scales->is_object()) {
    refuse(fmt::format("must have \"format\": \"{}\" and an object \"scales\"", kScalesFormat));
  }
  for (const auto& [name, entry] : scales->items()) {
    const std::optional<uint32_t> bits = parse_bits(entry);
    const auto original = entry.is_object() ? entry.find("original") : entry.end();
    if (!bits || original == entry.end() || !original->is_string()) {
      refuse(fmt::format("'{}' must have the strings \"original\" and \"bits\" (\"0x3f800000\")",
                         printable(name)));
    }
    originals.scales_[name] = {original->get<std::string>(), *bits};
  }
  return originals;
}

void ScaleOriginals::add(const std::string& stored, const std::string& original, float value) {
  scales_[stored] = {original, std::bit_cast<uint32_t>(value)};
}

std::optional<float> ScaleOriginals::find(std::string_view name, std::string_view original,
                                          float stored) const {
  const auto entry = scales_.find(name);
  if (entry == scales_.end() || entry->second.original != original) return std::nullopt;
  const auto value = std::bit_cast<float>(entry->second.bits);
  if (1.0F / value != stored) return std::nullopt;
  return value;
}

std::string ScaleOriginals::to_json() const {
  nlohmann::ordered_json scales = nlohmann::ordered_json::object();
  for (const auto& [name, entry] : scales_) {
    scales[name] = {{"original", entry.original}, {"bits", fmt::format("0x{:08x}", entry.bits)}};
  }
  const nlohmann::ordered_json root = {{"format", kScalesFormat}, {"scales", scales}};
  return root.dump(1) + "\n";
}

}  // namespace narrowfloat
