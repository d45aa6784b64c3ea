// What the options of the commands about Mixture-of-Experts layers share.
#pragma once

#include <string>
#include <vector>

#include "cli/option_helpers.h"

namespace narrowfloat::cli {

constexpr int64_t kMaxTokens = 1 << 20;

// "bf16, fp8_tensor, ...".
std::string mode_list();

// Called for every --mode, not once with the last one.
void add_modes(CLI::App& command, std::vector<MoeMode>& modes, bool& is_all,
               const std::string& help);
void add_min_time(CLI::App& command, double& min_seconds);
// --device, for results that are checked on the CPU.
void add_checked_device(CLI::App& command, Device& device);

// `moe run`; the others are in options_moe_bench.cpp.
void add_moe_run(CLI::App& app, MoeRunArguments& arguments);

}  // namespace narrowfloat::cli
