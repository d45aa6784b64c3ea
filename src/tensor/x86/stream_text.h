// A copy past the caches: text that sources for a level of vector instructions compile
// (docs/architecture.md, levels of vector instructions).
#pragma once

#include <cstdint>
#include <cstring>

namespace narrowfloat::stream_text {

// Level::stream_line(to, from) copies 64 bytes to an aligned address.
template <class Level>
void stream(void* to, const void* from, int64_t size_bytes) {
  constexpr int64_t kLine = 64;
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % kLine);
  int64_t head = past_line == 0 ? 0 : kLine - past_line;
  if (head > size_bytes) head = size_bytes;
  std::memcpy(out, in, static_cast<size_t>(head));
  int64_t byte = head;
  for (; byte + kLine <= size_bytes; byte += kLine) Level::stream_line(out + byte, in + byte);
  std::memcpy(out + byte, in + byte, static_cast<size_t>(size_bytes - byte));
}

}  // namespace narrowfloat::stream_text
