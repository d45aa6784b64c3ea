// Making weight images in host memory from the caller's weights. Both have codes first, scales
// behind them, and as many bytes as the caller's weights with linear scales.
#pragma once

#include "ops/grouped_gemm/grouped_gemm_problem.h"

namespace narrowfloat {

// Codes as they came, linear scales: what the oracle reads.
WeightImage make_canonical_image(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                 Stream stream);
// Panels of 16 rows (panel_image.h).
WeightImage make_panel_image(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                             Stream stream);

}  // namespace narrowfloat
