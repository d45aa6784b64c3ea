// The architecture that `narrowfloat eval` computes: Qwen3-MoE over bytes, as config.json describes
// it. models/tiny-moe/README.md has the formulas.
#pragma once

#include <cstdint>
#include <string>

namespace narrowfloat::cli {

struct ModelConfig {
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocabulary = 0;
  int64_t window = 0;  // Bytes that are scored together: max_position_embeddings.
  double rope_theta = 0;
  float eps = 0;
  bool has_tied_embeddings = false;
};

// Throws kUnsupported for another architecture or a part of this one that is not computed here,
// kCorruptData for values that do not fit together. `path` is for messages.
ModelConfig parse_model_config(const std::string& config_text, const std::string& path);

}  // namespace narrowfloat::cli
