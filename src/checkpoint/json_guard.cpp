// Checks nlohmann-json's SAX events and forwards them.
#include "checkpoint/json_guard.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

// Keys of all open objects, to find duplicates when an object ends. They take one arena and eight
// bytes a key: a set of strings would need several times the memory of a 100 MB header.
class KeyStack {
 public:
  void open() { frames_.push_back({keys_.size(), arena_.size()}); }

  void add(std::string_view key) {
    keys_.push_back({std::hash<std::string_view>{}(key), static_cast<uint32_t>(arena_.size()),
                     static_cast<uint32_t>(key.size())});
    arena_ += key;
  }

  // Closes the innermost object and returns a key that it has twice, if any.
  std::optional<std::string> close() {
    const Frame frame = frames_.back();
    frames_.pop_back();
    const auto first = keys_.begin() + static_cast<std::ptrdiff_t>(frame.num_keys);
    // Sorts by hash first: comparisons of the texts of millions of keys would miss the cache each
    // time.
    std::sort(first, keys_.end(), [&](const Key& a, const Key& b) {
      return a.hash != b.hash ? a.hash < b.hash : view(a) < view(b);
    });
    const auto twin = std::adjacent_find(first, keys_.end(), [&](const Key& a, const Key& b) {
      return a.hash == b.hash && view(a) == view(b);
    });
    std::optional<std::string> duplicate;
    if (twin != keys_.end()) duplicate = view(*twin);
    keys_.resize(frame.num_keys);
    arena_.resize(frame.arena_bytes);
    return duplicate;
  }

 private:
  struct Key {
    size_t hash = 0;
    uint32_t begin = 0;
    uint32_t num_bytes = 0;
  };
  struct Frame {
    size_t num_keys = 0;
    size_t arena_bytes = 0;
  };

  [[nodiscard]] std::string_view view(const Key& key) const {
    return std::string_view(arena_).substr(key.begin, key.num_bytes);
  }

  std::string arena_;
  std::vector<Key> keys_;
  std::vector<Frame> frames_;
};

// "[json.exception.parse_error.101] parse error at line 1, column 2: REASON; last read: '...'".
// What was read last may be megabytes of hostile text, so only REASON is kept.
std::string reason_of(std::string_view what) {
  if (const size_t begin = what.find(": "); begin != what.npos) what.remove_prefix(begin + 2);
  return printable(what.substr(0, what.find("; last read")));
}

// The handler that nlohmann::json::sax_parse calls; names and signatures are the library's.
class CheckedSax {
 public:
  CheckedSax(std::string_view source, const JsonLimits& limits, JsonVisitor& visitor)
      : source_(source), limits_(limits), visitor_(visitor) {}

  bool null() { return other("null"); }
  bool boolean(bool value) { return other(value ? "true" : "false"); }
  // Called for numbers with a minus sign only; "-0" arrives as 0.
  bool number_integer(int64_t value) { return other(value == 0 ? "-0" : std::to_string(value)); }
  bool number_unsigned(uint64_t value) {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return other(std::to_string(value));
    }
    require_object();
    visitor_.integer(static_cast<int64_t>(value));
    return true;
  }
  bool number_float(double /*value*/, const std::string& spelling) { return other(spelling); }
  bool string(std::string& text) {
    require_object();
    visitor_.string(std::move(text));
    return true;
  }
  // JSON text has no binary values; the library wants the function.
  bool binary(nlohmann::json::binary_t& /*value*/) { return false; }

  bool start_object(size_t /*count*/) {
    enter();
    keys_.open();
    visitor_.begin_object();
    return true;
  }
  bool key(std::string& text) {
    keys_.add(text);
    visitor_.key(std::move(text));
    return true;
  }
  bool end_object() {
    if (const std::optional<std::string> twin = keys_.close()) {
      throw_error(ErrorKind::kCorruptData, "{}: duplicate key '{}' in one JSON object", source_,
                  printable(*twin));
    }
    --depth_;
    visitor_.end_object();
    return true;
  }
  bool start_array(size_t /*count*/) {
    require_object();
    enter();
    visitor_.begin_array();
    return true;
  }
  bool end_array() {
    --depth_;
    visitor_.end_array();
    return true;
  }

  bool parse_error(size_t position, const std::string& /*last_token*/,
                   const nlohmann::json::exception& error) {
    throw_error(ErrorKind::kCorruptData, "{}: invalid JSON near byte {}: {}", source_, position,
                reason_of(error.what()));
  }

 private:
  void enter() {
    if (++depth_ > limits_.max_depth) {
      throw_error(ErrorKind::kCorruptData, "{}: JSON nested deeper than {} levels", source_,
                  limits_.max_depth);
    }
  }
  void require_object() const {
    if (depth_ > 0) return;
    throw_error(ErrorKind::kCorruptData, "{}: the JSON text must be an object", source_);
  }
  bool other(std::string_view spelling) {
    require_object();
    visitor_.other_value(spelling);
    return true;
  }

  std::string_view source_;
  const JsonLimits& limits_;
  JsonVisitor& visitor_;
  KeyStack keys_;
  int depth_ = 0;
};

// Characters that separate tokens or are tokens.
constexpr std::array<bool, 256> kIsSeparator = [] {
  std::array<bool, 256> table{};
  for (const char c : std::string_view("{}[]:, \t\r\n\""))
    table[static_cast<unsigned char>(c)] = true;
  return table;
}();

// The tokenizer copies a string or number several times before its length is known, so lengths are
// checked first. In malformed text the tokenizer stops at or before the point where this simple
// walk could go wrong.
size_t longest_token(std::string_view text) {
  size_t longest = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    const size_t begin = at;
    if (text[at] == '"') {
      for (++at; at < text.size() && text[at] != '"'; ++at) {
        if (text[at] == '\\') ++at;
      }
      longest = std::max(longest, std::min(at, text.size()) - begin - 1);
    } else {
      while (at < text.size() && !kIsSeparator[static_cast<unsigned char>(text[at])]) ++at;
      longest = std::max(longest, at - begin);
      if (at > begin) --at;  // The separator is looked at next.
    }
  }
  return longest;
}

void check_raw_text(std::string_view text, std::string_view source, const JsonLimits& limits) {
  if (text.size() > std::numeric_limits<uint32_t>::max()) {
    throw_error(ErrorKind::kCorruptData, "{}: {} bytes of JSON are too many", source, text.size());
  }
  if (text.starts_with("\xEF\xBB\xBF")) {
    throw_error(ErrorKind::kCorruptData, "{}: starts with a byte order mark; remove it", source);
  }
  if (const size_t nul = text.find('\0'); nul != text.npos) {
    throw_error(ErrorKind::kCorruptData, "{}: NUL byte in the JSON text at byte {}", source, nul);
  }
  if (const size_t longest = longest_token(text); longest > limits.max_token_bytes) {
    throw_error(ErrorKind::kCorruptData, "{}: a JSON string or number of {} bytes; the limit is {}",
                source, longest, limits.max_token_bytes);
  }
}

}  // namespace

void scan_json_object(std::string_view text, std::string_view source, const JsonLimits& limits,
                      JsonVisitor& visitor) {
  check_raw_text(text, source, limits);
  CheckedSax sax(source, limits, visitor);
  // Strict, without comments.
  nlohmann::json::sax_parse(text.begin(), text.end(), &sax, nlohmann::json::input_format_t::json,
                            true, false);
}

void check_json_object(std::string_view text, std::string_view source) {
  JsonVisitor ignore;
  scan_json_object(text, source, JsonLimits{}, ignore);
}

}  // namespace narrowfloat
