// See quantize_run.h.
#include "conformance/quantize_run.h"

#include "conformance/coverage.h"
#include "narrowfloat/error.h"
#include "support/environment.h"

namespace narrowfloat::testing {
namespace {

Buffers all_buffers(const QuantizeBuffers& b) {
  Buffers all = b.inputs();
  const Buffers outputs = b.outputs();
  all.insert(all.end(), outputs.begin(), outputs.end());
  return all;
}

// The outputs as one sequence of bytes.
std::vector<uint8_t> all_outputs(const QuantizeBuffers& b) {
  std::vector<uint8_t> all;
  for (const GuardedBuffer* buffer : b.outputs()) {
    const std::vector<uint8_t> copy = buffer->copy();
    all.insert(all.end(), copy.begin(), copy.end());
  }
  return all;
}

}  // namespace

std::optional<QuantizeOutput> run_quantize(const QuantizeCase& c, std::string_view implementation,
                                           const RunStyle& style, std::string* refusal) {
  const QuantizeBuffers b = make_buffers(c, style);
  // Rows that do not count hold whatever a previous batch left there. (A norm reads them all: it
  // updates the residual and norm_output of every row.)
  for (int64_t i = 0; i < b.input.num_rows() && !c.is_norm(); ++i) {
    if (!c.is_visited(i / c.rows, i % c.rows)) b.input.poison_row(i, style.poison);
  }
  const std::vector<uint8_t> input = b.input.buffer().copy();
  const std::vector<uint8_t> vector = b.vector.buffer().copy();
  const std::vector<uint8_t> before = all_outputs(b);
  const ForcedImplementation forced("quantize", implementation);
  const DeviceCopies device(all_buffers(b), {.on_host = !is_for_device(implementation),
                                             .programmatic_launch = style.guard == Guard::kPage});
  bool canaries_intact = false;
  try {
    queue_quantize(c, b, device, device.stream());
    canaries_intact = device.take_back();
  } catch (const Error& error) {
    canaries_intact = device.take_back();
    if (error.kind() != ErrorKind::kUnsupported || before != all_outputs(b)) throw;
    if (refusal != nullptr) *refusal = error.what();
    return std::nullopt;
  }
  QuantizeOutput output{.tensor = bytes_of(b.output),
                        .extra_scales = b.extra.scales.copy(),
                        .norm_output = b.norm_output.elements(),
                        .residual = b.residual.elements()};
  output.canaries_intact = canaries_intact && b.intact();
  output.inputs_unchanged = input == b.input.buffer().copy() && vector == b.vector.buffer().copy();
  return output;
}

}  // namespace narrowfloat::testing
