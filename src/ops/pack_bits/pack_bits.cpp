// The public packing of bits: checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "ops/pack_bits/pack_bits_problem.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

std::span<const PackBitsImpl> pack_bits_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kPackBitsSm90, kPackBitsSm80,
#endif
        kPackBitsCpuBaseline, kPackBitsCpuReference
  };
  return kImpls;
}

std::string to_string(const PackBitsProblem& problem) {
  const std::string segments =
      problem.segments < 0 ? "" : fmt::format(" in {} segments", problem.segments);
  return fmt::format("{} elements{} on {}", problem.elements, segments, to_string(problem.device));
}

int64_t segment_packed_bytes(int64_t elements, int64_t segments) {
  if (elements < 0 || segments < 0) {
    throw_invalid("elements, segments: expected counts >= 0, got {} and {}", elements, segments);
  }
  // ceil(n / 8) is at most (n + 7) / 8.
  const auto padding = checked_mul(segments, 7);
  const auto total = padding ? checked_add(elements, *padding) : std::nullopt;
  if (!total) throw_invalid("segments: {} of {} elements exceed 63 bits", segments, elements);
  return *total / 8;
}

namespace {

void require_order(BitOrder order) {
  if (order == BitOrder::kBig || order == BitOrder::kLittle) return;
  throw_invalid("order: expected kBig or kLittle, got {}", static_cast<int>(order));
}

void require_elements(const TensorView& input) {
  require_view("input", input);
  require_dtype("input", input, {DType::kBool, DType::kU8});
  require_dense("input", input);
  require_data("input", input);
  require_cuda_alignment("input", input.data, input.device);
}

void require_offsets(const TensorView& offsets, int64_t elements) {
  // Offsets on a device are checked by the implementation alone.
  if (offsets.device.type != DeviceType::kCpu) return;
  const Indices values = indices_of(offsets);
  int64_t before = 0;
  for (int64_t i = 0; i < offsets.shape[0]; ++i) {
    if (values[i] < before || values[i] > elements) {
      throw_invalid("offsets: expected ascending values in [0, {}], got {} after {} at {}",
                    elements, values[i], before, i);
    }
    before = values[i];
  }
}

}  // namespace

void pack_bits(const TensorView& input, const TensorView& output, BitOrder order, Stream stream) {
  require_order(order);
  require_elements(input);
  const int64_t elements = input.num_elements();
  require_vector("output", output, DType::kU8, ceil_div(elements, 8), input.device);
  require_cuda_alignment("output", output.data, output.device);
  const std::array outputs{byte_range("output", output)};
  const std::array inputs{byte_range("input", input)};
  require_disjoint(outputs, inputs);
  const PackBitsProblem problem{.device = input.device, .elements = elements, .order = order};
  const PackBitsArgs args{.input = static_cast<const uint8_t*>(input.data),
                          .output = static_cast<uint8_t*>(output.data),
                          .output_bytes = output.num_elements(),
                          .offsets = {}};
  select("pack_bits", pack_bits_impls(), problem).run(problem, args, stream);
}

void segment_pack_bits(const TensorView& input, const TensorView& offsets, const TensorView& output,
                       const TensorView& output_offsets, BitOrder order, Stream stream) {
  require_order(order);
  require_elements(input);
  require_view("offsets", offsets);
  require_dtype("offsets", offsets, {DType::kI32, DType::kI64});
  if (offsets.rank != 1 || offsets.shape[0] < 1) {
    throw_invalid("offsets: expected [segments + 1], got {}", to_string(offsets));
  }
  const int64_t elements = input.num_elements();
  const int64_t segments = offsets.shape[0] - 1;
  require_vector("offsets", offsets, offsets.dtype, segments + 1, input.device);
  require_offsets(offsets, elements);
  require_vector("output_offsets", output_offsets, offsets.dtype, segments + 1, input.device);
  const int64_t least = segment_packed_bytes(elements, segments);
  require_vector("output", output, DType::kU8, output.num_elements(), input.device);
  require_cuda_alignment("output", output.data, output.device);
  if (output.num_elements() < least) {
    throw_invalid("output: expected at least {} bytes (segment_packed_bytes), got {}", least,
                  to_string(output));
  }
  const std::array outputs{byte_range("output", output),
                           byte_range("output_offsets", output_offsets)};
  const std::array inputs{byte_range("input", input), byte_range("offsets", offsets)};
  require_disjoint(outputs, inputs);
  const PackBitsProblem problem{
      .device = input.device, .elements = elements, .segments = segments, .order = order};
  const PackBitsArgs args{.input = static_cast<const uint8_t*>(input.data),
                          .output = static_cast<uint8_t*>(output.data),
                          .output_bytes = least,
                          .offsets = indices_of(offsets),
                          .output_offsets = output_offsets.data};
  select("pack_bits", pack_bits_impls(), problem).run(problem, args, stream);
}

}  // namespace narrowfloat
