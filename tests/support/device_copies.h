// Runs a call on the device under test with the buffers of a host test: what the conformance tests
// share between CPU and GPU. On the CPU everything here is the identity (device_copies_cpu.cpp); on
// a GPU (device_copies_cuda.cpp) each guarded buffer gets a guarded copy there, views are moved to
// the copies, and take_back() brings the bytes to the host buffers, where the test looks at them.
// Which of the two a test executable links is what makes it a test of the CPU or of the GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "narrowfloat/format.h"
#include "narrowfloat/moe_types.h"
#include "support/guarded_buffer.h"

namespace narrowfloat::testing {

Device device_under_test();
// The first part of the names of the implementations that the device runs: "cpu_", "sm90_" or
// "sm80_".
std::string device_prefix();
// Empty, or why no test can run on the device.
std::string device_missing();
// A gap of `elements` or a little more between rows, as the device wants its rows to lie.
int64_t device_gap(int64_t elements);

using Buffers = std::vector<const GuardedBuffer*>;

struct DeviceCopyStyle {
  Device device = device_under_test();
  bool on_host = false;  // No copies: the oracle's runs.
  int64_t alignment =
      16;  // Alignment of all buffers, up to 16; otherwise they start where the host's do.
  bool programmatic_launch = false;
  // Buffers whose copies start out as memory that nobody wrote: what initcheck looks for.
  Buffers uninitialized = {};
};

class DeviceCopies {
 public:
  explicit DeviceCopies(const Buffers& buffers, const DeviceCopyStyle& style = {});
  ~DeviceCopies();
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  // Views of the copies, for views of memory inside the given buffers. Absent views stay absent.
  [[nodiscard]] TensorView view(const TensorView& host) const;
  [[nodiscard]] ScaleView view(const ScaleView& host) const;
  [[nodiscard]] QuantizedView view(const QuantizedView& host) const;
  [[nodiscard]] CodedRows view(const CodedRows& host) const;
  [[nodiscard]] PerExpert view(const PerExpert& host) const;
  [[nodiscard]] Stream stream() const;
  [[nodiscard]] Device device() const;

  // Copies the bytes of the host buffers again.
  void send() const;
  // Waits, then copies all bytes to the host buffers. False if a canary on the device was
  // overwritten.
  [[nodiscard]] bool take_back() const;

 private:
  [[nodiscard]] void* moved(void* host) const;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace narrowfloat::testing
