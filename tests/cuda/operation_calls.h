// Small calls of every operation, for tests of how work is queued: graphs, programmatic launch,
// streams, threads, devices. What the calls compute is for the conformance tests to judge; here the
// reference is the same call queued alone on one stream.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "support/device_copies.h"
#include "support/gpu.h"
#include "support/guarded_buffer.h"

namespace narrowfloat::testing {

using OutputBytes = std::vector<std::vector<uint8_t>>;

struct OperationCall {
  std::string name;
  Buffers inputs;  // The first one holds the data, any bytes of which are valid.
  Buffers outputs;
  OutputBytes before;             // Contents of the outputs before a run.
  bool updates_in_place = false;  // An output is read as well: a second run gives other bytes.
  bool writes_everything = true;  // Every output byte.
  // Queues the call on the copies. Owns the buffers.
  std::function<void(const DeviceCopies& device, Stream stream)> queue;

  [[nodiscard]] Buffers buffers() const;
};

inline TensorView as_matrix(const GuardedBuffer& buffer, DType dtype, int64_t rows, int64_t cols) {
  return TensorView::contiguous(buffer.data(), dtype, {rows, cols});
}

// Calls of every operation, format and layout, with options and shapes drawn from the seed,
// `per_kind` of each. Contains only calls that this build's GPU code takes.
std::vector<OperationCall> sample_operation_calls(uint64_t seed, int64_t per_kind);

// Waits, and brings the outputs to the host. Fails the test where a canary was overwritten.
OutputBytes take_outputs(const OperationCall& call, const DeviceCopies& device);
// Sends the inputs, and the outputs as they were before any run.
void send(const OperationCall& call, const DeviceCopies& device);
// Sends, queues the call, and takes the outputs.
OutputBytes run_alone(const OperationCall& call, const DeviceCopies& device, Stream stream);
// "output 1: byte 17 of 64 is 0x03, expected 0x04", or empty.
std::string difference(const OutputBytes& expected, const OutputBytes& actual);

}  // namespace narrowfloat::testing
