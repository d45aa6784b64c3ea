// The configuration of a layer that `narrowfloat moe bench` and `moe tune` measure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/bench/machine.h"
#include "cli/moe/shape.h"
#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

// The part of the experts that one rank has: rank / num_ranks of all.
struct ExpertShard {
  int32_t rank = 0;
  int32_t num_ranks = 1;
};

// In the order of the table, each once; the shape's own where none is named. A named mode that
// cannot have the shape stays: an error will say why. `notes` gets those that "all" leaves out.
std::vector<MoeMode> bench_modes(const MoeShape& shape, std::span<const MoeMode> named, bool is_all,
                                 std::vector<std::string>& notes);

// `asked_for`, or where it is 0 a part of what the host has available, or the GPU that the layer is
// made on has in all.
uint64_t memory_limit(uint64_t asked_for, const Machine* gpu);

// The layer of `shape` in `mode`, with as many of its experts as `max_bytes` hold together with the
// prepared copy and the buffers for `max_tokens`. Throws kInvalidArgument where the mode cannot
// have these extents, or not even the fewest experts fit.
MoeConfig bench_config(const MoeShape& shape, MoeMode mode, const ExpertShard& shard,
                       int64_t max_tokens, uint64_t max_bytes);

}  // namespace narrowfloat::cli
