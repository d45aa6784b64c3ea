// First fit in order: a shard is closed when the next group would push its data or its header over
// a limit.
#include "checkpoint/shard_plan.h"

#include <iterator>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/safetensors_layout.h"

namespace narrowfloat {
namespace {

struct GroupSize {
  uint64_t tensor_bytes = 0;
  uint64_t entry_bytes = 0;
};

GroupSize size_of(const TensorGroup& group) {
  GroupSize size;
  for (const TensorSpec& tensor : group) {
    size.tensor_bytes += data_bytes(tensor);
    size.entry_bytes += max_entry_bytes(tensor);
  }
  return size;
}

void name_files(std::vector<PlannedShard>& shards) {
  if (shards.size() == 1) {
    shards[0].file_name = "model.safetensors";
    return;
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].file_name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  }
}

}  // namespace

std::vector<PlannedShard> plan_shards(std::span<const TensorGroup> groups,
                                      const ShardLimits& limits) {
  if (limits.max_shard_bytes == 0) throw_invalid("the shard size limit must be above 0");
  // The format's limit for entries, less metadata and padding.
  const uint64_t fixed_bytes = max_metadata_entry_bytes(limits.metadata) + kBufferAlignment;
  const uint64_t max_entries = fixed_bytes < kMaxHeaderBytes ? kMaxHeaderBytes - fixed_bytes : 0;

  std::vector<PlannedShard> shards(1);
  uint64_t entry_bytes = 0;
  for (const TensorGroup& group : groups) {
    const GroupSize size = size_of(group);
    if (size.entry_bytes > max_entries) {
      throw_invalid("tensor '{}' and what belongs to it need a header of {} bytes; the limit is {}",
                    printable(group.front().name), size.entry_bytes + fixed_bytes, kMaxHeaderBytes);
    }
    const bool is_full = shards.back().tensor_bytes + size.tensor_bytes > limits.max_shard_bytes ||
                         entry_bytes + size.entry_bytes > max_entries;
    if (is_full && !shards.back().tensors.empty()) {
      shards.emplace_back();
      entry_bytes = 0;
    }
    PlannedShard& shard = shards.back();
    shard.tensors.insert(shard.tensors.end(), group.begin(), group.end());
    shard.tensor_bytes += size.tensor_bytes;
    entry_bytes += size.entry_bytes;
  }
  name_files(shards);
  return shards;
}

std::string index_json(std::span<const PlannedShard> shards) {
  uint64_t total_size = 0;
  std::map<std::string_view, std::string_view> files;
  for (const PlannedShard& shard : shards) {
    total_size += shard.tensor_bytes;
    for (const TensorSpec& tensor : shard.tensors) files.emplace(tensor.name, shard.file_name);
  }
  std::string json;
  const auto out = std::back_inserter(json);
  fmt::format_to(out, "{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n", total_size);
  json += "  \"weight_map\": {";
  std::string_view separator = "\n";
  for (const auto& [tensor, file] : files) {
    fmt::format_to(out, "{}    {}: {}", separator, json_quote(tensor), json_quote(file));
    separator = ",\n";
  }
  json += "\n  }\n}\n";
  return json;
}

}  // namespace narrowfloat
