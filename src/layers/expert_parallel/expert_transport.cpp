// See expert_transport.h.
#include "layers/expert_parallel/expert_transport.h"

#include <array>
#include <string>
#include <utility>

#include <fmt/ranges.h>

#include "base/name_table.h"
#include "layers/expert_parallel/cpu_expert_rank.h"
#include "layers/resume_manifest.h"
#include "narrowfloat/allreduce.h"
#include "ops/expert_exchange/expert_exchange_sm90.h"
#include "runtime/comm/phase.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/dispatch.h"
#if defined(NARROWFLOAT_CUDA)
#include "layers/expert_parallel/cuda_expert_rank.h"
#endif

namespace narrowfloat {

std::string to_string(const ExpertParallelConfig& config) {
  std::string text = fmt::format(
      "hidden {}, {} experts, top_k {}, {} tokens a rank, payload {}, order {}, "
      "results {}",
      config.hidden, config.experts, config.top_k, config.max_tokens, name(config.payload),
      name(config.order), name(config.result_dtype));
  if (!config.places.empty()) {
    const std::string places = fmt::format("{}", fmt::join(config.places, ","));
    text += fmt::format(", {} places {}", config.places.size(), hash_of(places));
  }
  return text;
}

namespace {

struct OrderName {
  CombineOrder id;
  std::string_view name;
};
constexpr OrderName kOrders[] = {{CombineOrder::kRank, "rank"}, {CombineOrder::kTopK, "topk"}};

struct TransportName {
  ExpertTransport id;
  std::string_view name;
};
constexpr TransportName kTransports[] = {{ExpertTransport::kAuto, "auto"},
                                         {ExpertTransport::kPeerMemory, "peer_memory"},
                                         {ExpertTransport::kAllToAll, "all_to_all"},
                                         {ExpertTransport::kAllGather, "all_gather"}};

struct Request : ExpertParallelExplainRequest {
  std::string why_not_mapped = "the ranks cannot map each other's memory";
};

std::string to_string(const Request& request) {
  return fmt::format("{} ranks on {}: {}", request.ranks, narrowfloat::to_string(request.device),
                     to_string(request.config));
}

struct TransportImpl {
  std::string_view name;
  ExpertTransport id;
  Support (*supports)(const Request& request);
};

Support is_wanted(const Request& request, ExpertTransport id) {
  if (request.device.type != DeviceType::kCpu) {
#if defined(NARROWFLOAT_CUDA)
    Support support = runs_own_code(request.device);
    if (!support.ok()) return support;
#else
    return Support::no("this build has no CUDA code; build with NARROWFLOAT_CUDA=ON");
#endif
  }
  if (request.transport == ExpertTransport::kAuto || request.transport == id) return Support::yes();
  return Support::no(
      fmt::format("passed over: transport {} was asked for", name(request.transport)));
}

Support supports_peer_memory(const Request& request) {
  Support support = is_wanted(request, ExpertTransport::kPeerMemory);
  if (!support.ok()) return support;
  if (request.ranks > SymmetricMemory::kMaxRanks) {
    return Support::no(
        fmt::format("at most {} ranks, got {}", SymmetricMemory::kMaxRanks, request.ranks));
  }
  return request.is_one_host ? Support::yes() : Support::no(request.why_not_mapped);
}

// GPUs need NCCL for a collective.
Support has_nccl(const Request& request) {
  if (request.ranks > kMostExchangeRanks) {
    return Support::no(
        fmt::format("at most {} ranks on GPUs, got {}", kMostExchangeRanks, request.ranks));
  }
  const NcclInfo nccl = nccl_info();
  return nccl.found ? Support::yes() : Support::no(nccl.reason);
}

Support supports_all_to_all(const Request& request) {
  Support support = is_wanted(request, ExpertTransport::kAllToAll);
  if (!support.ok()) return support;
  if (request.device.type != DeviceType::kCpu) return has_nccl(request);
  return request.has_all_to_all ? Support::yes() : Support::no("no all_to_all function was given");
}

Support supports_all_gather(const Request& request) {
  Support support = is_wanted(request, ExpertTransport::kAllGather);
  if (!support.ok() || request.device.type == DeviceType::kCpu) return support;
  return has_nccl(request);
}

constexpr std::array kTransportImpls{
    TransportImpl{"peer_memory", ExpertTransport::kPeerMemory, supports_peer_memory},
    TransportImpl{"all_to_all", ExpertTransport::kAllToAll, supports_all_to_all},
    TransportImpl{"all_gather", ExpertTransport::kAllGather, supports_all_gather}};

const TransportImpl& select_transport(const Request& request) {
  return select("expert_parallel", std::span<const TransportImpl>(kTransportImpls), request);
}

Request request_of(int ranks, const ExpertParallelConfig& config,
                   const ExpertParallelOptions& options) {
  return {{.ranks = ranks,
           .config = config,
           .device = options.device,
           .transport = options.transport,
           .is_one_host = true,
           .has_all_to_all = static_cast<bool>(options.all_to_all)}};
}

using RankPointer = std::unique_ptr<ExpertParallel::Impl>;

// Collective.
RankPointer make_peer_rank(const std::shared_ptr<Bootstrap>& bootstrap,
                           const ExpertParallelConfig& config, const ExpertLayout& layout,
                           const std::shared_ptr<SymmetricMemory>& memory,
                           std::chrono::milliseconds deadline) {
  RankPointer made;
  try {
    run_phase(*bootstrap, "expert parallelism: memory",
              [&] { made = make_expert_rank(config, layout, bootstrap, memory, deadline); });
  } catch (const PhaseError&) {
    // Nobody frees what a peer has mapped.
    memory->unmap_peers();
    bootstrap->barrier();
    throw;
  }
  return made;
}

// Collective.
RankPointer make_collective_rank(const std::shared_ptr<Bootstrap>& bootstrap,
                                 const ExpertParallelConfig& config, const ExpertLayout& layout,
                                 ExpertTransport transport, const ExpertParallelOptions& options) {
  RankPointer made;
  if (options.device.type == DeviceType::kCpu) {
    run_phase(*bootstrap, "expert parallelism: buffers", [&] {
      made = std::make_unique<CpuExpertRank>(
          config, layout, bootstrap->rank(),
          make_collective_exchange(
              layout, bootstrap,
              transport == ExpertTransport::kAllToAll ? options.all_to_all : AllToAllFunction()));
    });
    return made;
  }
#if defined(NARROWFLOAT_CUDA)
  std::unique_ptr<BlockTransport> blocks =
      make_nccl_blocks(*bootstrap, options.device, transport, options.deadline);
  std::unique_ptr<CudaExpertRank> rank;
  run_phase(*bootstrap, "expert parallelism: buffers", [&] {
    rank = std::make_unique<CudaExpertRank>(
        config, layout, bootstrap->rank(), options.device,
        make_cuda_block_exchange(layout, bootstrap->rank(), options.device, bootstrap,
                                 std::move(blocks)),
        options.deadline);
  });
  run_phase(*bootstrap, "expert parallelism: connections", [&] { rank->connect(); });
  made = std::move(rank);
#endif
  return made;
}

RankPointer make_for(Request request, const std::shared_ptr<Bootstrap>& bootstrap,
                     const ExpertLayout& layout, const ExpertParallelOptions& options) {
  ExpertTransport chosen = ExpertTransport::kAuto;
  // Ranks may differ in what they find: NCCL.
  run_phase(*bootstrap, "expert parallelism: transport",
            [&] { chosen = select_transport(request).id; });
  if (chosen != ExpertTransport::kPeerMemory) {
    return make_collective_rank(bootstrap, request.config, layout, chosen, options);
  }
  std::shared_ptr<SymmetricMemory> memory;
  try {
    memory = make_symmetric_memory(*bootstrap, options.device, AllReduceTransport::kAuto,
                                   layout.size_bytes);
  } catch (const Error& error) {
    // All ranks got the same error. Another transport will do, unless this one was asked for.
    const bool may_do_without =
        request.transport == ExpertTransport::kAuto && error.kind() == ErrorKind::kUnsupported;
    if (!may_do_without) throw;
    request.is_one_host = false;
    request.why_not_mapped = error.what();
    return make_for(request, bootstrap, layout, options);
  }
  return make_peer_rank(bootstrap, request.config, layout, memory, options.deadline);
}

}  // namespace

std::string_view name(CombineOrder order) { return record_of(kOrders, order, "CombineOrder").name; }
CombineOrder parse_combine_order(std::string_view text) {
  return parse_name(kOrders, text, "order");
}
std::string_view name(ExpertTransport transport) {
  return record_of(kTransports, transport, "ExpertTransport").name;
}
ExpertTransport parse_expert_transport(std::string_view text) {
  return parse_name(kTransports, text, "transport");
}

Explanation explain_expert_parallel(const ExpertParallelExplainRequest& request) {
  static_cast<void>(expert_layout(request.config, request.ranks));
  return explain_candidates("expert_parallel", std::span<const TransportImpl>(kTransportImpls),
                            Request{request});
}

void require_transport(int ranks, const ExpertParallelConfig& config,
                       const ExpertParallelOptions& options) {
  static_cast<void>(select_transport(request_of(ranks, config, options)));
}

std::unique_ptr<ExpertParallel::Impl> make_expert_rank(const ExpertParallelConfig& config,
                                                       const ExpertLayout& layout,
                                                       std::shared_ptr<Bootstrap> bootstrap,
                                                       std::shared_ptr<SymmetricMemory> memory,
                                                       std::chrono::milliseconds deadline) {
#if defined(NARROWFLOAT_CUDA)
  if (memory->device().type == DeviceType::kCuda) {
    const int rank = memory->rank();
    const Device device = memory->device();
    return std::make_unique<CudaExpertRank>(
        config, layout, rank, device,
        make_cuda_peer_exchange(layout, std::move(bootstrap), std::move(memory)), deadline);
  }
#endif
  const int rank = memory->rank();
  return std::make_unique<CpuExpertRank>(
      config, layout, rank,
      make_peer_exchange(layout, std::move(bootstrap), std::move(memory), deadline));
}

std::unique_ptr<ExpertParallel::Impl> connect_expert_rank(
    const std::shared_ptr<Bootstrap>& bootstrap, const ExpertParallelConfig& config,
    const ExpertLayout& layout, const ExpertParallelOptions& options) {
  return make_for(request_of(bootstrap->size(), config, options), bootstrap, layout, options);
}

}  // namespace narrowfloat
