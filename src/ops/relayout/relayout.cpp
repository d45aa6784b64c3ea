// The public change of scale layout: checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "ops/relayout/relayout_problem.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

std::span<const RelayoutImpl> relayout_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kRelayoutSm90, kRelayoutSm80,
#endif
        kRelayoutCpuBaseline, kRelayoutCpuReference
  };
  return kImpls;
}

std::string to_string(const RelayoutProblem& problem) {
  return fmt::format("{} scales {}x{}x{} {} -> {} on {}", name(problem.type), problem.batch,
                     problem.rows, problem.blocks, name(problem.from), name(problem.to),
                     to_string(problem.device));
}

void relayout(FormatId format, const ScaleView& input, const ScaleView& output, Stream stream) {
  require_scales("input", input, format);
  require_scales("output", output, format);
  require_device("output", output.device, input.device);
  require_cuda_alignment("input", input.data, input.device);
  require_cuda_alignment("output", output.data, input.device);
  if (output.batch != input.batch || output.rows != input.rows || output.blocks != input.blocks) {
    throw_invalid("output: expected the extents of the input, {} x {} x {}, got {} x {} x {}",
                  input.batch, input.rows, input.blocks, output.batch, output.rows, output.blocks);
  }
  const std::array outputs{byte_range("output", output)};
  const std::array inputs{byte_range("input", input)};
  require_disjoint(outputs, inputs);
  // Other extents of scales without elements may be any numbers, too many to go over.
  if (output.capacity == 0) return;
  const RelayoutProblem problem{.type = input.type,
                                .from = input.layout,
                                .to = output.layout,
                                .device = input.device,
                                .batch = input.batch,
                                .rows = input.rows,
                                .blocks = input.blocks};
  const RelayoutArgs args{
      .input = input.data,
      .output = output.data,
      .input_scales = scale_image_size(input.layout, input.rows, input.blocks),
      .output_scales = scale_image_size(output.layout, output.rows, output.blocks)};
  select("relayout", relayout_impls(), problem).run(problem, args, stream);
}

}  // namespace narrowfloat
