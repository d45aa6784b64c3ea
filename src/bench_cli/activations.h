// The inputs of a MoE layer from a safetensors file, such as calibration/activations.safetensors of
// models/tiny-moe, and what is measured on them: static scales come from the largest input and
// intermediate of a layer on given rows.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "narrowfloat/moe.h"
#include "narrowfloat/moe_checkpoint.h"

namespace narrowfloat::cli {

struct Activations {
  std::string path;
  int64_t tokens = 0;
  std::vector<float> rows;    // [tokens, H]
  std::vector<float> logits;  // [tokens, E]
  bool has_stored_logits = false;
};

// DIR/calibration/activations.safetensors, if it is there.
std::optional<std::string> default_activations(const std::string& directory);

// The first `max_tokens` rows (0: all) of `layers.L.hidden_states`, or of `hidden_states`; logits
// of `layers.L.router_logits` or `router_logits` if the file has them, else from the layer's
// router. Throws kCorruptData where a tensor is missing or has another shape.
Activations read_activations(const std::string& path, int64_t layer, const LoadedMoe& moe,
                             int64_t max_tokens);

// rows @ router_weight.T + router_logit_bias in fp32: [T, E].
std::vector<float> router_logits(const LoadedMoe& moe, std::span<const float> rows);

struct LayerMaxima {
  float input = 0;
  float inter = 0;
};

// Whether layers of this mode are prepared with maxima.
bool has_static_scales(MoeMode mode);

// The maxima on dense fp32 rows [T, H] with their logits [T, E]. `layer` has a mode with bf16 rows,
// such as bf16 or nvfp4_bf16; the maxima are of its intermediate.
LayerMaxima measure_maxima(const LoadedMoe& layer, std::span<const float> rows,
                           std::span<const float> logits);

// Throws kInvalidArgument for maxima that no scale can be made of: rows that are all zero, or not
// finite. `source` says where the rows are from.
void require_usable(const LayerMaxima& maxima, int64_t layer, const std::string& source);

}  // namespace narrowfloat::cli
