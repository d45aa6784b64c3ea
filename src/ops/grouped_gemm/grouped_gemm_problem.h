// A grouped GEMM as data: the problem that implementations are selected by, the checked arguments
// as plain pointers, and the record of an implementation.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/function_ref.h"
#include "base/host_device.h"
#include "moe_shared/dequantized_rows.h"
#include "narrowfloat/gemm.h"
#include "runtime/support.h"

namespace narrowfloat {

struct GroupedGemmProblem {
  MoeMode mode = MoeMode::kBf16;
  Device device;
  int64_t experts = 0;
  int64_t rows = 0;  // Weight rows of one expert (n).
  int64_t cols = 0;
  std::optional<GateOrder> gate_order;  // Set if the weight rows are those of u and g.
};
std::string to_string(const GroupedGemmProblem& problem);

// Activation rows. Scale (row, block) lies at row * scale_row_stride + block * scale_block_stride.
struct GemmRows {
  const void* values = nullptr;
  DType dtype = DType::kBF16;  // BF16 or F32.
  int64_t count = 0;
  const void* scales = nullptr;
  int64_t scale_row_stride = 0;
  int64_t scale_block_stride = 0;
  const float* row_scale = nullptr;       // Optional.
  const int32_t* row_to_token = nullptr;  // Optional: row p reads row row_to_token[p].
  int64_t num_mapped = 0;                 // Rows that row_to_token may name.

