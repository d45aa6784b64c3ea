// The parameters of the Hopper GEMM kernels, as plain pointers and extents, and their launchers:
// one an encoding of weights and a way of promotion.
#pragma once

#include "ops/grouped_gemm/packed/packed_weights.h"
#include "runtime/cuda/tensor_map.h"

namespace narrowfloat {

struct GemmParams {
  // Weights (packed_weights.h).
  const uint8_t* image = nullptr;
  int64_t block_bytes = 0;  // An n sub-tile's, 64 weight rows.
  int64_t expert_bytes = 0;
  const uint8_t* expert_encodings = nullptr;  // Optional: only experts that have `encoding` count.
  int encoding = 0;
  const float* row_powers = nullptr;  // Optional [experts][rows]: factors of sums.
  int experts = 0;
  int rows = 0;  // An expert's weight rows: output columns.
  int cols = 0;
  int k_tiles = 0;  // k tiles of an n sub-tile.
  int blocks = 0;   // n sub-tiles of an expert, each of 64 weight rows.
  ImageRows image_rows;

  // Activations: [input_rows][cols] bf16 or E4M3.
  const uint8_t* values = nullptr;
  int64_t row_bytes = 0;
  int64_t input_rows = 0;
  // A scale a row and group of 128 columns, where sums are promoted; null is 1 where
  // GemmShapeOf::kMayLackGroupScales.
  const float* group_scales = nullptr;
  int64_t group_row_stride = 0;
  int64_t group_stride = 0;
  const float* row_scale = nullptr;       // Optional.
  const int32_t* row_to_token = nullptr;  // Optional.

  // Token tiles; `splits` m tiles of up to kMTile rows each.
  const int32_t* tile_experts = nullptr;
  const int32_t* row_ends = nullptr;
  const int32_t* num_tiles = nullptr;
  int max_tiles = 0;
  int token_tile = 1;
  int splits = 1;
  int64_t row_limit = 0;          // Rows that every buffer indexed by rows has.
  uint32_t* next_tile = nullptr;  // Optional (tile_scheduler.cuh).
  bool tiles_are_complete =
      false;  // Read before the wait for previous kernels (gemm_kernel_sm90.cuh).

  GemmEpilogue epilogue;  // But for the gate order: an optional has no device code.
  bool has_gate = false;
  GateOrder gate_order = GateOrder::kUpGate;
  FusedActivation activation;
  void* output = nullptr;  // [row][rows], bf16 or fp32; without an activation.
  bool output_is_bf16 = false;
};

// With the activations as boxes of rows and 128 bytes, in the 128-byte swizzle, where they are not
// gathered.
struct BoxedGemmParams : GemmParams {
  TensorMap row_boxes;
  bool has_row_boxes = false;
};

// A launch of the kernel for m tiles of `tokens` (8, 16, 32, 64 or 128) rows.
struct GemmLaunch {
  int tokens = 8;
  int num_sms = 1;
  int device = 0;
};

inline TensorMap make_row_boxes(const GemmParams& params, int box_rows) {
  return make_tensor_map({.data = params.values,
                          .extents = {params.row_bytes, params.input_rows, 1},
                          .strides = {params.row_bytes, 0},
                          .box = {kKTileRowBytes, box_rows, 1},
                          .is_swizzled = true});
}

using GemmLauncher = void (*)(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_bf16(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream);
// The TMA kernel, for tiles of 128 tokens where takes_tma_kernel(): rows that lie one after the
// other.
bool takes_tma_kernel(const GemmParams& params);
void launch_gemm_fp8_tma(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_mxfp8(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_mxfp4_near(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_mxfp4(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_mxfp4_groups(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_mxfp4_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_mxfp4_fp8_token(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_nvfp4(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_nvfp4_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_nvfp4_fp8_token(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_nvfp4_groups(const GemmParams& params, const GemmLaunch& shape, Stream stream);
void launch_gemm_nvfp4_rounded(const GemmParams& params, const GemmLaunch& shape, Stream stream);

// Activation rows as bf16 in the workspace, exact: [rows][cols].
struct RowDecodeParams {
  RowFormat format = RowFormat::kMxfp8;
  const uint8_t* codes = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  const uint8_t* scales = nullptr;
  int64_t scale_row_stride = 0;
  int64_t scale_block_stride = 0;
  // Rows in use: num_tiles * token_tile where given.
  const int32_t* num_tiles = nullptr;
  int token_tile = 1;
  uint16_t* output = nullptr;
  float* row_factors = nullptr;  // kMxfp8: what a row's values are to be multiplied by.
};
void launch_decode_rows(const RowDecodeParams& params, Stream stream);

}  // namespace narrowfloat
