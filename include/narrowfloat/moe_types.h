// Types that the operations of a Mixture-of-Experts layer share: modes, formats of activation rows,
// gate orders, per-expert values, routing of tokens to rows. docs/moe.md explains the layer.
//
// T tokens, H hidden size, I expert width after gating, E routed experts, S fused shared experts, k
// experts a token; F1 = 2 * I for gated activations, else I. A slot is one of the k + S experts of
// one token: slot index t * (k + S) + s. A row is a slot's place in the buffers that are sorted by
// expert.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "narrowfloat/export.h"
#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Formats of expert weights: values [experts, rows, cols] and their block scales.
enum class WeightFormat : int {
  kBf16 = 0,
  kFp8Tensor = 1,  // E4M3; the scale per expert is a factor of the layer, not part of the weights.
  kFp8Block = 2,   // E4M3, F32 per 128x128 block.
  kMxfp8 = 3,      // E4M3, UE8M0 per 1x32.
  kMxfp4 = 4,      // E2M1, UE8M0 per 1x32.
  kNvfp4 = 5,      // E2M1, E4M3 per 1x16; the global scale is a factor of the layer.
};
NARROWFLOAT_API std::string_view name(WeightFormat format);

// Formats of activation rows, the left operand of a GEMM.
enum class RowFormat : int {
  kBf16 = 0,
  kFp32 = 1,           // In place of kBf16 where a layer keeps fp32 rows (MoeReferenceOptions).
  kFp8Static = 2,      // E4M3 of value * multiplier; its reciprocal is a factor of the layer.
  kFp8Group = 3,       // E4M3, F32 decode scale per 1x128; the last group of a row may be short.
  kMxfp8 = 4,          // E4M3, UE8M0 per 1x32.
  kNvfp4 = 5,          // E2M1, E4M3 per 1x16 of value * multiplier.
  kNvfp4PerToken = 6,  // As kNvfp4 with a multiplier per row; its decode scale is row_scale.
  kFp8Token = 7,       // E4M3 with a multiplier per row; its decode scale is row_scale.
};
NARROWFLOAT_API std::string_view name(RowFormat format);

// The arithmetic of a layer: weights x activations (moe spec 1.2). Modes with dynamic or static row
// scales, and exact or rounded weights, are different modes: none is a default.
enum class MoeMode : int {
  kBf16 = 0,
  kFp8Tensor = 1,
  kFp8Block = 2,  // DeepSeek.
  kMxfp8 = 3,
  kMxfp4Mxfp8 = 4,
  kMxfp4Bf16 = 5,
  kMxfp4Fp8 = 6,  // Rows in kFp8Group.
  kNvfp4 = 7,     // Rows with static multipliers.
  kNvfp4PerToken = 8,
  kNvfp4Bf16 = 9,
  kNvfp4Fp8Exact = 10,    // Rows in kFp8Group, weights as they are.
  kNvfp4Fp8Rounded = 11,  // Weights rounded to E4M3 per 1x128 (moe spec 11.3).
  kMxfp4Fp8Token = 12,    // Rows in kFp8Token.
  kNvfp4Fp8Token = 13,    // Rows in kFp8Token, weights rounded as in kNvfp4Fp8Rounded.
  kMxfp4Int8 = 14,        // On a CPU: the GEMMs round bf16 rows to int8 per 1x32 (moe spec 2.1).
  kNvfp4Int8 = 15,        // The same.
};

struct MoeModeInfo {
  MoeMode id;
  std::string_view name;         // "nvfp4_bf16"
  std::string_view description;  // One line for listings.
  WeightFormat weights;
  RowFormat input;         // Rows of the first GEMM.
  RowFormat intermediate;  // Rows of the second GEMM.
  int64_t multiple;        // H and I must be multiples of this.
  double bits_per_weight;  // Block scales included.
  bool is_on_cpu_alone = false;
};
// The entries are in the order of MoeMode.
NARROWFLOAT_API std::span<const MoeModeInfo> all_moe_modes();
NARROWFLOAT_API const MoeModeInfo& moe_mode_info(MoeMode mode);
NARROWFLOAT_API std::string_view name(MoeMode mode);
// Also takes "nvfp4_fp8" for nvfp4_fp8_exact. Throws kInvalidArgument that lists the names.
NARROWFLOAT_API MoeMode parse_moe_mode(std::string_view text);

// Scales of one row of `cols` elements; 0 for formats without block scales.
NARROWFLOAT_API int64_t scale_blocks(RowFormat format, int64_t cols);

// The order of rows of the first weight matrix (moe spec 1.3): u is the linear half, g the gate.
enum class GateOrder : int {
  kUpGate = 0,       // Rows [0, I) up, [I, 2I) gate: FlashInfer.
  kGateUp = 1,       // Rows [0, I) gate, [I, 2I) up: stacked Hugging Face checkpoints.
  kInterleaved = 2,  // Row 2i gate i, row 2i + 1 up i: gpt-oss.
};
NARROWFLOAT_API std::string_view name(GateOrder order);
NARROWFLOAT_API GateOrder parse_gate_order(std::string_view text);

// How a CPU sums dot products. kFp32: fp32 in ascending K with the promotions of moe spec 6.4, the
// arithmetic of every result. kFp64: the reference of every tolerance; scales, bias and activation
// are fp64 too, rounded only where 6.4 says. kFast: fp32 as fast as the processor can, within the
// tolerances that GPUs have (moe spec 12); processors may differ in the last bits. GPUs sum in an
// order of their own with both kFp32 and kFast, and have no kFp64.
enum class Accumulation : int { kFp32 = 0, kFp64 = 1, kFast = 2 };

// One value for all local experts, or one for each.
struct PerExpert {
  float value = 1.0F;  // Counts where `values` is absent.
  TensorView values;   // F32 [local experts, shared ones included], dense.

  PerExpert() = default;
  PerExpert(float one) : value(one) {}  // NOLINT(google-explicit-constructor): a plain number.
  explicit PerExpert(const TensorView& each) : values(each) {}
};

// Activation rows in a RowFormat (or in the unquantized types that an operation names).
struct CodedRows {
  TensorView values;  // [rows, cols], dense: BF16, F32, F8_E4M3, or U8 [rows, cols / 2] for E2M1
                      // (even column in the low nibble).
  // Absent, or [rows, scale_blocks]: F32, F8_E8M0 or F8_E4M3 (U8 for the last two as well). All
  // strides are free, the last one too: an mn_major [blocks, rows] tensor is the view with strides
  // {1, rows}.
  TensorView scales;
  TensorView row_scale;  // kNvfp4PerToken, kFp8Token: F32 [rows], decode.
};

// The rows that permute() gave to the slots of all tokens (permute.h). All views are I32, dense, on
// one device.
struct Permutation {
  int32_t token_tile = 0;
  TensorView slot_to_row;     // [T * (k + S)]: row, or -1 where the expert is not local.
  TensorView row_to_token;    // [max rows]: token; -1 in padding rows and beyond the last tile.
  TensorView row_to_slot;     // [max rows]: slot index, -1 likewise.
  TensorView num_rows;        // [1]: rows in use, padding included: a multiple of the tile.
  TensorView tile_to_expert;  // [max tiles]: local expert of a tile; 0 beyond the last.
  TensorView tile_row_end;    // [max tiles]: one past a tile's last valid row; 0 beyond the last.
  TensorView num_tiles;       // [1]: tiles in use.
};

}  // namespace narrowfloat
