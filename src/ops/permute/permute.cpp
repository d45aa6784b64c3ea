// The public permutation: checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "ops/permute/permute_problem.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

std::span<const PermuteImpl> permute_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kPermuteSm90Block, kPermuteSm90Grid, kPermuteSm80Block, kPermuteSm80Grid,
#endif
        kPermuteCpuBaseline, kPermuteCpuReference
  };
  return kImpls;
}

std::string to_string(const PermuteProblem& problem) {
  const PermutationLayout& layout = problem.layout;
  return fmt::format("{}x{} slots, local experts {} to {}, tile {} on {}", layout.tokens,
                     layout.slots, problem.expert_offset,
                     problem.expert_offset + layout.local_experts - 1, layout.token_tile,
                     to_string(problem.device));
}

namespace {

void require_ids(const TensorView& ids) {
  require_view("ids", ids);
  require_dtype("ids", ids, {DType::kI32});
  if (ids.rank != 2) throw_invalid("ids: expected [tokens, slots], got {}", to_string(ids));
  require_dense("ids", ids);
  require_data("ids", ids);
}

// Requires the views of the layout, on the device of the ids.
void require_permutation(const Permutation& maps, const PermutationLayout& layout, Device device) {
  const auto require = [&](std::string_view argument, const TensorView& view, int64_t count) {
    require_vector(argument, view, DType::kI32, count, device);
  };
  require("permutation.slot_to_row", maps.slot_to_row, layout.tokens * layout.slots);
  require("permutation.row_to_token", maps.row_to_token, layout.max_rows);
  require("permutation.row_to_slot", maps.row_to_slot, layout.max_rows);
  require("permutation.num_rows", maps.num_rows, 1);
  require("permutation.tile_to_expert", maps.tile_to_expert, layout.max_tiles);
  require("permutation.tile_row_end", maps.tile_row_end, layout.max_tiles);
  require("permutation.num_tiles", maps.num_tiles, 1);
}

void require_no_overlap(const TensorView& ids, const Permutation& maps) {
  const std::array outputs{byte_range("permutation.slot_to_row", maps.slot_to_row),
                           byte_range("permutation.row_to_token", maps.row_to_token),
                           byte_range("permutation.row_to_slot", maps.row_to_slot),
                           byte_range("permutation.num_rows", maps.num_rows),
                           byte_range("permutation.tile_to_expert", maps.tile_to_expert),
                           byte_range("permutation.tile_row_end", maps.tile_row_end),
                           byte_range("permutation.num_tiles", maps.num_tiles)};
  const std::array inputs{byte_range("ids", ids)};
  require_disjoint(outputs, inputs);
}

}  // namespace

void permute(const TensorView& ids, int32_t expert_offset, int32_t local_experts,
             const Permutation& permutation, const WordsToClear& cleared, Stream stream) {
  require_ids(ids);
  const PermutationLayout layout =
      permutation_layout(ids.shape[0], ids.shape[1], local_experts, permutation.token_tile);
  if (expert_offset < 0 || expert_offset > kMaxLocalExperts - local_experts) {
    throw_invalid("expert_offset: expected 0 to {} with {} local experts, got {}",
                  kMaxLocalExperts - local_experts, local_experts, expert_offset);
  }
  require_permutation(permutation, layout, ids.device);
  require_no_overlap(ids, permutation);
  const auto ints = [](const TensorView& view) { return static_cast<int32_t*>(view.data); };
  const PermuteProblem problem{
      .layout = layout, .expert_offset = expert_offset, .device = ids.device};
  const PermuteArgs args{.ids = ints(ids),
                         .slot_to_row = ints(permutation.slot_to_row),
                         .row_to_token = ints(permutation.row_to_token),
                         .row_to_slot = ints(permutation.row_to_slot),
                         .num_rows = ints(permutation.num_rows),
                         .tile_to_expert = ints(permutation.tile_to_expert),
                         .tile_row_end = ints(permutation.tile_row_end),
                         .num_tiles = ints(permutation.num_tiles),
                         .cleared = cleared};
  select("permute", permute_impls(), problem).run(problem, args, stream);
}

void permute(const TensorView& ids, int32_t expert_offset, int32_t local_experts,
             const Permutation& permutation, Stream stream) {
  permute(ids, expert_offset, local_experts, permutation, WordsToClear{}, stream);
}

}  // namespace narrowfloat
