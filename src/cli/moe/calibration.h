// Static scales: the largest input and intermediate of a layer on given rows, which the modes with
// static scales need before they can be prepared.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "narrowfloat/moe.h"
#include "narrowfloat/moe_checkpoint.h"

namespace narrowfloat::cli {

struct LayerMaxima {
  float input = 0;
  float inter = 0;
};

// Whether layers of this mode are prepared with maxima.
bool has_static_scales(MoeMode mode);

// Of dense fp32 rows [T, H] and their logits [T, E]. `layer` has bf16 rows (a mode such as bf16 or
// nvfp4_bf16): its intermediate is what the maxima are of.
LayerMaxima measure_maxima(const LoadedMoe& layer, std::span<const float> rows,
                           std::span<const float> logits);

// Throws kInvalidArgument for maxima that no scale can be made of: rows that are all zero, or not
// finite. source: where the rows are from.
void require_usable(const LayerMaxima& maxima, int64_t layer, const std::string& source);

}  // namespace narrowfloat::cli
