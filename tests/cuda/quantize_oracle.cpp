// See quantize_oracle.h.
#include "cuda/quantize_oracle.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/quantize_call.h"
#include "support/environment.h"
#include "support/gpu.h"

namespace narrowfloat::testing {
namespace {

// All outputs, after a run of `implementation`.
std::vector<std::vector<uint8_t>> run(const QuantizeCase& test_case,
                                      std::string_view implementation) {
  const QuantizeBuffers buffers = make_buffers(test_case, {});
  Buffers all = buffers.inputs();
  for (const GuardedBuffer* output : buffers.outputs()) all.push_back(output);
  const ForcedImplementation forced("quantize", implementation);
  const DeviceCopies device(all, {.on_host = implementation == "cpu_reference"});
  queue_quantize(test_case, buffers, device, device.stream());
  EXPECT_TRUE(device.take_back()) << "a canary was overwritten";
  std::vector<std::vector<uint8_t>> outputs;
  for (const GuardedBuffer* output : buffers.outputs()) outputs.push_back(output->copy());
  return outputs;
}

}  // namespace

void expect_oracle(QuantizeCase test_case, std::string_view idea) {
  test_case.seed += static_cast<uint64_t>(test_case.cols) * 31 + 7;
  const auto expected = run(test_case, "cpu_reference");
  const auto actual = run(test_case, gpu_implementation(idea));
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == actual[i]) continue;
    size_t byte = 0;
    while (expected[i][byte] == actual[i][byte]) ++byte;
    ADD_FAILURE() << to_string(test_case) << "\n  output " << i << ": byte " << byte << " of "
                  << expected[i].size()
                  << fmt::format(" is {:#04x}, expected {:#04x}", actual[i][byte],
                                 expected[i][byte]);
  }
}

QuantizeCase make_case(FormatId format, RowSourceKind source, int64_t rows, int64_t cols) {
  QuantizeCase test_case;
  test_case.format = format;
  test_case.layout = format_info(format).default_layout;
  test_case.source = source;
  test_case.rows = rows;
  test_case.cols = cols;
  test_case.fill = Fill::kNormalRows;
  return test_case;
}

}  // namespace narrowfloat::testing
