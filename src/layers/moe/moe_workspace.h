// How a layer divides its workspace. Sizes are for the largest routing of T tokens, so they depend
// on T and the configuration alone and never decrease with T.
#pragma once

#include <cstdint>

#include "layers/moe/row_buffers.h"
#include "narrowfloat/moe.h"

namespace narrowfloat {

// What the layout is computed from: fixed when a layer is prepared.
struct MoeExtents {
  int64_t hidden = 0;
  int64_t inter = 0;
  int64_t fc1_rows = 0;       // F1
  int64_t slots = 0;          // k + S
  int32_t local_experts = 0;  // EL + S
  RowFormat input = RowFormat::kBf16;
  RowFormat intermediate = RowFormat::kBf16;
  DType fc1_dtype = DType::kF32;  // F64 with Accumulation::kFp64.
  DType slot_dtype = DType::kBF16;
  bool double_quantize_fc1 = false;
  bool fuses_activation = false;  // Into the first GEMM; depends on the token tile.
  bool input_per_expert = false;  // Plain rows are coded for each expert that reads them.
};

// What the first GEMM writes with a fused activation: the intermediate rows, or, where their scale
// needs a whole row, bf16 that is coded afterwards.
RowFormat fused_rows(const MoeExtents& extents);
inline bool codes_fused_rows(const MoeExtents& extents) {
  return extents.fuses_activation && fused_rows(extents) != extents.intermediate;
}

inline constexpr int64_t kGemmsOfALayer = 2;

// Offsets in bytes, multiples of kWorkspaceAlignment.
struct MoeWorkspace {
  int64_t tokens = 0;
  PermutationLayout permutation_layout;
  RowBuffers input;  // Plain inputs are coded into it; empty in modes with bf16 rows.
  RowBuffers intermediate;
  bool fuses_activation = false;
  bool codes_fused_rows = false;
  RowBuffers fc1_coded;  // Of double_quantize_fc1, else empty.

  int64_t ids = 0;
  int64_t weights = 0;
  int64_t permutation = 0;
  int64_t counters = 0;  // A word for each GEMM, which a GPU's blocks claim their work from.
  int64_t input_rows = 0;
  // The first GEMM's result, unless the activation is fused; the second GEMM's takes its place once
  // the activation has read it.
  int64_t gemm_rows = 0;
  int64_t intermediate_rows = 0;
  int64_t fc1_coded_rows = 0;
  int64_t gemm = 0;
  int64_t gemm_bytes = 0;
  int64_t second_gemm = 0;  // The same, unless the GEMMs' workspaces are apart.
  int64_t second_gemm_bytes = 0;
  int64_t total = 0;
};

// Of the GEMMs themselves. With a fused activation, which may leave rows in the second one's, they
// lie apart.
struct GemmBytes {
  int64_t first = 0;
  int64_t second = 0;
};
MoeWorkspace moe_workspace(const MoeExtents& extents, int64_t tokens, int32_t token_tile,
                           const GemmBytes& gemms);

}  // namespace narrowfloat
