// A strict UTF-8 decoder, and the list of code points that never reach a terminal.
#include "cli/printable.h"

#include <cstdint>
#include <iterator>

#include <fmt/format.h>

namespace narrowfloat::cli {
namespace {

struct CodePoint {
  uint32_t value = 0;
  size_t num_bytes = 0;  // 0: not UTF-8.
};

uint32_t byte_at(std::string_view text, size_t at) { return static_cast<unsigned char>(text[at]); }

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

// The code point that starts at text[at].
CodePoint decode(std::string_view text, size_t at) {
  const uint32_t lead = byte_at(text, at);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xC2 || lead > 0xF4) return {};
  const size_t num_bytes = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (text.size() - at < num_bytes) return {};
  uint32_t value = lead & (0x7FU >> num_bytes);
  for (size_t i = 1; i < num_bytes; ++i) {
    if (!is_continuation(text[at + i])) return {};
    value = value << 6U | (byte_at(text, at + i) & 0x3FU);
  }
  const uint32_t smallest = num_bytes == 2 ? 0x80 : num_bytes == 3 ? 0x800 : 0x10000;
  const bool is_surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < smallest || value > 0x10FFFF || is_surrogate) return {};
  return {value, num_bytes};
}

// Moves the cursor, ends the line, or reorders what is on it.
bool is_unprintable(uint32_t code) {
  const bool is_control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  const bool is_separator = code == 0x2028 || code == 0x2029;
  const bool is_direction = code == 0x061C || code == 0x200E || code == 0x200F ||
                            (code >= 0x202A && code <= 0x202E) ||
                            (code >= 0x2066 && code <= 0x2069);
  return is_control || is_separator || is_direction || code == 0xFEFF;
}

void append_escaped(std::string& out, uint32_t code) {
  if (code == '\n') {
    out += "\\n";
  } else if (code == '\\') {
    out += "\\\\";
  } else if (code < 0x80) {
    fmt::format_to(std::back_inserter(out), "\\x{:02x}", code);
  } else {
    fmt::format_to(std::back_inserter(out), "\\u{{{:x}}}", code);
  }
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const CodePoint code = decode(text, at);
    if (code.num_bytes == 0) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", byte_at(text, at));
      ++at;
      continue;
    }
    if (code.value == '\\' || is_unprintable(code.value)) {
      append_escaped(out, code.value);
    } else {
      out += text.substr(at, code.num_bytes);
    }
    at += code.num_bytes;
  }
  return out;
}

size_t display_width(std::string_view text) {
  size_t width = 0;
  for (const char c : text) width += is_continuation(c) ? 0 : 1;
  return width;
}

std::string shortened(std::string_view text, size_t width) {
  if (display_width(text) <= width) return std::string(text);
  constexpr std::string_view kMark = "...";
  if (width <= kMark.size()) return std::string(kMark.substr(0, width));
  size_t columns = 0;
  size_t end = 0;
  while (columns < width - kMark.size() || is_continuation(text[end])) {
    columns += is_continuation(text[end]) ? 0 : 1;
    ++end;
  }
  return std::string(text.substr(0, end)) + std::string(kMark);
}

}  // namespace narrowfloat::cli
