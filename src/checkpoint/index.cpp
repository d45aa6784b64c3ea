// A visitor that picks weight_map and total_size out of the JSON events and ignores everything
// else.
#include "checkpoint/index.h"

#include <algorithm>
#include <map>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/json_guard.h"
#include "checkpoint/safetensors_header.h"

namespace narrowfloat {
namespace {

constexpr size_t kMaxShards = 100'000;  // Above every five-digit numbering.

// Why `name` is not one plain file name; empty if it is.
std::string_view file_name_problem(std::string_view name) {
  if (name.empty()) return "is empty";
  if (name == "." || name == "..") return "is a directory";
  if (name.find('/') != name.npos || name.find('\\') != name.npos) return "holds a path separator";
  if (name.find('\0') != name.npos) return "holds a NUL character";
  return "";
}

class IndexParser : public JsonVisitor {
 public:
  explicit IndexParser(std::string_view source) : source_(source) {}

  ShardIndex finish();

  void begin_object() override {
    if (is_in_weight_map()) refuse_in_weight_map("an object");
    ++depth_;
    if (depth_ == 2 && root_key_ == "weight_map") has_weight_map_ = true;
  }
  void end_object() override { --depth_; }
  void begin_array() override {
    refuse_in_weight_map("an array");
    ++depth_;
  }
  void end_array() override { --depth_; }

  void key(std::string&& text) override { (depth_ == 1 ? root_key_ : key_) = std::move(text); }

  void string(std::string&& text) override {
    if (is_in_weight_map()) {
      add_entry(text);
    } else {
      refuse_in_weight_map("a string");
      warn_if_total_size(fmt::format("'{}'", printable(text, 40)));
    }
  }
  void integer(int64_t value) override {
    refuse_in_weight_map(std::to_string(value));
    if (is_total_size()) index_.total_size = value;
  }
  void other_value(std::string_view spelling) override {
    refuse_in_weight_map(printable(spelling, 40));
    warn_if_total_size(printable(spelling, 40));
  }

 private:
  [[nodiscard]] bool is_in_weight_map() const { return depth_ == 2 && root_key_ == "weight_map"; }
  [[nodiscard]] bool is_total_size() const {
    return depth_ == 2 && root_key_ == "metadata" && key_ == "total_size";
  }

  void refuse_in_weight_map(std::string_view got) const {
    if (depth_ == 1 && root_key_ == "weight_map") {
      throw_error(ErrorKind::kCorruptData, "{}: 'weight_map' must be an object, got {}", source_,
                  got);
    }
    if (is_in_weight_map()) {
      throw_error(ErrorKind::kCorruptData, "{}: the file of tensor '{}' must be a string, got {}",
                  source_, printable(key_), got);
    }
  }

  void warn_if_total_size(std::string_view got) {
    if (!is_total_size()) return;
    index_.warnings.push_back(
        fmt::format("{}: 'total_size' is {}, not a plain number", source_, got));
  }

  void add_entry(const std::string& file) {
    const std::string_view problem = file_name_problem(file);
    if (!problem.empty()) {
      throw_error(ErrorKind::kCorruptData,
                  "{}: tensor '{}' names the file '{}', which {}; expected one plain file name",
                  source_, printable(key_), printable(file), problem);
    }
    if (key_.size() > kMaxNameBytes || key_.find('\0') != key_.npos) {
      throw_error(ErrorKind::kCorruptData, "{}: tensor name '{}' is too long or holds a NUL",
                  source_, printable(key_, 40));
    }
    const auto [position, is_new] = file_ids_.emplace(file, file_ids_.size());
    if (is_new && file_ids_.size() > kMaxShards) {
      throw_error(ErrorKind::kCorruptData, "{}: names more than {} files", source_, kMaxShards);
    }
    if (index_.entries.size() == HeaderLimits{}.max_tensors) {
      throw_error(ErrorKind::kCorruptData, "{}: names more than {} tensors", source_,
                  index_.entries.size());
    }
    index_.entries.push_back({std::move(key_), position->second});
  }

  std::string_view source_;
  ShardIndex index_;
  std::map<std::string, size_t> file_ids_;  // In order of appearance.
  int depth_ = 0;
  std::string root_key_;
  std::string key_;
  bool has_weight_map_ = false;
};

// Names that differ in case only are one file on some systems and two on others.
void check_case(const std::vector<std::string>& files, std::string_view source) {
  std::map<std::string, std::string_view> seen;
  for (const std::string& file : files) {
    std::string lower = file;
    for (char& c : lower) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    const auto [other, is_new] = seen.emplace(std::move(lower), file);
    if (!is_new) {
      throw_error(ErrorKind::kCorruptData, "{}: the files '{}' and '{}' differ in case only",
                  source, printable(other->second), printable(file));
    }
  }
}

ShardIndex IndexParser::finish() {
  if (!has_weight_map_) {
    throw_error(ErrorKind::kCorruptData, "{}: has no 'weight_map' object", source_);
  }
  if (index_.entries.empty()) {
    throw_error(ErrorKind::kCorruptData,
                "{}: 'weight_map' is empty; expected the file of every tensor", source_);
  }
  // The map sorted the names; entries still have the ids of first appearance.
  std::vector<size_t> sorted_ids(file_ids_.size());
  for (const auto& [file, id] : file_ids_) {
    sorted_ids[id] = index_.files.size();
    index_.files.push_back(file);
  }
  for (ShardIndex::Entry& entry : index_.entries) entry.file = sorted_ids[entry.file];
  std::sort(
      index_.entries.begin(), index_.entries.end(),
      [](const ShardIndex::Entry& a, const ShardIndex::Entry& b) { return a.tensor < b.tensor; });
  check_case(index_.files, source_);
  return std::move(index_);
}

}  // namespace

ShardIndex parse_index(std::string_view json, std::string_view source) {
  IndexParser parser(source);
  scan_json_object(json, source, JsonLimits{}, parser);
  return parser.finish();
}

}  // namespace narrowfloat
