// The buffers of a quantize case, guarded and poisoned, and its call on any device: what the
// conformance tests compare, and what the tests of streams and graphs queue.
#pragma once

#include <vector>

#include "conformance/quantize_case.h"
#include "support/device_copies.h"
#include "support/tensors.h"

namespace narrowfloat::testing {

// The surroundings of a run, which must not matter: poison, guards, and the contents of the gaps
// between input rows and of the input rows that are not visited.
struct RunStyle {
  uint8_t poison = 0xCC;
  Guard guard = Guard::kCanary;
};

struct QuantizeBuffers {
  Matrix input;
  Matrix residual;  // Read and written.
  Vector vector;
  Vector encode_scales;
  Vector base_decode_scales;
  Vector row_list;
  Vector valid_rows;
  Vector row_offsets;
  QuantizedTensor output;
  QuantizedTensor extra;  // Only its scales.
  Matrix norm_output;

  [[nodiscard]] Buffers inputs() const;
  [[nodiscard]] Buffers outputs() const;
  [[nodiscard]] bool intact() const;
};

QuantizeBuffers make_buffers(const QuantizeCase& test_case, const RunStyle& style);

// Calls the operation with the buffers' copies on the device.
void queue_quantize(const QuantizeCase& test_case, const QuantizeBuffers& buffers,
                    const DeviceCopies& device, Stream stream);

// The layout of the case's output.
QuantizedLayout layout_of(const QuantizeCase& test_case);
// The input matrix as make_buffers() fills it, dense.
Matrix input_of(const QuantizeCase& test_case);

}  // namespace narrowfloat::testing
