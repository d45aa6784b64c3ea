// `narrowfloat bench --device ...`: the cases of a sweep measured on one machine, and the report.
#pragma once

#include <vector>

#include "cli/arguments.h"
#include "cli/bench/measure.h"
#include "cli/bench/sweep_case.h"
#include "cli/exit_code.h"

namespace narrowfloat::cli {

struct Measured {
  SweepCase what;
  SweepResult result;
};

ExitCode run_sweep(const BenchArguments& arguments);

// In the form that was asked for.
void print_sweep(const BenchArguments& arguments, const Machine& machine, const MachineRates& rates,
                 const std::vector<Measured>& cases);

}  // namespace narrowfloat::cli
