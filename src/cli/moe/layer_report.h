// What `narrowfloat moe run` found out about a layer, and how it is printed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/arguments.h"
#include "cli/moe/activations.h"
#include "cli/moe/figures.h"
#include "cli/timing.h"

namespace narrowfloat::cli {

// One mode.
struct LayerResult {
  MoeMode mode = MoeMode::kBf16;
  std::optional<Distance> to_unquantized;
  Distance to_same_inputs;
  Timing timing;
  LayerWork work;
};

struct LayerReport {
  explicit LayerReport(const Activations& inputs) : activations(inputs) {}

  MoeConfig config;
  std::string machine;
  std::string stored_format;
  const Activations& activations;
  bool has_static_scales = false;
  std::vector<int64_t> load;
  std::vector<LayerResult> modes;
};

// To stdout, in the form that the arguments ask for.
void print_report(const MoeRunArguments& arguments, const LayerReport& report);

}  // namespace narrowfloat::cli
