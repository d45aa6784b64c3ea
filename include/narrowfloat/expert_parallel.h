// Expert parallelism: the experts of a Mixture-of-Experts layer lie on several ranks. dispatch()
// sends the rows of tokens to the ranks of their experts, combine() sums what these return
// (docs/parallel.md, which also says which transport when).
//
//   rank r, its tokens          rank d, its experts              rank r
//   rows, ids, weights   ->     rows, ids, weights of all  ->    out = sum over destinations
//        dispatch()                MoeLayer::run()                   combine()
//
// Rank r owns the experts expert_shard(E, R, r): contiguous ranges, the first E mod R ranks one
// expert more; with ExpertParallelConfig::places, those at such a range of places. A token travels
// once to each rank that owns one of its experts, whatever their number. All sizes are static: the
// number of rows does not depend on the routing, and no count is read on the host. Results do not
// depend on the transport, on the order of arrival or on other tokens.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/bootstrap.h"
#include "narrowfloat/export.h"
#include "narrowfloat/moe.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/runtime.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// The experts [offset, offset + count) of one rank.
struct ExpertShard {
  int32_t offset = 0;
  int32_t count = 0;
  friend bool operator==(const ExpertShard&, const ExpertShard&) = default;
};
// Throws kInvalidArgument unless 0 <= rank < ranks <= experts.
NARROWFLOAT_API ExpertShard expert_shard(int32_t experts, int ranks, int rank);

// In which order a token's results are summed, in fp32 and rounded once to the output's type.
// kRank: each rank sums its own experts in slot order and rounds once; then ranks ascending. One
//   row travels back for each destination.
// kTopK: every expert's unweighted row travels back; the sum is over slots ascending. The bytes are
//   those of the layer on one rank, where the payload is what that layer would read.
enum class CombineOrder : int { kRank = 0, kTopK = 1 };
NARROWFLOAT_API std::string_view name(CombineOrder order);  // "rank", "topk"
NARROWFLOAT_API CombineOrder parse_combine_order(std::string_view text);

// How rows travel. kAuto: the first that the group can have.
enum class ExpertTransport : int {
  kAuto = 0,
  kPeerMemory = 1,  // Stores into memory that all ranks map: 1 to 8 ranks of one host.
  // Padded blocks, by ExpertParallelOptions::all_to_all; on GPUs by NCCL's sends and receives, 1 to
  // 64 ranks with a GPU each, of any hosts.
  kAllToAll = 2,
  // As many times the bytes as ranks: by the bootstrap's all_gather; on GPUs, as above, by NCCL's.
  kAllGather = 3,
};
NARROWFLOAT_API std::string_view name(ExpertTransport transport);  // "peer_memory"
NARROWFLOAT_API ExpertTransport parse_expert_transport(std::string_view text);

// All ranks give the same one.
struct ExpertParallelConfig {
  int64_t hidden = 0;      // H
  int32_t experts = 0;     // E, of all ranks together: at least one for each, or `places`.
  int32_t top_k = 0;       // k, slots of a token.
  int64_t max_tokens = 0;  // Most tokens that a rank gives in one call.
  // The expert at each place, as place_experts() (expert_placement.h) chooses them; empty: expert e
  // at place e. dispatch() takes numbers of experts and gives numbers of places, of which rank r
  // owns expert_shard(P, R, r); so its layer has routing.experts P, and at place p the weights of
  // expert places[p].
  std::vector<int32_t> places;
  // Rows travel to the experts in kBf16, kFp8Group, kMxfp8 or kNvfp4PerToken. The sender quantizes
  // bf16, fp16 and fp32 rows once, with the bits of quantize().
  RowFormat payload = RowFormat::kBf16;
  CombineOrder order = CombineOrder::kRank;
  // Type of the rows that travel back: BF16, F16 (kRank alone) or F32. A layer's out_dtype for
  // kRank, its slot_dtype for kTopK.
  DType result_dtype = DType::kBF16;
};

