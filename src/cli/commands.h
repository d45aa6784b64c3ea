// The commands, one cmd_<name>.cpp each. They print to stdout and stderr, return the exit code of
// what they found, and throw narrowfloat::Error.
#pragma once

#include "cli/arguments.h"
#include "cli/exit_code.h"

namespace narrowfloat::cli {

ExitCode run(const QuantizeArguments& arguments);
ExitCode run(const DequantizeArguments& arguments);
ExitCode run(const InspectArguments& arguments);
ExitCode run(const DiffArguments& arguments);
ExitCode run(const ExplainArguments& arguments);
ExitCode run(const DoctorArguments& arguments);
ExitCode run(const BenchArguments& arguments);
ExitCode run(const EvalArguments& arguments);
ExitCode run(const MoeRunArguments& arguments);
ExitCode run(const MoeBenchArguments& arguments);
ExitCode run(const MoeGemmArguments& arguments);
ExitCode run(const MoeTuneArguments& arguments);
ExitCode run(const MoeExplainArguments& arguments);

}  // namespace narrowfloat::cli
