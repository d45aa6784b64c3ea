// What `narrowfloat moe bench` found out, and how it is printed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/arguments.h"
#include "cli/bench/measure.h"
#include "cli/moe/bench_case.h"
#include "cli/moe/shape.h"

namespace narrowfloat::cli {

struct ModeResults {
  MoeConfig config;
  std::string implementation;  // Of the first GEMM.
  std::vector<MoeBenchResult> cases;
};

struct MoeBenchReport {
  MoeShape shape;
  std::string machine;
  std::optional<MachineFacts> gpu;
  MachineRates rates;  // On the CPU: read_gb_per_s alone.
  MoeTuning tuning;
  std::vector<ModeResults> modes;
  std::vector<std::string> notes;
  bool has_wrong = false;
};

// To stdout, in the form that the arguments ask for.
void print_report(const MoeBenchArguments& arguments, const MoeBenchReport& report);

}  // namespace narrowfloat::cli
