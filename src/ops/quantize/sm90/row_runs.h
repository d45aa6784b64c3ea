// What the kernels have in common in which a block of threads takes whole rows.
#pragma once

#include <cstdint>

namespace narrowfloat {

// Elements that a thread holds side by side: a block of NVFP4.
inline constexpr int kRowRun = 16;

// Rows from which two runs a thread are as fast; fewer cannot fill the GPU that way.
inline constexpr int64_t kTwoRunRows = 1025;

// Runs of a thread where there is a choice, threads of a row, and registers of each.
template <class Config>
concept RowTuning = requires(Config config) {
  config.max_threads;
  config.registers;
};

template <RowTuning Config>
consteval bool is_valid(const Config& config) {
  if constexpr (requires { config.runs; }) {
    if (config.runs != 1 && config.runs != 2) return false;
  }
  return config.max_threads % 32 == 0 && config.max_threads <= 1024 &&
         config.max_threads * config.registers <= 65536;
}

}  // namespace narrowfloat
