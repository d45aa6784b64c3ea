// The configuration of a layer that `narrowfloat moe bench` and `moe tune` measure.
#pragma once

#include <cstdint>

#include "cli/moe/shape.h"
#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

// The part of the experts that one rank has: rank / num_ranks of all.
struct ExpertShard {
  int32_t rank = 0;
  int32_t num_ranks = 1;
};

// The layer of `shape` in `mode`, with as many of its experts as `max_bytes` hold together with the
// prepared copy and the buffers for `max_tokens`. Throws kInvalidArgument where the mode cannot
// have these extents, or not even the fewest experts fit.
MoeConfig bench_config(const MoeShape& shape, MoeMode mode, const ExpertShard& shard,
                       int64_t max_tokens, uint64_t max_bytes);

}  // namespace narrowfloat::cli
