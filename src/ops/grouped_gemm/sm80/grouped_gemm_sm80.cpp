// sm80_mma: every mode on the tensor cores of compute capability 8.0 and later, with bf16 on both
// sides (decision 0039). Quantized rows are decoded in the workspace first. Then one kernel
// multiplies all experts' tiles (gemm_mma.cuh).
#include <algorithm>

#include "ops/grouped_gemm/gemm_shape.h"
#include "ops/grouped_gemm/sm80/gemm_mma.h"
#include "runtime/cuda/cuda_devices.h"
#include "tensor/row_format.h"

namespace narrowfloat {
namespace {

// Columns, weight rows and CTAs are counted in 32 bits.
constexpr int64_t kMaxCols = int64_t{1} << 29;
constexpr int64_t kMaxRows = int64_t{1} << 22;
constexpr int64_t kMaxCtas = int64_t{1} << 31;

RowFormat row_format(const GroupedGemmProblem& problem) {
  return moe_mode_info(problem.mode).input;
}

bool has_groups(const GroupedGemmProblem& problem) {
  return row_format(problem) == RowFormat::kFp8Group;
}

int64_t decoded_bytes(const GroupedGemmProblem& problem, int64_t rows) {
  return round_up(rows * problem.cols * 2, kGemmAlignment);
}

// Rows that are not bf16 are decoded into the workspace; factors of rows of MXFP8 come after them.
DequantizedRows rows_in(uint8_t* workspace, const GroupedGemmProblem& problem, int64_t rows) {
  DequantizedRows decoded{.values = reinterpret_cast<uint16_t*>(workspace)};
  if (row_format(problem) == RowFormat::kMxfp8) {
    decoded.factors = reinterpret_cast<float*>(workspace + decoded_bytes(problem, rows));
  }
  return decoded;
}

void decode_rows(const GroupedGemmProblem& problem, const GemmCall& call, Stream stream) {
  const GemmRows& rows = call.rows;
  const DequantizedRows decoded = rows_in(call.workspace, problem, rows.count);
  launch_decode_rows({.format = row_format(problem),
                      .codes = static_cast<const uint8_t*>(rows.values),
                      .rows = rows.count,
                      .cols = problem.cols,
                      .scales = static_cast<const uint8_t*>(rows.scales),
                      .scale_row_stride = rows.scale_row_stride,
                      .scale_block_stride = rows.scale_block_stride,
                      .num_tiles = rows.row_to_token == nullptr ? call.tiles.num_tiles : nullptr,
                      .token_tile = static_cast<int>(call.tiles.token_tile),
                      .output = decoded.values,
                      .row_factors = decoded.factors},
                     stream);
}

void set_weights(const GroupedGemmProblem& problem, const GemmCall& call, GemmParams& params) {
  const MmaGrid grid(problem);
  params.image = call.weights;
  params.block_bytes = grid.chunks * grid.chunk_bytes;
  params.expert_bytes = grid.expert_bytes();
  if (MmaGrid::flag_bytes(problem) != 0) {
    params.expert_encodings = call.weights + problem.experts * grid.expert_bytes();
  }
  params.experts = static_cast<int>(problem.experts);
  params.rows = static_cast<int>(problem.rows);
  params.cols = static_cast<int>(problem.cols);
  params.k_tiles = static_cast<int>(grid.chunks);
  params.blocks = static_cast<int>(grid.strips);
  params.image_rows = image_rows(problem);
}

void set_rows(const GroupedGemmProblem& problem, const GemmCall& call, GemmParams& params) {
  const GemmRows& rows = call.rows;
  const RowFormat format = row_format(problem);
  params.values =
      format == RowFormat::kBf16 ? static_cast<const uint8_t*>(rows.values) : call.workspace;
  params.row_bytes = problem.cols * 2;
  params.input_rows = rows.count;
  params.row_scale = format == RowFormat::kMxfp8
                         ? rows_in(call.workspace, problem, rows.count).factors
                         : rows.row_scale;
  params.row_to_token = rows.row_to_token;
  if (has_groups(problem)) {
    params.group_scales = static_cast<const float*>(rows.scales);
    params.group_row_stride = rows.scale_row_stride;
    params.group_stride = rows.scale_block_stride;
  }
}

// The smallest of the kernel's tiles that holds one of `token_tile` rows, or the largest: that of
// kMostMmaTokens is for experts that have about as many rows, of which most tiles are full.
int tokens_of(const GroupedGemmProblem& problem, int64_t count, int64_t token_tile) {
  // As in permutation_layout(): tiles beyond one of each expert are full.
  const int64_t full_rows = (count - problem.experts) * token_tile;
  const int most =
      full_rows >= problem.experts * kMostMmaTokens * 3 / 4 ? kMostMmaTokens : kMostMmaTokens / 2;
  int tokens = 8;
  while (tokens < token_tile && tokens < most) tokens *= 2;
  return tokens;
}

void set_tiles(const GemmCall& call, int tokens, GemmParams& params) {
  const GemmTiles& tiles = call.tiles;
  params.tile_experts = tiles.experts;
  params.row_ends = tiles.row_ends;
  params.num_tiles = tiles.num_tiles;
  params.max_tiles = static_cast<int>(tiles.count);
  params.token_tile = static_cast<int>(tiles.token_tile);
  params.splits = static_cast<int>(ceil_div(tiles.token_tile, int64_t{tokens}));
  // Rows that every buffer indexed by row numbers has.
  params.row_limit = std::min(
      call.output_rows, call.rows.row_to_token == nullptr ? call.rows.count : call.rows.num_mapped);
  if (call.epilogue.slot_weights != nullptr) {
    params.row_limit = std::min(params.row_limit, call.epilogue.num_mapped);
  }
}

void set_epilogue(const GemmCall& call, GemmParams& params) {
  params.epilogue = call.epilogue;
  params.has_gate = call.epilogue.gate_order.has_value();
  params.gate_order = call.epilogue.gate_order.value_or(GateOrder::kUpGate);
  params.activation = call.activation;
  params.output = call.output;
  params.output_is_bf16 = call.output_dtype == DType::kBF16;
}

void run(const GroupedGemmProblem& problem, const GemmCall& call, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (row_format(problem) != RowFormat::kBf16) decode_rows(problem, call, stream);
  GemmParams params;
  set_weights(problem, call, params);
  set_rows(problem, call, params);
  const int tokens = tokens_of(problem, call.tiles.count, call.tiles.token_tile);
  set_tiles(call, tokens, params);
  set_epilogue(call, params);
  const MmaCoding coding = mma_coding(problem.mode);
  const MmaLaunch shape{.tokens = tokens, .device = problem.device.index};
  switch (mma_code_bits(coding)) {
    case 16:
      return launch_mma_16_bit(params, shape, stream);
    case 8:
      return launch_mma_8_bit(coding, params, shape, stream);
    default:
      return launch_mma_4_bit(coding, has_groups(problem), params, shape, stream);
  }
}

int64_t workspace_bytes(const GroupedGemmProblem& problem, int64_t a_rows,
                        Accumulation /*accumulation*/) {
  const RowFormat format = row_format(problem);
  if (format == RowFormat::kBf16) return 0;
  const int64_t factors =
      format == RowFormat::kMxfp8 ? a_rows * static_cast<int64_t>(sizeof(float)) : 0;
  return decoded_bytes(problem, a_rows) + round_up(factors, kGemmAlignment);
}

Support supports(const GroupedGemmProblem& problem) {
  Support device = runs_on_cuda(problem.device);
  if (!device.ok()) return device;
  Support mode = gpu_has_mode(problem.mode);
  if (!mode.ok()) return mode;
  if (cuda_device(problem.device.index).max_shared_bytes_per_block < kMmaSharedBytes) {
    return Support::no("the device has less than 99 KB of shared memory for a block");
  }
  if (problem.cols >= kMaxCols) return Support::no("2^29 columns or more");
  if (problem.rows >= kMaxRows) return Support::no("2^22 weight rows or more");
  return Support::yes();
}

Support supports_activation(const GroupedGemmProblem& problem, ActivationKind kind,
                            RowFormat format, int64_t /*token_tile*/) {
  if (kind != ActivationKind::kSwiglu) return Support::no("does swiglu only");
  if (!problem.gate_order) return Support::no("needs weights prepared with their gate order");
  // Rows with a scale each are made from rows of bf16.
  const RowFormat rows = moe_mode_info(problem.mode).intermediate;
  const bool reads_bf16 = rows == RowFormat::kBf16 || has_row_scale(rows);
  if (reads_bf16 && format == RowFormat::kBf16) return Support::yes();
  return Support::no("writes rows of bf16 only");
}

Support supports_tiles(const GroupedGemmProblem& problem, int64_t count, int64_t token_tile) {
  const int64_t pieces = ceil_div(token_tile, int64_t{kMostMmaTokens / 2});
  const int64_t ctas = pieces * ceil_div(problem.rows, int64_t{kLeastMmaCtaRows});
  if (count < ceil_div(kMaxCtas, std::max(ctas, int64_t{1}))) return Support::yes();
  return Support::no("2^31 CTAs or more");
}

}  // namespace

const GroupedGemmImpl kGroupedGemmSm80{"sm80_mma",          supports,
                                       make_mma_image,      workspace_bytes,
                                       supports_tiles,      supports_activation,
                                       no_dequantized_rows, run};

}  // namespace narrowfloat
