// Runs every input that is kept in tests/fuzz/corpus/TARGET: they reach the code that libFuzzer
// found paths into, and every bug that it found once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <vector>

#include <gtest/gtest.h>

namespace narrowfloat::testing {

using FuzzTarget = void (*)(std::span<const uint8_t>);

inline std::vector<uint8_t> bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void replay(const char* name, FuzzTarget target) {
  const auto folder = std::filesystem::path(NARROWFLOAT_SOURCE_DIR) / "tests/fuzz/corpus" / name;
  int num_inputs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path().string());
    EXPECT_NO_THROW(target(bytes_of(entry.path())));
    ++num_inputs;
  }
  EXPECT_GE(num_inputs, 20) << folder;
}

// Also inputs that no corpus has: none, and each of one byte.
inline void run_short_inputs(FuzzTarget target) {
  EXPECT_NO_THROW(target({}));
  for (int byte = 0; byte < 256; ++byte) {
    const auto input = static_cast<uint8_t>(byte);
    EXPECT_NO_THROW(target(std::span(&input, 1))) << byte;
  }
}

}  // namespace narrowfloat::testing
