// One UTF-8 decoder serves the validity check and the printer.
#include "checkpoint/escape.h"

#include <cstdint>
#include <iterator>

#include <fmt/format.h>

namespace narrowfloat {
namespace {

struct CodePoint {
  uint32_t value = 0;
  size_t num_bytes = 0;  // 0: the bytes are not UTF-8.
};

uint32_t byte_at(std::string_view text, size_t at) { return static_cast<unsigned char>(text[at]); }

// The code point that starts at text[at].
CodePoint decode_utf8(std::string_view text, size_t at) {
  const uint32_t lead = byte_at(text, at);
  if (lead < 0x80) return {lead, 1};
  const size_t num_bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() - at < num_bytes) return {};
  uint32_t value = lead & (0x7FU >> num_bytes);
  for (size_t i = 1; i < num_bytes; ++i) {
    const uint32_t next = byte_at(text, at + i);
    if ((next & 0xC0U) != 0x80U) return {};
    value = value << 6 | (next & 0x3FU);
  }
  const bool is_overlong = (num_bytes == 3 && value < 0x800) || (num_bytes == 4 && value < 0x10000);
  const bool is_surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (is_overlong || is_surrogate || value > 0x10FFFF) return {};
  return {value, num_bytes};
}

// Characters that move the cursor, end the line or reorder what is on it.
bool is_unprintable(uint32_t code) {
  const bool is_control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  const bool is_separator = code == 0x2028 || code == 0x2029;
  const bool is_direction = code == 0x200E || code == 0x200F || code == 0x061C ||
                            (code >= 0x202A && code <= 0x202E) ||
                            (code >= 0x2066 && code <= 0x2069);
  return is_control || is_separator || is_direction || code == 0xFEFF;
}

void append_escaped(std::string& out, uint32_t code) {
  if (code == '\n') {
    out += "\\n";
  } else if (code < 0x80) {
    fmt::format_to(std::back_inserter(out), "\\x{:02x}", code);
  } else {
    fmt::format_to(std::back_inserter(out), "\\u{{{:x}}}", code);
  }
}

}  // namespace

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (out.size() >= max_bytes) return out + "...";
    const CodePoint code = decode_utf8(text, at);
    if (code.num_bytes == 0) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", byte_at(text, at));
      ++at;
      continue;
    }
    if (code.value == '\\') {
      out += "\\\\";
    } else if (is_unprintable(code.value)) {
      append_escaped(out, code.value);
    } else {
      out += text.substr(at, code.num_bytes);
    }
    at += code.num_bytes;
  }
  return out;
}

bool is_valid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const CodePoint code = decode_utf8(text, at);
    if (code.num_bytes == 0) return false;
    at += code.num_bytes;
  }
  return true;
}

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  size_t copied = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    const auto c = static_cast<unsigned char>(text[at]);
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    out += text.substr(copied, at - copied);
    copied = at + 1;
    if (c < 0x20) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", c);
    } else {
      out += '\\';
      out += text[at];
    }
  }
  out += text.substr(copied);
  return out + '"';
}

}  // namespace narrowfloat
