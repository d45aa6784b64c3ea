// One case measured: time of the call with plain and with programmatic edges, the same bytes moved
// without arithmetic, and all bytes of the result compared with what the CPU makes of the same
// input.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "cli/bench/machine.h"
#include "cli/bench/sweep_case.h"
#include "cli/bench/work.h"
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
MachineRates measure_rates(Machine& machine, int replays);

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
  // What is reported where one time is: programmatic where it was measured.
  [[nodiscard]] const CallTime* headline() const;
  [[nodiscard]] std::optional<double> headline_memory_only() const;
  [[nodiscard]] double gb_per_s() const;  // 0 without a time.
};

class Measurement {
 public:
  Measurement(Machine& machine, const SweepArguments& arguments, const MachineRates& rates)
      : machine_(machine), arguments_(arguments), rates_(rates), values_(machine) {}

  // Whatever goes wrong is in the result.
  SweepResult measure(const SweepCase& what);

 private:
  struct Place;  // Where the sets of buffers are.

  SweepResult measure_work(const Work& work);
  Place place(const Work& work);
  void fill_inputs(const Work& work, const Place& place);
  void fill_outputs(const Work& work, const Place& place);
  std::vector<Bytes> expected_outputs(const Work& work, std::string& checked_with);
  std::string difference(const Work& work, const Place& place, const std::vector<Bytes>& expected,
                         std::string& note);
  int64_t calls_of(double us, int64_t sets) const;
  double memory_only_us(const Work& work, const Place& place, bool is_programmatic);

  Machine& machine_;
  SweepArguments arguments_;
  MachineRates rates_;
  RandomValues values_;
  // By bytes, sets and edges.
  std::map<std::tuple<uint64_t, uint64_t, uint64_t, int64_t, bool>, double> memory_only_;
};

}  // namespace narrowfloat::cli
