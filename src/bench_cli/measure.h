// One case measured: time of the call with plain and with programmatic edges, the same bytes moved
// without arithmetic, and all bytes of the result compared with what the CPU makes of the same
// input. Also the rates of a machine, and the report of a sweep.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bench_cli/sweep_case.h"
#include "bench_cli/work.h"
#include "cli_common/output.h"
#include "cli_common/timing/machine.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {

// Bytes per second that nothing but memory limits, from buffers far larger than the cache.
struct MachineRates {
  double copy_gb_per_s = 0;  // Read and written, the better of a kernel's and the machine's own.
  double kernel_copy_gb_per_s = 0;
  double own_copy_gb_per_s = 0;
  double read_gb_per_s = 0;
  double mixed_gb_per_s = 0;  // Two reads for a write.
};
constexpr int kRateReplays = 5;
MachineRates measure_rates(Machine& machine, int replays = kRateReplays);
// read_gb_per_s alone, of large pages where the host has them, for what streams its weights.
double measure_read_rate(Machine& machine);

// A machine and its rates in the documents of benchmarks.
Json machine_json(const MachineFacts& facts, Device device);
Json rates_json(const MachineRates& rates);

struct SweepResult {
  std::string implementation;
  uint64_t read_bytes = 0;  // A second read included.
  uint64_t write_bytes = 0;
  int64_t buffer_sets = 0;
  std::optional<CallTime> plain;
  std::optional<CallTime> programmatic;
  std::optional<double> memory_only_us;
  std::optional<double> memory_only_programmatic_us;
  std::string checked_with;  // "cpu_reference", or the faster "cpu_baseline" for large results.
  std::string wrong;         // Empty where the result is right.
  std::string note;
  std::optional<ErrorKind> error;  // Nothing was measured: `wrong` has the message.

  [[nodiscard]] bool is_correct() const { return wrong.empty(); }
  [[nodiscard]] uint64_t total_bytes() const { return read_bytes + write_bytes; }
  // The time that is reported where one is: programmatic where it was measured.
  [[nodiscard]] const CallTime* headline() const;
  [[nodiscard]] std::optional<double> headline_memory_only() const;
  [[nodiscard]] double gb_per_s() const;  // 0 without a time.
};

class Measurement {
 public:
  Measurement(Machine& machine, const SweepArguments& arguments, const MachineRates& rates)
      : machine_(machine), arguments_(arguments), rates_(rates), values_(machine) {}

  // An error becomes part of the result.
  SweepResult measure(const SweepCase& what);

 private:
  struct Place;  // The addresses of the sets of buffers.

  SweepResult measure_work(const Work& work);
  Place place(const Work& work);
  void fill_inputs(const Work& work, const Place& place);
  void fill_outputs(const Work& work, const Place& place);
  std::vector<Bytes> expected_outputs(const Work& work, std::string& checked_with);
  std::string difference(const Work& work, const Place& place, const std::vector<Bytes>& expected,
                         std::string& note);
  ReplayPlan plan_of(double us, int64_t sets, bool is_programmatic) const;
  double memory_only_us(const Work& work, const Place& place, bool is_programmatic);

  Machine& machine_;
  SweepArguments arguments_;
  MachineRates rates_;
  RandomValues values_;
  // The key is bytes, sets and edges.
  std::map<std::tuple<uint64_t, uint64_t, uint64_t, int64_t, bool>, double> memory_only_;
};

// A case and its result.
struct Measured {
  SweepCase what;
  SweepResult result;
};
void print_sweep(const BenchArguments& arguments, const Machine& machine, const MachineRates& rates,
                 const std::vector<Measured>& cases);

}  // namespace narrowfloat::cli
