// sm90_wgmma: every mode on Hopper's tensor cores (moe spec 11.1): FP8 weights, and
// MXFP4 and rounded NVFP4 weights beside FP8 rows, on those of FP8; all others on those of bf16,
// for which quantized rows are decoded in the workspace first. Then one kernel multiplies all
// experts' tiles (gemm_kernel_sm90.cuh).
#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "ops/grouped_gemm/gemm_shape.h"
#include "ops/grouped_gemm/packed/packed_weights.h"
#include "ops/grouped_gemm/sm90/gemm_params.h"
#include "runtime/cuda/cuda_devices.h"
#include "tensor/row_format.h"

namespace narrowfloat {
namespace {

// Bytes of a row of bf16, and of what a stage has after its end, are counted in 31 bits.
constexpr int64_t kMaxExtent = int64_t{1} << 29;
constexpr int64_t kMaxTiles = int64_t{1} << 31;

GemmLauncher launcher_of(const GemmMode& mode, WeightEncoding encoding) {
  const bool has_groups = mode.group_cols == 128;
  switch (encoding) {
    case WeightEncoding::kBf16:
      return launch_gemm_bf16;
    case WeightEncoding::kFp8:
      return launch_gemm_fp8;
    case WeightEncoding::kMxfp8:
      return launch_gemm_mxfp8;
    case WeightEncoding::kMxfp4Near:
      return launch_gemm_mxfp4_near;
    case WeightEncoding::kMxfp4:
      return has_groups ? launch_gemm_mxfp4_groups : launch_gemm_mxfp4;
    case WeightEncoding::kNvfp4:
      return has_groups ? launch_gemm_nvfp4_groups : launch_gemm_nvfp4;
    case WeightEncoding::kNvfp4Rounded:
      return launch_gemm_nvfp4_rounded;
    case WeightEncoding::kMxfp4Fp8:
      return has_groups ? launch_gemm_mxfp4_fp8 : launch_gemm_mxfp4_fp8_token;
    case WeightEncoding::kNvfp4Fp8:
      return has_groups ? launch_gemm_nvfp4_fp8 : launch_gemm_nvfp4_fp8_token;
  }
  return nullptr;
}

WeightEncoding encoding_of(const GemmCall& call) {
  return static_cast<WeightEncoding>(call.weight_encoding);
}

// The encoding of the kernel's rows differs from the caller's.
bool decodes_rows(const GroupedGemmProblem& problem, WeightEncoding encoding) {
  const bool has_bf16_rows = moe_mode_info(problem.mode).input == RowFormat::kBf16;
  return !has_bf16_rows && activation_bytes(encoding) == 2;
}

bool has_row_factors(const GroupedGemmProblem& problem) {
  return moe_mode_info(problem.mode).input == RowFormat::kMxfp8;
}

// Workspace of dequantized rows; their factors follow.
int64_t dequantized_bytes(const GroupedGemmProblem& problem, int64_t rows) {
  return round_up(rows * problem.cols * 2, kGemmAlignment);
}
DequantizedRows rows_in(uint8_t* workspace, const GroupedGemmProblem& problem, int64_t rows) {
  DequantizedRows decoded{.values = reinterpret_cast<uint16_t*>(workspace)};
  if (has_row_factors(problem)) {
    decoded.factors = reinterpret_cast<float*>(workspace + dequantized_bytes(problem, rows));
  }
  return decoded;
}

// Nowhere where the first of two encodings takes rows as they are: those that the other one needs
// are decoded once it is known that an expert has it.
DequantizedRows dequantized_rows(const GroupedGemmProblem& problem, int64_t a_rows,
                                 uint8_t* workspace) {
  if (!decodes_rows(problem, encoding_of(problem.mode))) return {};
  return rows_in(workspace, problem, a_rows);
}

// Rows that every buffer indexed by row numbers has.
int64_t row_limit(const GemmCall& call) {
  int64_t limit = call.output_rows;
  limit =
      std::min(limit, call.rows.row_to_token == nullptr ? call.rows.count : call.rows.num_mapped);
  if (call.epilogue.slot_weights != nullptr) limit = std::min(limit, call.epilogue.num_mapped);
  return limit;
}

void set_extents(const GroupedGemmProblem& problem, const GemmCall& call, GemmParams& params) {
  const PackedGrid grid(problem, encoding_of(call));
  params.image = call.weights;
  params.block_bytes = grid.block_bytes();
  params.expert_bytes = expert_image_bytes(problem);
  params.expert_encodings = call.tables.expert_encodings;
  params.encoding = call.weight_encoding;
  if (has_row_powers(encoding_of(call))) params.row_powers = call.tables.row_powers;
  params.experts = static_cast<int>(problem.experts);
  params.rows = static_cast<int>(problem.rows);
  params.cols = static_cast<int>(problem.cols);
  params.k_tiles = static_cast<int>(grid.k_tiles);
  params.blocks = static_cast<int>(grid.blocks);
  params.image_rows = image_rows(problem);
}

void set_rows(const GroupedGemmProblem& problem, const GemmCall& call, GemmParams& params) {
  const GemmRows& rows = call.rows;
  params.values = decodes_rows(problem, encoding_of(call))
                      ? call.workspace
                      : static_cast<const uint8_t*>(rows.values);
  params.row_bytes = problem.cols * activation_bytes(encoding_of(call));
  params.input_rows = rows.count;
  params.row_scale = has_row_factors(problem) ? rows_in(call.workspace, problem, rows.count).factors
                                              : rows.row_scale;
  params.row_to_token = rows.row_to_token;
  if (moe_mode_info(problem.mode).input == RowFormat::kFp8Group) {
    params.group_scales = static_cast<const float*>(rows.scales);
    params.group_row_stride = rows.scale_row_stride;
    params.group_stride = rows.scale_block_stride;
  } else if (encoding_of(call) == WeightEncoding::kFp8) {
    // No scales: the image's own 1, again and again.
    params.group_scales =
        reinterpret_cast<const float*>(call.weights + k_tile_code_bytes(WeightEncoding::kFp8));
  }
}

// Tokens of an m tile, which kernels are for.
int kernel_tokens(int64_t token_tile) {
  return static_cast<int>(
      std::clamp<uint64_t>(std::bit_ceil(static_cast<uint64_t>(token_tile)), 8, 128));
}
int64_t kernel_tiles(int64_t token_tile) {
  return ceil_div(token_tile, int64_t{kernel_tokens(token_tile)});
}

void set_tiles(const GemmCall& call, GemmParams& params) {
  params.tile_experts = call.tiles.experts;
  params.row_ends = call.tiles.row_ends;
  params.num_tiles = call.tiles.num_tiles;
  params.max_tiles = static_cast<int>(call.tiles.count);
  params.token_tile = static_cast<int>(call.tiles.token_tile);
  params.splits = static_cast<int>(kernel_tiles(call.tiles.token_tile));
  params.row_limit = row_limit(call);
  params.tiles_are_complete = call.layer.tiles_are_complete;
  // Two kernels would need a counter each, and a claim for each tile of the other's experts.
  if (call.tables.expert_encodings == nullptr) params.next_tile = call.layer.next_tile;
}

void set_epilogue(const GemmCall& call, GemmParams& params) {
  params.epilogue = call.epilogue;
  params.has_gate = call.epilogue.gate_order.has_value();
  params.gate_order = call.epilogue.gate_order.value_or(GateOrder::kUpGate);
  params.activation = call.activation;
  params.output = call.output;
  params.output_is_bf16 = call.output_dtype == DType::kBF16;
}

void dequantize_rows(const GroupedGemmProblem& problem, const GemmCall& call, Stream stream) {
  if (call.layer.rows_are_dequantized || !decodes_rows(problem, encoding_of(call))) return;
  const bool gathers = call.rows.row_to_token != nullptr;
  const DequantizedRows decoded = rows_in(call.workspace, problem, call.rows.count);
  launch_decode_rows({.format = moe_mode_info(problem.mode).input,
                      .codes = static_cast<const uint8_t*>(call.rows.values),
                      .rows = call.rows.count,
                      .cols = problem.cols,
                      .scales = static_cast<const uint8_t*>(call.rows.scales),
                      .scale_row_stride = call.rows.scale_row_stride,
                      .scale_block_stride = call.rows.scale_block_stride,
                      .num_tiles = gathers ? nullptr : call.tiles.num_tiles,
                      .token_tile = static_cast<int>(call.tiles.token_tile),
                      .output = decoded.values,
                      .row_factors = decoded.factors},
                     stream);
}

// The experts that have the call's encoding.
void multiply(const GroupedGemmProblem& problem, const GemmCall& call, Stream stream) {
  GemmParams params;
  set_extents(problem, call, params);
  set_rows(problem, call, params);
  set_tiles(call, params);
  set_epilogue(call, params);
  dequantize_rows(problem, call, stream);
  const GemmLauncher launch_gemm = launcher_of(gemm_mode(problem.mode), encoding_of(call));
  launch_gemm(params,
              {.tokens = kernel_tokens(call.tiles.token_tile),
               .num_sms = cuda_device(problem.device.index).num_sms,
               .device = problem.device.index},
              stream);
}

void run(const GroupedGemmProblem& problem, const GemmCall& call, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  multiply(problem, call, stream);
  if (call.tables.expert_encodings == nullptr) return;
  GemmCall rest = call;
  rest.weight_encoding = call.tables.rest_encoding;
  // If the first encoding needs them, too, it has just decoded them.
  if (decodes_rows(problem, encoding_of(call))) rest.layer.rows_are_dequantized = true;
  multiply(problem, rest, stream);
}

int64_t workspace_bytes(const GroupedGemmProblem& problem, int64_t a_rows,
                        Accumulation /*accumulation*/) {
  // Weights whose scales spread too far get the encoding that needs 16-bit rows.
  const WeightEncoding encoding = encoding_of(problem.mode);
  const bool may_decode =
      decodes_rows(problem, may_not_fit(encoding) ? wide_encoding(encoding) : encoding);
  if (!may_decode) return 0;
  const int64_t factors = has_row_factors(problem) ? a_rows * int64_t{sizeof(float)} : 0;
  return dequantized_bytes(problem, a_rows) + round_up(factors, kGemmAlignment);
}

Support supports(const GroupedGemmProblem& problem) {
  Support device = runs_own_code(problem.device);
  if (!device.ok()) return device;
  Support mode = gpu_has_mode(problem.mode);
  if (!mode.ok()) return mode;
  if (cuda_device(problem.device.index).compute_major != 9) {
    return Support::no("needs the matrix instructions of Hopper, compute capability 9.0");
  }
  if (std::max(problem.rows, problem.cols) >= kMaxExtent) {
    return Support::no("2^29 weight rows or columns, or more");
  }
  return Support::yes();
}

Support supports_activation(const GroupedGemmProblem& problem, ActivationKind kind,
                            RowFormat format, int64_t token_tile) {
  if (kind != ActivationKind::kSwiglu) return Support::no("does swiglu only");
  if (!problem.gate_order) return Support::no("needs weights prepared with their gate order");
  // A scale of a row needs the maximum of the row: such rows are made from rows of bf16.
  const RowFormat rows = moe_mode_info(problem.mode).intermediate;
  const RowFormat written = has_row_scale(rows) ? RowFormat::kBf16 : rows;
  if (format != written) {
    return Support::no("writes rows that the mode's second GEMM reads only");
  }
  if (takes_rows(encoding_of(problem.mode), kernel_tokens(token_tile), format)) {
    return Support::yes();
  }
  return Support::no("has no registers for these rows with tiles of more than 64 tokens");
}

Support supports_tiles(const GroupedGemmProblem& problem, int64_t count, int64_t token_tile) {
  const int64_t row_tiles = ceil_div(problem.rows, int64_t{2 * kSubtileRows});
  const int64_t tiles = kernel_tiles(token_tile);
  if (count < ceil_div(kMaxTiles, tiles * row_tiles)) return Support::yes();
  return Support::no(
      fmt::format("{} tiles of {} rows times {} tiles of weight rows are 2^31 or more", count,
                  token_tile, row_tiles));
}

}  // namespace

const GroupedGemmImpl kGroupedGemmSm90{"sm90_wgmma",        supports,
                                       make_packed_weights, workspace_bytes,
                                       supports_tiles,      supports_activation,
                                       dequantized_rows,    run};

}  // namespace narrowfloat