// Exchanges blocks between all ranks: block d of `send` goes to rank d, block s of `receive` comes
// from rank s; all blocks have send.size() / ranks bytes. It keeps a deadline of its own. What it
// throws reaches the caller of dispatch() or combine(), and all later calls throw kDevice.
using AllToAllFunction =
    std::function<void(std::span<const std::byte> send, std::span<std::byte> receive)>;

struct ExpertParallelOptions {
  Device device;  // All ranks are on CPUs, or all on GPUs.
  ExpertTransport transport = ExpertTransport::kAuto;
  // On CPUs alone. Called for each kind of data, in the same order on all ranks.
  AllToAllFunction all_to_all;
  // Bounds each wait for a peer in kPeerMemory, and the halves of dispatch() and combine() on the
  // GPU over NCCL; 0: no bound.
  std::chrono::milliseconds deadline{30'000};
};

// The rows that a rank received: row s * max_tokens + i is the i-th that rank s sent. The views are
// valid until combine(): from then on other ranks may store their next tokens there.
struct ReceivedTokens {
  CodedRows rows;      // [R * max_tokens, H] in the payload's format, scales linear.
  TensorView ids;      // I32 [R * max_tokens, k]: places; -1 in rows that nobody sent.
  TensorView weights;  // F32 [R * max_tokens, k]
  TensorView counts;   // I32 [R]: rows of each source.
  uint64_t call = 0;   // Names the dispatch for combine().
};

class NARROWFLOAT_API ExpertParallel {
 public:
  // Collective over the bootstrap's ranks, which all give the same configuration and options; the
  // object keeps the bootstrap alive. Throws on all ranks if one fails: kInvalidArgument for a
  // configuration without a meaning, kUnsupported where the transport cannot be had (the message
  // gives the reasons).
  static ExpertParallel create(std::shared_ptr<Bootstrap> bootstrap,
                               const ExpertParallelConfig& config,
                               const ExpertParallelOptions& options = {});
  // 1 to 8 ranks of this process: threads on the CPU, or virtual ranks of one GPU, which are for
  // tests. Kernels of a virtual rank that wait for others can keep those from running: queue the
  // start_ functions of all ranks before the finish_ functions, and do not use dispatch(),
  // combine() and run().
  static std::vector<ExpertParallel> create_local(
      int ranks, const ExpertParallelConfig& config,
      std::chrono::milliseconds deadline = std::chrono::milliseconds(30'000), Device device = {});

  ExpertParallel(ExpertParallel&&) noexcept;
  ExpertParallel& operator=(ExpertParallel&&) noexcept;
  ExpertParallel(const ExpertParallel&) = delete;
  ExpertParallel& operator=(const ExpertParallel&) = delete;
  // Frees without waiting for other ranks; call destroy() first where they may still run.
  ~ExpertParallel();

  [[nodiscard]] int rank() const;
  [[nodiscard]] int ranks() const;
  [[nodiscard]] Device device() const;
  [[nodiscard]] ExpertTransport transport() const;
  [[nodiscard]] const ExpertParallelConfig& config() const;
  [[nodiscard]] ExpertShard shard() const;     // A range of places.
  [[nodiscard]] int64_t max_rows() const;      // R * max_tokens
  [[nodiscard]] int64_t memory_bytes() const;  // All buffers, peer memory included.
  // Collective. Sends this rank's tokens and waits for those of all others. Dispatches and combines
  // alternate.
  //   rows     [T, H], T <= max_tokens, dense: in the payload's format, with scales of any strides,
  //            or, where the payload is not kBf16, BF16, F16 or F32
  //   ids      I32 [T, k]: numbers of experts. Others than 0 to E - 1 name no expert: that slot
  //            adds nothing.
  //   weights  F32 [T, k]
  // T may be 0 and may differ between ranks. A check of arguments that fails throws
  // kInvalidArgument before anything is sent, on this rank alone.
  // On a GPU this call and those below queue their work on `stream`, the same one or streams that
  // events order; they allocate nothing, wait for nothing and can be captured into a graph, T
  // included. Arguments must not change before start_dispatch()'s work has run.
  ReceivedTokens dispatch(const CodedRows& rows, const TensorView& ids, const TensorView& weights,
                          Stream stream = {});

  // Returns where the caller stores the results of its experts, between dispatch() and combine().
  // At other times peers may read them, and the call throws kInvalidArgument.
  //   kRank  [R * max_tokens, H]: the weighted sum over the row's local experts, slots ascending
  //   kTopK  [R * max_tokens, k, H]: the unweighted row of each local slot
  // Rows that nobody sent, and slots of other ranks' experts, may have any contents.
  [[nodiscard]] TensorView results() const;

  // Collective. Sends the results back and writes out: BF16, F16 or F32 [T, N], N <= H, for the T
  // tokens of the dispatch. A token none of whose ids names an expert gets +0. `received`: what
  // the dispatch returned. On a GPU the rows of out lie multiples of 16 bytes apart.
  void combine(const ReceivedTokens& received, const TensorView& out, Stream stream = {});

  // The halves of dispatch() and combine(). Between them, work may run that needs no other rank:
  // a shared expert, for example. The first half sends, the second waits for all ranks.
  void start_dispatch(const CodedRows& rows, const TensorView& ids, const TensorView& weights,
                      Stream stream = {});
  ReceivedTokens finish_dispatch(Stream stream = {});
  void start_combine(const ReceivedTokens& received, Stream stream = {});
  void finish_combine(const TensorView& out, Stream stream = {});

  // Collective: dispatch(), the layer of this rank's shard on the received rows, combine().
  //   layer      on the group's device, experts shard() of routing.experts E (or as many as there
  //              are places), top_k k, no shared experts,
  //              RouterOptions::negative_one_is_empty; it reads the payload or quantizes it
  //   workspace  U8 [>= required_workspace(layer)], aligned to 256 bytes
  // Throws kInvalidArgument for a configuration of the layer that does not fit, before anything is
  // sent. What the layer itself throws on the received rows reaches the caller after give_up().
  void run(const MoeLayer& layer, const CodedRows& rows, const TensorView& ids,
           const TensorView& weights, const TensorView& out, const TensorView& workspace,
           Stream stream = {});
  // The layer alone, between dispatch() and combine(): writes results().
  void run_experts(const MoeLayer& layer, const ReceivedTokens& received,
                   const TensorView& workspace, Stream stream = {});
  [[nodiscard]] int64_t required_workspace(const MoeLayer& layer) const;

  // Throws kDevice where an earlier call has failed, as all later calls do. On a GPU an error is
  // seen once the work of that call has ended.
  void check_error() const;
  // Call it on a rank that cannot compute its results: in peer memory the others get an error at
  // once, with other transports at their deadline or that of their all_to_all. No further call is
  // possible.
  void give_up(Stream stream = {});
  // Collective: waits for all ranks, then frees. Graphs that hold calls over NCCL are destroyed
  // before, and are not replayed after an error. The object is empty afterwards, also if a rank
  // does not come and this throws. Ranks of create_local() do not wait: their memory lives as long
  // as any of them.
  void destroy();

  class Impl;  // Internal.

 private:
  explicit ExpertParallel(std::unique_ptr<Impl> impl);
  [[nodiscard]] Impl& impl() const;
  std::unique_ptr<Impl> impl_;
};

// Which transport a group would use, and why not the others.
struct ExpertParallelExplainRequest {
  int ranks = 2;
  ExpertParallelConfig config;
  Device device;
  ExpertTransport transport = ExpertTransport::kAuto;
  bool is_one_host = true;
  bool has_all_to_all = false;
};
NARROWFLOAT_API Explanation explain_expert_parallel(const ExpertParallelExplainRequest& request);

}  // namespace narrowfloat
