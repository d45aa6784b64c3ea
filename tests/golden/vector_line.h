// Lines of the golden files: an operation and key=value columns (README.md). A test takes the
// columns it understands; a column that nobody took is a failure, so that nothing is skipped in
// silence.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

namespace narrowfloat {

class VectorLine {
 public:
  // The first word of `text` is a column like any other, or a bare operation name.
  VectorLine(std::string file, int number, const std::string& text)
      : place_(std::move(file) + ":" + std::to_string(number)) {
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      const size_t equals = word.find('=');
      if (equals == std::string::npos) {
        columns_["op"] = word;
      } else {
        columns_[word.substr(0, equals)] = word.substr(equals + 1);
      }
    }
  }

  [[nodiscard]] const std::string& place() const { return place_; }
  [[nodiscard]] bool has(const std::string& key) const { return columns_.contains(key); }

  [[nodiscard]] const std::string& text(const std::string& key) const {
    taken_.insert(key);
    const auto found = columns_.find(key);
    if (found == columns_.end()) throw std::runtime_error(place_ + ": no column " + key);
    return found->second;
  }
  [[nodiscard]] std::string text_or(const std::string& key, const std::string& missing) const {
    return has(key) ? text(key) : missing;
  }
  [[nodiscard]] int64_t integer(const std::string& key) const { return std::stoll(text(key)); }
  [[nodiscard]] uint32_t hex(const std::string& key) const {
    return static_cast<uint32_t>(std::stoul(text(key), nullptr, 16));
  }
  [[nodiscard]] float number(const std::string& key) const {
    return std::bit_cast<float>(hex(key));
  }

  // Comma-separated; an empty column is an empty list.
  [[nodiscard]] std::vector<std::string> list(const std::string& key) const {
    std::vector<std::string> items;
    std::istringstream stream(text(key));
    for (std::string item; std::getline(stream, item, ',');) items.push_back(item);
    return items;
  }
  template <typename Integer>
  [[nodiscard]] std::vector<Integer> integers(const std::string& key) const {
    std::vector<Integer> values;
    for (const std::string& item : list(key)) {
      values.push_back(static_cast<Integer>(std::stoll(item)));
    }
    return values;
  }
  [[nodiscard]] std::vector<float> numbers(const std::string& key) const {
    std::vector<float> values;
    for (const std::string& item : list(key)) {
      values.push_back(std::bit_cast<float>(static_cast<uint32_t>(std::stoul(item, nullptr, 16))));
    }
    return values;
  }
  // Pairs of hex digits, with z<count>. for a run of zero bytes.
  [[nodiscard]] std::vector<uint8_t> payload(const std::string& key) const {
    const std::string& digits = text(key);
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i < digits.size();) {
      if (digits[i] == 'z') {
        const size_t end = digits.find('.', i);
        bytes.resize(bytes.size() + std::stoul(digits.substr(i + 1, end - i - 1)));
        i = end + 1;
      } else {
        bytes.push_back(static_cast<uint8_t>(std::stoul(digits.substr(i, 2), nullptr, 16)));
        i += 2;
      }
    }
    return bytes;
  }

  // Columns that were never asked for.
  [[nodiscard]] std::string untaken() const {
    std::string names;
    for (const auto& [key, value] : columns_) {
      if (!taken_.contains(key)) names += " " + key;
    }
    return names;
  }

 private:
  std::string place_;
  std::map<std::string, std::string> columns_;
  mutable std::set<std::string> taken_;
};

// All lines of a file under tests/golden but comments. Throws where there is no such file.
inline std::vector<VectorLine> read_vector_lines(const std::string& name) {
  std::ifstream file(NARROWFLOAT_SOURCE_DIR "/tests/golden/" + name);
  if (!file) throw std::runtime_error("tests/golden/" + name + ": cannot open");
  std::vector<VectorLine> lines;
  int number = 0;
  for (std::string text; std::getline(file, text);) {
    ++number;
    if (!text.empty() && text[0] != '#') lines.emplace_back(name, number, text);
  }
  return lines;
}

inline std::string to_hex(const uint8_t* data, size_t count) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += kDigits[data[i] >> 4];
    text += kDigits[data[i] & 0xFU];
  }
  return text;
}

// Pins one implementation of every operation while it lives.
class PinnedImplementation {
 public:
  explicit PinnedImplementation(const std::string& name) {
    std::string setting;
    for (const std::string op :
         {"quantize", "dequantize", "amax", "relayout", "route", "permute", "activation",
          "grouped_gemm", "combine", "shuffle", "kv_quantize", "kv_dequantize", "kv_reorder"}) {
      setting += (setting.empty() ? "" : ",") + op + ":" + name;
    }
    setenv("NARROWFLOAT_FORCE", setting.c_str(), 1);
  }
  ~PinnedImplementation() { unsetenv("NARROWFLOAT_FORCE"); }
  PinnedImplementation(const PinnedImplementation&) = delete;
  PinnedImplementation& operator=(const PinnedImplementation&) = delete;
};

// The implementations that golden vectors judge; every other one is compared with the oracle.
inline const std::vector<std::string>& judged_implementations() {
  static const std::vector<std::string> names{"cpu_reference", "cpu_baseline"};
  return names;
}

}  // namespace narrowfloat
