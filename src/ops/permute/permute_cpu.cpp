// cpu_reference: the definition of moe spec 5.1, one slot at a time.
//
//   cnt[e]   slots of local expert e
//   base[e]  sum over e' < e of ceil(cnt[e'] / tile) * tile;  base[last + 1] = rows in use
//   row      base[e] + number of slots of e with a smaller index
#include <algorithm>
#include <array>

#include "base/int_math.h"
#include "ops/permute/permute_problem.h"

namespace narrowfloat {
namespace {

using Counters = std::array<int32_t, kMaxLocalExperts + 1>;

constexpr int64_t kNotLocal = -1;

int64_t local_expert(const PermuteProblem& problem, int32_t id) {
  const int64_t expert = int64_t{id} - problem.expert_offset;
  return expert >= 0 && expert < problem.layout.local_experts ? expert : kNotLocal;
}

void write_rows(const PermuteProblem& problem, const PermuteArgs& args, const Counters& base) {
  const PermutationLayout& layout = problem.layout;
  std::fill_n(args.row_to_token, layout.max_rows, -1);
  std::fill_n(args.row_to_slot, layout.max_rows, -1);
  Counters rank{};
  for (int64_t slot = 0; slot < layout.tokens * layout.slots; ++slot) {
    const int64_t expert = local_expert(problem, args.ids[slot]);
    args.slot_to_row[slot] = -1;
    if (expert == kNotLocal) continue;
    const auto e = static_cast<size_t>(expert);
    const int32_t row = base[e] + rank[e]++;
    args.slot_to_row[slot] = row;
    args.row_to_token[row] = static_cast<int32_t>(slot / layout.slots);
    args.row_to_slot[row] = static_cast<int32_t>(slot);
  }
}

void write_tiles(const PermutationLayout& layout, const PermuteArgs& args, const Counters& count,
                 const Counters& base) {
  std::fill_n(args.tile_to_expert, layout.max_tiles, 0);
  std::fill_n(args.tile_row_end, layout.max_tiles, 0);
  for (int32_t expert = 0; expert < layout.local_experts; ++expert) {
    const auto e = static_cast<size_t>(expert);
    for (int32_t tile = base[e] / layout.token_tile; tile < base[e + 1] / layout.token_tile;
         ++tile) {
      args.tile_to_expert[tile] = expert;
      args.tile_row_end[tile] = std::min((tile + 1) * layout.token_tile, base[e] + count[e]);
    }
  }
}

void run_reference(const PermuteProblem& problem, const PermuteArgs& args, Stream /*stream*/) {
  const PermutationLayout& layout = problem.layout;
  Counters count{};
  for (int64_t slot = 0; slot < layout.tokens * layout.slots; ++slot) {
    const int64_t expert = local_expert(problem, args.ids[slot]);
    if (expert != kNotLocal) ++count[static_cast<size_t>(expert)];
  }
  Counters base{};
  for (size_t e = 0; e < static_cast<size_t>(layout.local_experts); ++e) {
    base[e + 1] = base[e] + static_cast<int32_t>(round_up(count[e], layout.token_tile));
  }
  write_rows(problem, args, base);
  write_tiles(layout, args, count, base);
  args.num_rows[0] = base[static_cast<size_t>(layout.local_experts)];
  args.num_tiles[0] = args.num_rows[0] / layout.token_tile;
}

Support supports(const PermuteProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const PermuteImpl kPermuteCpuReference{"cpu_reference", supports, run_reference};

}  // namespace narrowfloat
