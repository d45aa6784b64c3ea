// Which rank owns an expert: contiguous ranges, the first experts % ranks ranks one expert more.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace narrowfloat {

// The rank that owns an expert, 0 <= id < experts (see expert_shard()).
NF_HOST_DEVICE constexpr int rank_of_expert(int32_t experts, int ranks, int32_t id) {
  const int32_t least = experts / ranks;
  const int32_t extra = experts % ranks;
  const int32_t of_larger = extra * (least + 1);
  return id < of_larger ? id / (least + 1) : extra + (id - of_larger) / least;
}

}  // namespace narrowfloat
