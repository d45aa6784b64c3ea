// sm90_cluster: the fused prologue of a layer (route, permute, quantize) for up to 64 tokens, in
// one launch.
//
//   cluster 0    CTA b routes tokens b * n .. b * n + n - 1, a warp each (route_warp_sm90.cuh), or
//                one CTA copies a precomputed routing (route_given_sm90.cuh); the ids go to the
//                shared memory of all its CTAs                                 | cluster barrier
//                each CTA permutes all slots and writes its share (moe_shared/small_batch.cuh)
//   other CTAs   quantize rows (moe_shared/quantize_activations.cuh), which needs no routing
//
// The cluster has a CTA for each token, at most eight. This saves launches and the round trip of
// the ids through memory; maps are cleared while routing runs. Bytes: those of the three
// operations.
#include <algorithm>
#include <bit>
#include <cuda_runtime.h>

#include "device/ptx/cluster.cuh"
#include "device/ptx/shared_memory.cuh"
#include "moe_shared/quantize_activations.cuh"
#include "moe_shared/small_batch.cuh"
#include "ops/route/route_given_sm90.cuh"
#include "ops/route/route_permute.h"
#include "ops/route/route_warp_sm90.cuh"
#include "runtime/dispatch.h"
#include "tensor/row_format.h"

namespace narrowfloat {
namespace {

constexpr int kMaxThreads = 512;
constexpr int64_t kMinThreads = 128;
constexpr int64_t kMaxTokens = 64;
// The cluster size that every GPU schedules.
constexpr int64_t kMaxClusterBlocks = 8;
constexpr int64_t kMaxSharedBytes = 48 * 1024;
// Replaces the number of keys per lane if the routing is given.
constexpr int kGiven = 0;

struct RoutePermuteParams {
  WarpParams warp;
  GivenParams given;
  SmallBatchParams slots;
  QuantizeActivationsParams rows;
  RowFormat format = RowFormat::kBf16;  // kBf16: no rows are quantized.
  WordsToClear cleared;
};

// Stores the id of slot `slot` in the shared memory of all CTAs of the cluster.
__device__ void share_id(const SmallBatchShared& shared, int64_t slot, int32_t id,
                         uint32_t blocks) {
  const uint32_t address = shared_address(shared.ids + slot);
  for (uint32_t rank = 0; rank < blocks; ++rank) {
    store_in_block(address, rank, static_cast<uint32_t>(id));
  }
}

// Routes this CTA's tokens, one per warp.
template <int kPerLane>
__device__ void route_tokens(const WarpParams& params, const CtaShare& share,
                             const SmallBatchShared& shared, uint32_t* shared_keys) {
  const RouteParams& route = params.route;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t first_token = int64_t{share.rank} * params.tokens_per_block;
  compute_keys(params, first_token, shared_keys);
  __syncthreads();
  if (share.rank == 0 && threadIdx.x == 0) clear_errors(route.args.errors);
  const int64_t token = first_token + warp;
  if (warp >= params.tokens_per_block || token >= route.tokens) return;
  const SharedToken own = shared_token(params, shared_keys, warp);
  const int32_t id = select_experts<kPerLane>(params, own);
  if (lane < route.top_k) share_id(shared, slot_index(route, token, lane), id, share.ctas);
  for (int32_t slot = route.top_k + lane; slot < route.slots; slot += kWarpSize) {
    share_id(shared, slot_index(route, token, slot), route.experts + slot - route.top_k,
             share.ctas);
  }
  const float weight = weight_of_slot(route, own, id);
  if (lane < route.top_k) store_routed(route, token, lane, id, weight);
  store_shared_experts(route, token, lane, kWarpSize);
}

// Called by a single CTA.
__device__ void copy_given(const GivenParams& params, const SmallBatchShared& shared) {
  if (threadIdx.x == 0) clear_errors(params.route.args.errors);
  __syncthreads();
  if (threadIdx.x >= params.num_slots) return;
  shared.ids[threadIdx.x] = static_cast<uint32_t>(copy_slot(params, threadIdx.x));
}

// Whether a CTA must see a whole row.
NF_HOST_DEVICE bool takes_block(const RoutePermuteParams& params) {
  return has_row_scale(params.format) ||
         (params.format == RowFormat::kMxfp8 && params.rows.dequantized.has_values());
}

__device__ void quantize_some_rows(const RoutePermuteParams& params, uint32_t block,
                                   uint32_t* shared_scratch) {
  const uint32_t item = block * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
  const RowPair row = pair_of(params.rows, block);
  switch (params.format) {
    case RowFormat::kFp8Static:
      return quantize_bundle<RowFormat::kFp8Static, 1>(params.rows, item);
    case RowFormat::kFp8Group:
      return quantize_bundle<RowFormat::kFp8Group, 1>(params.rows, item);
    case RowFormat::kMxfp8:
      return takes_block(params) ? quantize_mxfp8_row(params.rows, row, shared_scratch)
                                 : quantize_bundle<RowFormat::kMxfp8, 1>(params.rows, item);
    case RowFormat::kNvfp4:
      return quantize_bundle<RowFormat::kNvfp4, 1>(params.rows, item);
    case RowFormat::kNvfp4PerToken:
      return quantize_token_row<RowFormat::kNvfp4PerToken>(params.rows, row, shared_scratch);
    case RowFormat::kFp8Token:
      return quantize_token_row<RowFormat::kFp8Token>(params.rows, row, shared_scratch);
    default:
      return;
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kMaxThreads)
    route_permute_kernel(const __grid_constant__ RoutePermuteParams params) {
  // Portable code has no clusters, and supports() refuses to run.
  if constexpr (!kHasHopperInstructions) return;
  NF_DYNAMIC_SHARED(uint32_t, shared_words, 16);
  const CtaShare share{.rank = cluster_rank(), .ctas = cluster_size()};
  if (blockIdx.x >= share.ctas) {
    wait_for_previous_grids();
    return quantize_some_rows(params, blockIdx.x - share.ctas, shared_words);
  }
  // The keys come first because they are read 16 bytes at a time.
  const SmallBatchShared shared(
      params.slots, shared_words + (kPerLane == kGiven ? 0 : warp_shared_words(params.warp)));
  // A CTA that has not started has no shared memory yet.
  arrive_at_cluster();
  clear_masks(params.slots, shared);
  wait_for_previous_grids();
  trigger_dependent_launch();
  clear_tiles(params.slots, share);
  if (share.rank == 0 && threadIdx.x < params.cleared.count) params.cleared.words[threadIdx.x] = 0;
  wait_for_cluster();
  if constexpr (kPerLane == kGiven) {
    copy_given(params.given, shared);
  } else {
    route_tokens<kPerLane>(params.warp, share, shared, shared_words);
  }
  arrive_at_cluster();
  wait_for_cluster();
  place_small_batch(params.slots, shared, share);
}

bool quantizes_rows(const RoutePermuteProblem& problem) {
  return problem.quantized != RowFormat::kBf16;
}

int64_t cluster_ctas(const RoutePermuteProblem& problem) {
  if (problem.route.input != RoutingInput::kLogits) return 1;
  const auto tokens = static_cast<uint64_t>(problem.route.tokens);
  return std::min(kMaxClusterBlocks, static_cast<int64_t>(std::bit_ceil(tokens)));
}

WarpParams make_tokens(const RoutePermuteProblem& problem, const RouteArgs& args) {
  return make_warp_params(problem.route, args,
                          ceil_div(problem.route.tokens, cluster_ctas(problem)));
}

SmallBatchParams make_slots(const RoutePermuteProblem& problem, const RoutePermuteArgs& args) {
  return make_small_batch_params(problem.layout, args.expert_offset, args.permutation);
}

int64_t shared_bytes(const RoutePermuteProblem& problem) {
  const bool is_given = problem.route.input != RoutingInput::kLogits;
  const int64_t keys = is_given ? 0 : warp_shared_words(make_tokens(problem, {}));
  return 4 * (keys + SmallBatchShared::words(make_slots(problem, {})));
}

QuantizeActivationsParams make_rows(const RoutePermuteProblem& problem,
                                    const QuantizedInputArgs& args) {
  QuantizeActivationsParams params{};
  if (!quantizes_rows(problem)) return params;
  params.input = static_cast<const uint8_t*>(args.rows.data);
  params.output =
      device_rows(args.output, static_cast<uint64_t>(row_bytes(problem.quantized, problem.cols)));
  params.input_dtype = args.rows.dtype;
  params.input_max = largest_finite_of(args.rows.dtype);
  params.rows = params.input_rows = static_cast<uint32_t>(problem.route.tokens);
  params.cols = static_cast<uint32_t>(problem.cols);
  params.groups = static_cast<uint32_t>(ceil_div(problem.cols, kRowGroupCols));
  params.bundles = FastDivisor(params.groups);
  params.multiplier = args.multiplier;
  params.dequantized = args.dequantized;
  return params;
}

// A thread for each slot and each expert, a warp for each token that is routed; enough threads to
// compute one sigmoid each for one token.
int64_t threads_of(const RoutePermuteProblem& problem, const WarpParams& tokens) {
  const bool is_given = problem.route.input != RoutingInput::kLogits;
  const int64_t warps = is_given ? 0 : tokens.tokens_per_block;
  const int64_t wanted = std::max<int64_t>(
      {problem.layout.tokens * problem.layout.slots, problem.layout.local_experts,
       int64_t{tokens.tokens_per_block} * tokens.route.experts, warps * kWarpSize, kMinThreads});
  return std::min<int64_t>(kMaxThreads, round_up(wanted, kWarpSize));
}

int64_t quantizing_ctas(const RoutePermuteParams& params, int64_t threads) {
  if (params.format == RowFormat::kBf16) return 0;
  if (takes_block(params)) return params.rows.rows;
  return ceil_div(int64_t{params.rows.rows} * params.rows.groups, threads / kWarpSize);
}

void launch_route_permute(const RoutePermuteProblem& problem, const RouteArgs& route,
                          const RoutePermuteArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.route.device);
  const RoutePermuteParams params{.warp = make_tokens(problem, route),
                                  .given = make_given_params(problem.route, route),
                                  .slots = make_slots(problem, args),
                                  .rows = make_rows(problem, args.input),
                                  .format = problem.quantized,
                                  .cleared = args.cleared};
  const int64_t threads = threads_of(problem, params.warp);
  const int64_t cluster = cluster_ctas(problem);
  const int64_t blocks = cluster + round_up(quantizing_ctas(params, threads), cluster);
  const LaunchShape shape{.ctas = dim3(static_cast<unsigned>(blocks)),
                          .threads = dim3(static_cast<unsigned>(threads)),
                          .shared_bytes = static_cast<size_t>(shared_bytes(problem)),
                          .cluster_ctas = static_cast<unsigned>(cluster)};
  if (problem.route.input != RoutingInput::kLogits) {
    return launch(route_permute_kernel<kGiven>, shape, stream, params);
  }
  const int64_t per_lane = ceil_div(params.warp.candidates, kWarpSize);
  if (per_lane <= 4) return launch(route_permute_kernel<4>, shape, stream, params);
  if (per_lane <= 8) return launch(route_permute_kernel<8>, shape, stream, params);
  launch(route_permute_kernel<16>, shape, stream, params);
}

// Reasons are literals: a layer asks in every run.
Support supports(const RoutePermuteProblem& problem) {
  const Support device = runs_own_code(problem.route.device);
  if (!device.ok()) return device;
  for (const std::string_view op : {"route", "permute", "quantize_activations"}) {
    if (forced_implementation(op).empty()) continue;
    return Support::no("NARROWFLOAT_FORCE pins an operation that this one fuses");
  }
  const int64_t slots = problem.layout.tokens * problem.layout.slots;
  if (problem.route.tokens == 0) return Support::no("no tokens");
  if (problem.route.tokens > kMaxTokens) return Support::no("more than 64 tokens");
  if (slots > kSmallBatchSlots) return Support::no("more than 512 slots");
  if (problem.layout.local_experts > kSmallBatchExperts) {
    return Support::no("more than 512 local experts");
  }
  if (problem.route.input == RoutingInput::kLogits && !fits_a_warp(problem.route).ok()) {
    return Support::no("more experts, selected experts or groups than a warp takes");
  }
  if (shared_bytes(problem) > kMaxSharedBytes) return Support::no("needs too much shared memory");
  return Support::yes();
}

}  // namespace

const RoutePermuteImpl kRoutePermuteSm90{"sm90_cluster", supports, launch_route_permute};

}  // namespace narrowfloat
