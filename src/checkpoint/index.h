// model.safetensors.index.json: {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}.
//
// The file names are untrusted and are opened, so each must be one plain name that cannot leave the
// checkpoint's directory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace narrowfloat {

inline constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
inline constexpr uint64_t kMaxIndexBytes = 100'000'000;

struct ShardIndex {
  struct Entry {
    std::string tensor;
    size_t file = 0;  // Index into `files`.
  };
  std::vector<std::string> files;  // Sorted, each once.
  std::vector<Entry> entries;      // Sorted by tensor.
  std::optional<int64_t> total_size;
  std::vector<std::string> warnings;
};

// Throws kCorruptData; `source` must be printable and starts every message and warning.
ShardIndex parse_index(std::string_view json, std::string_view source);

}  // namespace narrowfloat
