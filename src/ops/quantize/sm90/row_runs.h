// Constants of the kernels in which one CTA quantizes whole rows.
#pragma once

#include <cstdint>

namespace narrowfloat {

// Adjacent elements that a thread holds: a block of NVFP4.
inline constexpr int kRowRun = 16;

// quantize_token_dense.cu: from this number of rows on two runs per thread are as fast; fewer rows
// cannot fill the GPU that way.
inline constexpr int64_t kTokenDenseTwoRunRows = 1025;

// A tuning: runs per thread where there is a choice, threads per row, and registers per thread.
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
