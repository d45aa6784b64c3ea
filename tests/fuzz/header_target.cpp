// Headers from memory. What is accepted is checked against what it promises.
#include "checkpoint/safetensors_header.h"
#include "fuzz/fuzz_input.h"
#include "fuzz/fuzz_targets.h"

namespace narrowfloat::testing {
namespace {

// Every accepted header promises this, and later reads rely on it.
void check_header(const ParsedHeader& header, const HeaderContext& context) {
  uint64_t covered = context.buffer_begin;
  for (const TensorInfo& tensor : header.tensors) {
    const DenseSize size = dense_size(tensor.dtype, tensor.shape);
    fuzz_require(size.problem.empty() && size.size_bytes == tensor.size_bytes, "size of a tensor");
    fuzz_require(tensor.offset == covered || (context.lenient && tensor.offset > covered),
                 "place of a tensor");
    fuzz_require(tensor.num_elements() >= 0, "number of elements");
    covered = tensor.offset + tensor.size_bytes;
  }
  const uint64_t end = context.buffer_begin + context.buffer_bytes;
  fuzz_require(covered == end || (context.lenient && covered < end), "bytes of no tensor");
}

}  // namespace

void fuzz_header(std::span<const uint8_t> bytes) {
  FuzzInput input(bytes);
  const uint8_t flags = input.byte();
  HeaderContext context{.file = "file", .lenient = (flags & 1U) != 0};
  // Small limits, so that small inputs reach them.
  context.limits = {.max_tensors = 20, .max_metadata_entries = 10, .max_metadata_bytes = 100};
  expect_result_or_error([&] {
    std::string_view json;
    if ((flags & 2U) != 0) {
      const std::string_view file = input.rest();
      const uint64_t length = header_length(file, file.size(), context.file);
      json = file.substr(kLengthFieldBytes, length);
      context.buffer_bytes = file.size() - kLengthFieldBytes - length;
    } else {
      context.buffer_bytes = input.bits(2);
      json = input.rest();
    }
    context.buffer_begin = kLengthFieldBytes + json.size();
    check_header(parse_header(json, context), context);
  });
}

}  // namespace narrowfloat::testing
