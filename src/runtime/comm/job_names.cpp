// Names made of job ids, and random tokens.
#include "runtime/comm/job_names.h"

#include <random>

#include <fmt/format.h>

namespace narrowfloat {

uint64_t hash_text(std::string_view text) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  }
  return hash;
}

std::string random_token() {
  std::random_device device;
  const uint32_t high = device();
  const uint32_t low = device();
  return fmt::format("{:08x}{:08x}", high, low);
}

std::string job_file_name(std::string_view job_id) {
  constexpr size_t kMaxLength = 48;
  constexpr std::string_view kAllowed =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-";
  std::string name(job_id.substr(0, kMaxLength));
  for (char& c : name) {
    if (kAllowed.find(c) == std::string_view::npos) c = '_';
  }
  return fmt::format("{}-{:016x}", name, hash_text(job_id));
}

}  // namespace narrowfloat
