// The plan of a layer's run: its stages in execution order, and the division of the workspace into
// the buffers between them. It depends on the configuration, the number of tokens and the device,
// and on two facts of a call: whether its rows are quantized here, and which kernels route.
// MoeLayer iterates the stages; plan_moe() describes them.
//
// Sizes are those of the largest routing of T tokens, so they never decrease with T.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "layers/moe/row_buffers.h"
#include "narrowfloat/moe.h"

namespace narrowfloat {

// The inputs of a plan besides the number of tokens; fixed when a layer is prepared.
struct MoeExtents {
  int64_t hidden = 0;
  int64_t inter = 0;
  int64_t fc1_rows = 0;       // F1
  int64_t slots = 0;          // k + S
  int32_t local_experts = 0;  // EL + S
  RowFormat input = RowFormat::kBf16;
  RowFormat intermediate = RowFormat::kBf16;
  Accumulation accumulation = Accumulation::kFp32;
  DType slot_dtype = DType::kBF16;
  bool double_quantize_fc1 = false;
  bool weight_on_input = false;
  bool fuses_activation = false;  // The first GEMM fuses the activation; depends on the token tile.
  bool input_per_expert = false;  // Unquantized rows are quantized for each expert that reads them.

  [[nodiscard]] DType fc1_dtype() const {
    return accumulation == Accumulation::kFp64 ? DType::kF64 : DType::kF32;
  }
};

// The format of the rows that the first GEMM stores with a fused activation: the intermediate rows,
// or bf16 rows that are quantized afterwards, where their scale needs a whole row.
RowFormat fused_rows(const MoeExtents& extents);
inline bool quantizes_fused_rows(const MoeExtents& extents) {
  return extents.fuses_activation && fused_rows(extents) != extents.intermediate;
}

inline constexpr int64_t kGemmsOfALayer = 2;

enum class MoeBufferId : int {
  kIds = 0,
  kWeights,
  kPermutation,
  kCounters,   // One word per GEMM: its dynamic tile scheduler's counter.
  kInputRows,  // The inputs, quantized.
  // The result of the first GEMM, unless the activation is fused. The result of the second GEMM
  // overwrites it after the activation has read it.
  kGemmRows,
  kIntermediateRows,
  kFc1Rows,            // The result of the first GEMM, quantized (double_quantize_fc1).
  kFirstGemmScratch,   // The workspace of the GEMM itself.
  kSecondGemmScratch,  // Separate with a fused activation, which may store rows in it.
};
inline constexpr size_t kMoeBuffers = 10;
std::string_view name(MoeBufferId id);

// A part of the workspace, at a multiple of kWorkspaceAlignment.
struct MoeBuffer {
  int64_t offset = 0;
  int64_t bytes = 0;
};

// A set of buffers, as bits.
using MoeBufferSet = uint32_t;
constexpr MoeBufferSet buffer_set(std::initializer_list<MoeBufferId> ids) {
  MoeBufferSet set = 0;
  for (const MoeBufferId id : ids) set |= 1U << static_cast<unsigned>(id);
  return set;
}
constexpr bool has(MoeBufferSet set, MoeBufferId id) { return (set & buffer_set({id})) != 0; }

enum class MoePlanStageKind : int {
  kRoutePermute = 0,  // Routes, permutes and quantizes input rows, in one launch.
  kRoute,
  kPermute,
  kQuantizeInput,
  kFirstGemm,
  kQuantizeFc1,
  kActivation,
  kQuantizeIntermediate,
  kSecondGemm,
  kCombine,
};
inline constexpr size_t kMoePlanStageKinds = 10;
std::string_view name(MoePlanStageKind kind);

// Outputs that the caller asks for replace the buffers with the same contents.
struct MoePlanStage {
  MoePlanStageKind kind = MoePlanStageKind::kRoute;
  MoeStage first = MoeStage::kRoute;  // The public stage that it begins with.
  MoeBufferSet reads = 0;
  MoeBufferSet writes = 0;
};

// The facts of a call that its stages depend on.
struct MoeCallFacts {
  bool quantizes_input = false;  // Unquantized rows, in a mode with quantized ones.
  // The fused prologue routes, permutes and quantizes rows by token in one launch.
  bool joins_routing = false;
};

// The workspaces of the GEMMs themselves.
struct GemmBytes {
  int64_t first = 0;
  int64_t second = 0;
};

class MoePlan {
 public:
  // Divides the workspace into the buffers of a run; list_stages() adds the stages.
  MoePlan(const MoeExtents& extents, int64_t tokens, int32_t token_tile, const GemmBytes& gemms);
  void list_stages(const MoeCallFacts& call);

  [[nodiscard]] std::span<const MoePlanStage> stages() const { return {stages_.data(), count_}; }
  [[nodiscard]] const MoeBuffer& buffer(MoeBufferId id) const {
    return buffers_[static_cast<size_t>(id)];
  }
  [[nodiscard]] int64_t workspace_bytes() const { return bytes_; }
  [[nodiscard]] int64_t tokens() const { return tokens_; }
  [[nodiscard]] const PermutationLayout& permutation() const { return permutation_; }
  // Whether the first GEMM fuses the activation, and stores bf16 rows that are quantized
  // afterwards.
  [[nodiscard]] bool fuses_activation() const { return fuses_activation_; }
  [[nodiscard]] bool quantizes_fused_rows() const { return quantizes_fused_rows_; }

  [[nodiscard]] const RowBuffers& input_rows() const { return input_; }
  [[nodiscard]] const RowBuffers& intermediate_rows() const { return intermediate_; }
  [[nodiscard]] const RowBuffers& fc1_rows() const { return fc1_; }

 private:
  void divide_workspace(const MoeExtents& extents, const GemmBytes& gemms);
  void add(MoePlanStageKind kind, MoeStage first, MoeBufferSet reads, MoeBufferSet writes);

  int64_t tokens_ = 0;
  PermutationLayout permutation_;
  bool fuses_activation_ = false;
  bool quantizes_fused_rows_ = false;
  bool input_per_expert_ = false;
  bool double_quantize_fc1_ = false;
  bool weight_on_input_ = false;
  RowBuffers input_;  // Empty in modes with bf16 rows.
  RowBuffers intermediate_;
  RowBuffers fc1_;  // Empty without double_quantize_fc1.
  std::array<MoeBuffer, kMoeBuffers> buffers_{};
  int64_t bytes_ = 0;
  std::array<MoePlanStage, kMoePlanStageKinds> stages_{};
  size_t count_ = 0;
};

}  // namespace narrowfloat
