// See system_error.h.
#include "runtime/comm/system_error.h"

#include <array>
#include <sys/random.h>
#include <system_error>

#include "base/throw_error.h"

namespace narrowfloat {

void throw_system_error(const std::string& what, int code) {
  throw_error(ErrorKind::kIo, "{}: {}", what, std::generic_category().message(code));
}

void fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::getrandom(bytes.data(), bytes.size(), 0);
    if (count < 0 && errno != EINTR) throw_system_error("getrandom");
    if (count > 0) bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

std::string random_name() {
  std::array<std::byte, 16> bytes{};
  fill_random(bytes);
  std::string name;
  for (const std::byte byte : bytes) name += fmt::format("{:02x}", std::to_integer<int>(byte));
  return name;
}

}  // namespace narrowfloat
