// A grouped GEMM as data: the problem that implementations are chosen by, the checked arguments as
// plain pointers, and the record of an implementation.
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
  int64_t rows = 0;  // Of an expert's weights.
  int64_t cols = 0;
  std::optional<GateOrder> gate_order;  // Rows are those of u and g.
};
std::string to_string(const GroupedGemmProblem& problem);

// Rows of activations. Scale (row, block) lies at row * scale_row_stride + block *
// scale_block_stride.
struct GemmRows {
  const void* values = nullptr;
  DType dtype = DType::kBF16;  // F32 as well in place of BF16.
  int64_t count = 0;
  const void* scales = nullptr;
  int64_t scale_row_stride = 0;
  int64_t scale_block_stride = 0;
  const float* row_scale = nullptr;       // Optional.
  const int32_t* row_to_token = nullptr;  // Optional: row p reads row row_to_token[p].
  int64_t num_mapped = 0;                 // Rows it has.

  [[nodiscard]] int64_t source(int64_t row) const {
    return row_to_token == nullptr ? row : row_to_token[row];
  }
};

// Rows [tile * token_tile, row_ends[tile]) belong to experts[tile]; experts ascend.
struct GemmTiles {
  int64_t token_tile = 1;
  int64_t count = 0;  // In use; on a GPU, where only the device knows these, all there are.
  const int32_t* num_tiles = nullptr;  // In use.
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
  int64_t num_mapped = 0;  // Rows it has.
  GemmFactor scale;
  GemmFactor gate_scale;
  std::optional<GateOrder> gate_order;
  const void* bias = nullptr;  // Optional, F32 or BF16.
  DType bias_dtype = DType::kF32;
};

// What a GPU's image has beside its form; on the device.
struct ImageTables {
  // Optional: each expert's form. Where there is one, some have `rest_form` instead.
  const uint8_t* expert_forms = nullptr;
  int rest_form = 0;
  // Optional [experts][rows]: factors of the sums of experts in forms for bf16 cores.
  const float* row_powers = nullptr;
};

// The activation behind the sums (GemmActivation), lowered.
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
  uint16_t* decoded = nullptr;  // Optional: the rows as bf16 as well (LayerGemm).
};

// What a layer knows of its GEMMs. A lone call has no memory that an earlier kernel has cleared,
// and does not know what lies between it and the permutation.
struct LayerGemm {
  // Optional, on the device: 0 once earlier kernels are done. Blocks claim their work from it.
  uint32_t* next_item = nullptr;
  // Between the permutation's kernels and the GEMM's first there is another one.
  bool tiles_are_complete = false;
  // What made the rows has left them in the workspace, where dequantized_rows() says.
  bool rows_are_dequantized = false;
  // Where the activation's rows go as bf16 as well, if anywhere; without factors.
  DequantizedRows activated;
};

struct GemmCall {
  const uint8_t* image = nullptr;
  int image_form = 0;
  ImageTables tables;
  Accumulation accumulation = Accumulation::kFp32;
  GemmRows rows;
  GemmTiles tiles;
  GemmEpilogue epilogue;
  FusedActivation activation;
  void* output = nullptr;  // Without an activation.
  DType output_dtype = DType::kF32;
  int64_t output_rows = 0;
  uint8_t* workspace = nullptr;
  LayerGemm layer;
};

// Weights of some experts as the caller has them, checked.
struct WeightSource {
  const uint8_t* values = nullptr;
  ScaleView scales;
};

// All weights: `experts` (a divisor of the problem's) from `first` on, ascending. A source is not
// valid any longer when the next is asked for.
struct WeightPieces {
  int64_t experts = 0;
  FunctionRef<WeightSource(int64_t first)> from;
};

// What an implementation computes from. form: which of its images this is, where it has several.
struct WeightImage {
  std::shared_ptr<const uint8_t> bytes;
  int64_t size_bytes = 0;
  int form = 0;
  ImageTables tables;
  std::shared_ptr<const uint8_t> table_bytes;
};

struct GroupedGemmImpl {
  std::string_view name;
  Support (*supports)(const GroupedGemmProblem& problem);
  WeightImage (*prepare)(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                         Stream stream);
  int64_t (*workspace_bytes)(const GroupedGemmProblem& problem, int64_t a_rows,
                             Accumulation accumulation);
  // Of `count` tiles of `token_tile` rows.
  Support (*supports_tiles)(const GroupedGemmProblem& problem, int64_t count, int64_t token_tile);
  // To do an activation with rows of `format` in the same call, with tiles of `token_tile` rows;
  // for problems it supports.
  Support (*supports_activation)(const GroupedGemmProblem& problem, ActivationKind kind,
                                 RowFormat format, int64_t token_tile);
  // Where `a_rows` rows of quantized activations lie as bf16 in the workspace; nowhere for modes
  // that take none.
  DequantizedRows (*dequantized_rows)(const GroupedGemmProblem& problem, int64_t a_rows,
                                      uint8_t* workspace);
  void (*run)(const GroupedGemmProblem& problem, const GemmCall& call, Stream stream);
};

// What the CPU says: rows that it decodes are its own affair.
inline DequantizedRows no_dequantized_rows(const GroupedGemmProblem& /*problem*/,
                                           int64_t /*a_rows*/, uint8_t* /*workspace*/) {
  return {};
}
// What the CPU says: its activation is an operation of its own.
inline Support no_fused_activation(const GroupedGemmProblem& /*problem*/, ActivationKind /*kind*/,
                                   RowFormat /*format*/, int64_t /*token_tile*/) {
  return Support::no("leaves the activation to its own operation");
}

// Ordered, fastest first, the oracle last.
std::span<const GroupedGemmImpl> grouped_gemm_impls();
extern const GroupedGemmImpl kGroupedGemmCpuReference;
extern const GroupedGemmImpl kGroupedGemmCpuBaseline;
extern const GroupedGemmImpl kGroupedGemmSm90;

inline Support supports_any_tiles(const GroupedGemmProblem& /*problem*/, int64_t /*count*/,
                                  int64_t /*token_tile*/) {
  return Support::yes();
}
// The public operation, in a layer.
void grouped_gemm(const GroupedGemmArgs& args, const GroupedWeights& weights,
                  const TensorView& workspace, const LayerGemm& layer, Stream stream);

// Where this GEMM takes `a_rows` rows as bf16 from, if it does, for
// LayerGemm::rows_are_dequantized.
DequantizedRows dequantized_rows(const GroupedWeights& weights, int64_t a_rows,
                                 const TensorView& workspace);

// What a call refuses, for permutations of up to `count` tiles. Throws kInvalidArgument.
void require_tiles(const GroupedWeights& weights, int64_t count, int64_t token_tile);

// What a GroupedWeights holds.
struct PackedWeights {
  GroupedGemmProblem problem;
  const GroupedGemmImpl* impl = nullptr;
  WeightImage image;
};
// Throws kInvalidArgument for one that is empty.
const PackedWeights& packed_weights(const GroupedWeights& weights);

// Alignment of a workspace, and of images on the host.
inline constexpr int64_t kGemmAlignment = 256;
// Weight rows come in multiples of this.
inline constexpr int64_t kGemmRowMultiple = 16;

}  // namespace narrowfloat
