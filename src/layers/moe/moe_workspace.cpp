// See moe_workspace.h; the formula in words is in docs/moe.md.
#include "layers/moe/moe_workspace.h"

#include <algorithm>

#include "base/int_math.h"

namespace narrowfloat {

namespace {

// What lies between the first GEMM and the rows of the second.
int64_t fc1_row_bytes(const MoeExtents& extents) {
  if (!extents.fuses_activation) return extents.fc1_rows * bits(extents.fc1_dtype) / 8;
  return codes_fused_rows(extents) ? row_bytes(fused_rows(extents), extents.inter) : 0;
}

}  // namespace

RowFormat fused_rows(const MoeExtents& extents) {
  const bool needs_whole_rows = extents.intermediate == RowFormat::kNvfp4PerToken;
  return needs_whole_rows ? RowFormat::kBf16 : extents.intermediate;
}

MoeWorkspace moe_workspace(const MoeExtents& extents, int64_t tokens, int32_t token_tile,
                           const GemmBytes& gemms) {
  MoeWorkspace plan;
  plan.tokens = tokens;
  plan.fuses_activation = extents.fuses_activation;
  plan.codes_fused_rows = codes_fused_rows(extents);
  plan.permutation_layout =
      permutation_layout(tokens, extents.slots, extents.local_experts, token_tile);
  const int64_t max_rows = plan.permutation_layout.max_rows;
  const int64_t coded_rows = extents.input_per_expert ? max_rows : tokens;
  plan.input = row_buffers(extents.input, extents.input == RowFormat::kBf16 ? 0 : coded_rows,
                           extents.hidden);
  plan.intermediate = row_buffers(extents.intermediate, max_rows, extents.inter);
  plan.fc1_coded = row_buffers(RowFormat::kFp8Group, extents.double_quantize_fc1 ? max_rows : 0,
                               extents.fc1_rows);
  int64_t offset = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = offset;
    offset += round_up(bytes, kWorkspaceAlignment);
    return begin;
  };
  const int64_t fc1_bytes = max_rows * fc1_row_bytes(extents);
  const int64_t slot_bytes = max_rows * extents.hidden * bits(extents.slot_dtype) / 8;
  plan.ids = take(tokens * extents.slots * 4);
  plan.weights = take(tokens * extents.slots * 4);
  plan.permutation = take(plan.permutation_layout.bytes);
  plan.counters = take(kGemmsOfALayer * int64_t{sizeof(uint32_t)});
  plan.input_rows = take(plan.input.bytes());
  plan.gemm_rows = take(std::max(fc1_bytes, slot_bytes));
  plan.intermediate_rows = take(plan.intermediate.bytes());
  plan.fc1_coded_rows = take(plan.fc1_coded.bytes());
  plan.gemm_bytes = extents.fuses_activation ? gemms.first : std::max(gemms.first, gemms.second);
  plan.second_gemm_bytes = extents.fuses_activation ? gemms.second : plan.gemm_bytes;
  plan.gemm = take(plan.gemm_bytes);
  plan.second_gemm = extents.fuses_activation ? take(plan.second_gemm_bytes) : plan.gemm;
  plan.total = offset;
  return plan;
}

}  // namespace narrowfloat
