// The public reordering of V's scales: checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "ops/kv_cache/kv_checks.h"
#include "runtime/dispatch.h"

namespace narrowfloat {

std::span<const KvReorderImpl> kv_reorder_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kKvReorderSm90, kKvReorderSm80,
#endif
        kKvReorderCpuBaseline, kKvReorderCpuReference
  };
  return kImpls;
}

std::string to_string(const KvReorderProblem& problem) {
  return fmt::format("{} pages of {} tokens, {} heads, {} blocks on {}", problem.pages,
                     problem.tokens, problem.heads, problem.blocks, to_string(problem.device));
}

namespace {

void run(const TensorView& input, const TensorView& output, KvLayout layout, bool is_inverse,
         Stream stream) {
  require_layout(layout);
  require_stored_scales("input", input, input.device);
  require_stored_scales("output", output, input.device);
  if (output.shape != input.shape) {
    throw_invalid("output: expected the shape of the input, {}, got {}", to_string(input),
                  to_string(output));
  }
  const bool is_nhd = layout == KvLayout::kNhd;
  const KvReorderProblem problem{.device = input.device,
                                 .pages = input.shape[0],
                                 .heads = input.shape[is_nhd ? 2 : 1],
                                 .tokens = input.shape[is_nhd ? 1 : 2],
                                 .blocks = input.shape[3],
                                 .is_inverse = is_inverse};
  if (problem.tokens % 4 != 0 || problem.blocks % 4 != 0) {
    throw_invalid("input: expected multiples of 4 tokens a page and scales a token, got {} and {}",
                  problem.tokens, problem.blocks);
  }
  const std::array outputs{byte_range("output", output)};
  const std::array inputs{byte_range("input", input)};
  require_disjoint(outputs, inputs);
  const KvReorderArgs args{.input = static_cast<const uint8_t*>(input.data),
                           .input_steps = paged_steps(input, layout),
                           .output = static_cast<uint8_t*>(output.data),
                           .output_steps = paged_steps(output, layout)};
  select("kv_reorder", kv_reorder_impls(), problem).run(problem, args, stream);
}

}  // namespace

void kv_reorder_v_scales(const TensorView& input, const TensorView& output, KvLayout layout,
                         Stream stream) {
  run(input, output, layout, false, stream);
}

void kv_restore_v_scales(const TensorView& input, const TensorView& output, KvLayout layout,
                         Stream stream) {
  run(input, output, layout, true, stream);
}

}  // namespace narrowfloat
