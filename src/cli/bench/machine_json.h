// A machine and its rates in the documents of benchmarks.
#pragma once

#include "cli/bench/machine.h"
#include "cli/bench/measure.h"
#include "cli/json_output.h"

namespace narrowfloat::cli {

Json machine_json(const MachineFacts& facts, Device device);
Json rates_json(const MachineRates& rates);

}  // namespace narrowfloat::cli
