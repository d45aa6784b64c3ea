// The distribution of output tensors over files, and the index that lists them.
//
// A group (codes, scales, global scale of one weight) stays in one shard and tensors are never
// split. Groups keep their order, so the plan depends on its input alone.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "narrowfloat/safetensors.h"

namespace narrowfloat {

using TensorGroup = std::vector<TensorSpec>;

struct ShardLimits {
  uint64_t max_shard_bytes = 5'000'000'000;  // Tensor data. A larger group has its own shard.
  // The __metadata__ of every shard; counts towards the limit on headers.
  std::map<std::string, std::string> metadata;
};

struct PlannedShard {
  std::string file_name;  // "model.safetensors", or "model-00001-of-00012.safetensors".
  std::vector<TensorSpec> tensors;
  uint64_t tensor_bytes = 0;
};

// Returns at least one shard. Throws kInvalidArgument for impossible shapes, a shard limit of 0,
// and a group whose header alone is over the format's limit.
std::vector<PlannedShard> plan_shards(std::span<const TensorGroup> groups,
                                      const ShardLimits& limits);

inline constexpr const char* kIndexFileName = "model.safetensors.index.json";
// Text of the index: total_size is the sum of tensor bytes, names are sorted.
std::string index_json(std::span<const PlannedShard> shards);

}  // namespace narrowfloat
