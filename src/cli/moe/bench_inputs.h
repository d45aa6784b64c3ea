// Rows and routing of the timed runs of a layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cli/moe/bench_routing.h"
#include "cli/moe/layer_runner.h"
#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

// What all cases of a layer have in common.
struct BenchInputs {
  const MoeConfig& config;
  BenchRouting routing;
  std::vector<uint16_t> rows;  // bf16, as many as there are tokens in `routing`.

  [[nodiscard]] TensorView range(int64_t begin, int64_t count) const {
    const auto hidden = static_cast<size_t>(config.hidden);
    const auto first = static_cast<size_t>(begin) * hidden;
    return matrix_view(std::span(rows).subspan(first, static_cast<size_t>(count) * hidden),
                       config.hidden);
  }
};

}  // namespace narrowfloat::cli
