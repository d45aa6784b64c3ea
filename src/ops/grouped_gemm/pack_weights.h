// Packs the caller's weights in host memory. Both packings have codes first, then scales, and as
// many bytes as the caller's weights with linear scales.
#pragma once

#include "ops/grouped_gemm/grouped_gemm_problem.h"

namespace narrowfloat {

// Packs codes unchanged and scales linear, for the oracle.
PackedWeightData pack_linear_weights(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                     Stream stream);
// Packs strips of 16 rows (strip_weights.h), for cpu_baseline.
PackedWeightData pack_weight_strips(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                    Stream stream);

}  // namespace narrowfloat
