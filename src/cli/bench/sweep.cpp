// A case that fails does not end a sweep, unless the device itself failed: nothing works after
// that.
#include "cli/bench/sweep.h"

#include <fmt/format.h>

#include "cli/output.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

std::unique_ptr<Machine> open_machine(Device device) {
  return device.type == DeviceType::kCpu ? open_host() : open_gpu(device.index);
}

// A wrong result counts most: it is what nobody may overlook.
ExitCode exit_code_of(const std::vector<Measured>& cases) {
  ExitCode code = ExitCode::kDone;
  for (const auto& [what, result] : cases) {
    if (result.is_correct()) continue;
    if (!result.error) return ExitCode::kFindings;
    code = exit_code(*result.error);
  }
  return code;
}

}  // namespace

ExitCode run_sweep(const BenchArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const std::vector<SweepCase> planned = cases_of(arguments);
  const std::unique_ptr<Machine> machine = open_machine(*arguments.sweep.device);
  const MachineRates rates = measure_rates(*machine, arguments.sweep.replays);
  const bool has_progress = stderr_is_terminal() && !arguments.output.is_quiet;
  Measurement measurement(*machine, arguments.sweep, rates);
  std::vector<Measured> cases;
  for (const SweepCase& what : planned) {
    if (has_progress) {
      write_stderr(fmt::format("\r\x1b[K{} of {}", cases.size() + 1, planned.size()));
    }
    cases.push_back({what, measurement.measure(what)});
    if (cases.back().result.error == ErrorKind::kDevice) break;
  }
  if (has_progress) write_stderr("\r\x1b[K");
  print_sweep(arguments, *machine, rates, cases);
  return exit_code_of(cases);
}

}  // namespace narrowfloat::cli
