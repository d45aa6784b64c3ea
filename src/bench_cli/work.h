// A case made concrete: its buffers, the call of the library, the bytes that it must move, and what
// counts as a right result. The same call runs on buffers of any device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench_cli/sweep_case.h"
#include "cli_common/timing/machine.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

using Bytes = std::vector<std::byte>;

// Host copies of the random values of a machine (Machine::fill_random), kept between cases.
class RandomValues {
 public:
  explicit RandomValues(Machine& machine) : machine_(machine) {}
  // The elements [first, first + count), valid until the next call.
  std::span<const std::byte> get(DType dtype, int64_t first, int64_t count);

 private:
  Machine& machine_;
  std::map<DType, Bytes> values_;
};

struct WorkBuffer {
  enum class Role : int { kInput, kOutput, kUpdated };  // kUpdated: read and written.

  std::string name;
  Role role = Role::kInput;
  uint64_t size_bytes = 0;
  Bytes content;              // Its bytes before the call, or, where this is empty,
  DType dtype = DType::kF32;  // random values from `first_value` on.
  int64_t first_value = 0;

  [[nodiscard]] bool is_random() const { return role != Role::kOutput && content.empty(); }
  [[nodiscard]] int64_t num_values() const {
    return static_cast<int64_t>(size_bytes) / (bits(dtype) / 8);
  }
};

// Addresses of the buffers, in their order.
using Addresses = std::span<std::byte* const>;

// Says where a result differs from the expected one; empty where it is right. `note` gets what else
// is worth reporting about two results that need not be equal.
using Compare = std::function<std::string(const WorkBuffer& buffer, std::span<const std::byte> got,
                                          std::span<const std::byte> expected, std::string& note)>;

struct Work {
  std::vector<WorkBuffer> buffers;
  std::function<void(Addresses addresses, Device device, Stream stream)> call;
  uint64_t read_bytes = 0;         // As quantization spec 13 counts them.
  uint64_t second_read_bytes = 0;  // The same input once more, before the scale is known.
  uint64_t write_bytes = 0;
  int64_t elements = 0;        // Elements of the result: they choose what it is compared with.
  std::string_view operation;  // Its name in NARROWFLOAT_FORCE.
  bool has_baseline = false;   // Whether cpu_baseline exists, faster than the reference.
  std::string implementation;  // The one that runs; empty where explain() cannot tell.
  Compare compare;             // Absent: all bytes are equal.

  [[nodiscard]] uint64_t total_bytes() const {
    return read_bytes + second_read_bytes + write_bytes;
  }
};

Work make_work(const SweepCase& what, Device device, RandomValues& values);

// Parts of make_work() with files of their own.
Work make_activation_work(const SweepCase& what, RandomValues& values);
Work make_small_work(const SweepCase& what);

}  // namespace narrowfloat::cli