  [[nodiscard]] int64_t source(int64_t row) const {
    return row_to_token == nullptr ? row : row_to_token[row];
  }
};

// The m tiles: rows [tile * token_tile, row_ends[tile]) belong to experts[tile]; experts ascend.
struct GemmTiles {
  int64_t token_tile = 1;
  int64_t count =
      0;  // Tiles in use; on a GPU, where only the device knows these, all tiles that exist.
  const int32_t* num_tiles = nullptr;  // Tiles in use.
  const int32_t* experts = nullptr;
  const int32_t* row_ends = nullptr;
};

struct GemmFactor {
  float value = 1.0F;
  const float* values = nullptr;
  [[nodiscard]] NF_HOST_DEVICE float of(int64_t expert) const {
    return values == nullptr ? value : values[expert];
  }
};

struct GemmEpilogue {
  const float* slot_weights = nullptr;  // Optional.
  int64_t num_slots = 0;
  const int32_t* row_to_slot = nullptr;
  int64_t num_mapped = 0;  // Slots that row_to_slot may name.
  GemmFactor scale;
  GemmFactor gate_scale;
  std::optional<GateOrder> gate_order;
  const void* bias = nullptr;  // Optional, F32 or BF16.
  DType bias_dtype = DType::kF32;
};

// Tables of a GPU's packed weights besides their encoding; in device memory.
struct WeightTables {
  // Optional: the encoding of each expert. With it, some experts have `rest_encoding` instead.
  const uint8_t* expert_encodings = nullptr;
  int rest_encoding = 0;
  // Optional [experts][rows]: factors of the sums of experts in encodings for bf16 tensor cores.
  const float* row_powers = nullptr;
};

// The activation in the epilogue (GemmActivation), lowered.
struct FusedActivation {
  bool is_there = false;
  RowFormat format = RowFormat::kBf16;
  GemmFactor alpha;
  GemmFactor beta;
  GemmFactor limit_gate;
  GemmFactor limit_up;
  GemmFactor multiplier;
  uint8_t* values = nullptr;
  int64_t row_bytes = 0;
  // Scale (row, block) lies at row * scale_row_stride + block * scale_block_stride, in scales.
  void* scales = nullptr;
  int64_t scale_row_stride = 0;
  int64_t scale_block_stride = 0;
  uint16_t* decoded = nullptr;  // Optional: stores the rows as bf16 as well (LayerGemm).
};

// The parameters that only a layer can give. A call outside of a layer has no memory that an
// earlier kernel has cleared, and does not know the kernels between it and the permutation.
struct LayerGemm {
  // Optional, in device memory: 0 once earlier kernels are done. CTAs take the next tile from the
  // counter.
  uint32_t* next_tile = nullptr;
  // True if KernelChain says that the permutation is complete when this GEMM's first kernel starts.
  bool tiles_are_complete = false;
  // True if the kernel that stored the rows has also stored them dequantized in the workspace,
  // where dequantized_rows() says.
  bool rows_are_dequantized = false;
  // Optional destination of the activation's rows as bf16, without factors.
  DequantizedRows activated;
};

struct GemmCall {
  const uint8_t* weights = nullptr;
  int weight_encoding = 0;
  WeightTables tables;
  Accumulation accumulation = Accumulation::kFp32;
  GemmRows rows;
  GemmTiles tiles;
  GemmEpilogue epilogue;
  FusedActivation activation;
  void* output = nullptr;  // Not written with an activation.
  DType output_dtype = DType::kF32;
  int64_t output_rows = 0;
  uint8_t* workspace = nullptr;
  LayerGemm layer;
};

// Weights of some experts as the caller stores them, checked.
struct WeightSource {
  const uint8_t* values = nullptr;
  ScaleView scales;
};

// All weights: from(first) returns `experts` experts (a divisor of the problem's) beginning with
// `first`, which ascends. A source is valid until the next call.
struct WeightPieces {
  int64_t experts = 0;
  FunctionRef<WeightSource(int64_t first)> from;
};

// The weights as an implementation packs them. encoding: the weight encoding, where it has several.
struct PackedWeightData {
  std::shared_ptr<const uint8_t> bytes;
  int64_t size_bytes = 0;
  int encoding = 0;
  WeightTables tables;
  std::shared_ptr<const uint8_t> table_bytes;
};

struct GroupedGemmImpl {
  std::string_view name;
  Support (*supports)(const GroupedGemmProblem& problem);
  PackedWeightData (*prepare)(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                              Stream stream);
  int64_t (*workspace_bytes)(const GroupedGemmProblem& problem, int64_t a_rows,
                             Accumulation accumulation);
  // Supports `count` tiles of `token_tile` rows.
  Support (*supports_tiles)(const GroupedGemmProblem& problem, int64_t count, int64_t token_tile);
  // Supports an activation with rows of `format` in the same call, with tiles of `token_tile` rows;
  // asked for supported problems only.
  Support (*supports_activation)(const GroupedGemmProblem& problem, ActivationKind kind,
                                 RowFormat format, int64_t token_tile);
  // The place of `a_rows` quantized activation rows as bf16 in the workspace; none for modes that
  // take no such rows.
  DequantizedRows (*dequantized_rows)(const GroupedGemmProblem& problem, int64_t a_rows,
                                      uint8_t* workspace);
  void (*run)(const GroupedGemmProblem& problem, const GemmCall& call, Stream stream);
};

// The CPU implementations use it: they dequantize rows on their own.
inline DequantizedRows no_dequantized_rows(const GroupedGemmProblem& /*problem*/,
                                           int64_t /*a_rows*/, uint8_t* /*workspace*/) {
  return {};
}
// The CPU implementations use it: their activation is an operation of its own.
inline Support no_fused_activation(const GroupedGemmProblem& /*problem*/, ActivationKind /*kind*/,
                                   RowFormat /*format*/, int64_t /*token_tile*/) {
  return Support::no("leaves the activation to its own operation");
}

// Part of the condition of implementations on GPUs.
inline Support gpu_has_mode(MoeMode mode) {
  if (!moe_mode_info(mode).is_on_cpu_alone) return Support::yes();
  return Support::no("int8 rows run on the CPU only; take another mode of the same weights");
}

// The implementations, fastest first, the oracle last.
std::span<const GroupedGemmImpl> grouped_gemm_impls();
extern const GroupedGemmImpl kGroupedGemmCpuReference;
extern const GroupedGemmImpl kGroupedGemmCpuBaseline;
extern const GroupedGemmImpl kGroupedGemmCpuAvx2;        // Only in builds for x86-64.
extern const GroupedGemmImpl kGroupedGemmCpuAvx512;      // Only in builds for x86-64.
extern const GroupedGemmImpl kGroupedGemmCpuAvx512Bf16;  // Only in builds for x86-64.
extern const GroupedGemmImpl kGroupedGemmCpuAmxBf16;     // Only in builds for x86-64.
extern const GroupedGemmImpl kGroupedGemmCpuAmxInt8;     // Only in builds for x86-64.
extern const GroupedGemmImpl kGroupedGemmSm90;           // Only in builds with CUDA, like the next.
extern const GroupedGemmImpl kGroupedGemmSm80;

inline Support supports_any_tiles(const GroupedGemmProblem& /*problem*/, int64_t /*count*/,
                                  int64_t /*token_tile*/) {
  return Support::yes();
}
// The public operation with a layer's parameters.
void grouped_gemm(const GroupedGemmArgs& args, const GroupedWeights& weights,
                  const TensorView& workspace, const LayerGemm& layer, Stream stream);

// The place where this GEMM reads `a_rows` rows as bf16, if it does, for
// LayerGemm::rows_are_dequantized.
DequantizedRows dequantized_rows(const GroupedWeights& weights, int64_t a_rows,
                                 const TensorView& workspace);

// Refuses what a call refuses, for permutations of up to `count` tiles. Throws kInvalidArgument.
void require_tiles(const GroupedWeights& weights, int64_t count, int64_t token_tile);

// The contents of a GroupedWeights.
struct PackedWeights {
  GroupedGemmProblem problem;
  const GroupedGemmImpl* impl = nullptr;
  PackedWeightData data;
};
// Throws kInvalidArgument if the weights are empty.
const PackedWeights& packed_weights(const GroupedWeights& weights);

// Alignment of a workspace, and of packed weights in host memory.
inline constexpr int64_t kGemmAlignment = 256;
// The number of weight rows is a multiple of this.
inline constexpr int64_t kGemmRowMultiple = 16;

}  // namespace narrowfloat
