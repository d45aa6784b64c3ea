// Strict, bounded JSON for untrusted files.
//
// The JSON library tokenizes. This layer checks what its defaults accept and what two parsers could
// disagree about: duplicate keys, depth, a byte order mark, NUL bytes (which the library takes for
// the end of the text), very long strings, and numbers that are not plainly spelled integers. Time
// is n log n in the text at worst, memory a small multiple of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace narrowfloat {

struct JsonLimits {
  int max_depth = 64;
  size_t max_token_bytes = size_t{16} << 20;  // One string or number, as spelled.
};

// Receives the events of one document. Handlers refuse by throwing.
class JsonVisitor {
 public:
  virtual ~JsonVisitor() = default;
  virtual void begin_object() {}
  virtual void end_object() {}
  virtual void begin_array() {}
  virtual void end_array() {}
  virtual void key(std::string&& /*text*/) {}
  virtual void string(std::string&& /*text*/) {}
  // A number spelled as plain decimal digits, below 2^63.
  virtual void integer(int64_t /*value*/) {}
  // Any other value, as spelled: true, null, -0, 1.0, 1e3, 9223372036854775808.
  virtual void other_value(std::string_view /*spelling*/) {}
};

// Feeds `text`, whose top level must be an object, to `visitor`. Throws kCorruptData that starts
// with `source`, which must be printable. Duplicate keys are found at the end of their object.
void scan_json_object(std::string_view text, std::string_view source, const JsonLimits& limits,
                      JsonVisitor& visitor);

// Checks without a visitor.
void check_json_object(std::string_view text, std::string_view source);

}  // namespace narrowfloat
