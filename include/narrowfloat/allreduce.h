// All-reduce over the ranks of one host, fused with residual, RMSNorm and quantization, and with
// the reduction or finalize of a Mixture-of-Experts layer before it. docs/allreduce.md explains
// patterns, exactness and the protocols.
//
//   s = sum over ranks of input           in rank order, fp32, rounded once to the element type
//   x = s + residual_in                   rounded; stored to residual_out
//   n = x / rms(x) * (weight_bias + gamma)    rounded; stored to norm_out where the pattern says so
//   quant_out, scale_out = quantize(n)
//
// The exact algorithms (all but kNccl) give the same bytes on every rank, for every algorithm,
// device, launch shape and number of tokens: those of the formulas above in IEEE fp32 arithmetic.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/bootstrap.h"
#include "narrowfloat/export.h"
#include "narrowfloat/format.h"
#include "narrowfloat/runtime.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Numbers 0 to 11 are FlashInfer's. The patterns with "Norm" in the name of their output also store
// norm_out; the quantized bytes are the same with and without it.
enum class AllReducePattern : int {
  kAllReduce = 0,
  kResidualRmsNorm = 1,
  kFp8 = 2,    // E4M3, one decode scale for the tensor, given in global_scale.
  kNvfp4 = 3,  // One encode scale for the tensor, given in global_scale.
  kNormFp8 = 4,
  kNormNvfp4 = 5,
  kMoeReduction = 6,  // Sums the outputs of the active experts first.
  kMoeFinalize = 7,   // Un-permutes and weights the rows of the experts first.
  kFp8Group = 8,      // E4M3, groups of `group` columns with power-of-two scales, packed bytes.
  kNormFp8Group = 9,
  kFp8Token = 10,  // E4M3, one fp32 decode scale for each token.
  kNormFp8Token = 11,
  kFp8Block = 12,  // E4M3, fp32 decode scales for 1x128 blocks (rule kReciprocal).
  kNormFp8Block = 13,
  kMxfp8 = 14,
  kNormMxfp8 = 15,
  kMxfp4 = 16,
  kNormMxfp4 = 17,
  kNvfp4PerToken = 18,
  kNormNvfp4PerToken = 19,
};
inline constexpr int kNumAllReducePatterns = 20;
// "allreduce", "residual_rmsnorm", "fp8", "norm_fp8", ...
NARROWFLOAT_API std::string_view name(AllReducePattern pattern);

// The MoE patterns.
NARROWFLOAT_API bool is_moe(AllReducePattern pattern);
// Whether a pattern requires norm_out. The MoE patterns do not, but may have it.
NARROWFLOAT_API bool stores_norm(AllReducePattern pattern);

enum class AllReduceQuantization : int {
  kNone = 0,
  kFp8Tensor = 1,
  kFp8Token = 2,
  kFp8GroupUe8m0 = 3,
  kFp8Block1x128 = 4,
  kNvfp4 = 5,
  kNvfp4PerToken = 6,
  kMxfp8 = 7,
  kMxfp4 = 8,
};
NARROWFLOAT_API std::string_view name(AllReduceQuantization quantization);

// How the sum over ranks rounds: once at the end, or to the element type after every addition (the
// default of FlashInfer). The same for F32 elements.
enum class AllReduceAccumulation : int { kFp32 = 0, kElement = 1 };

// kExact: algorithms whose bytes are defined. kFast also allows NCCL's own all-reduce, whose order
// of summation depends on the size of the message.
enum class AllReduceExactness : int { kExact = 0, kFast = 1 };

enum class AllReduceAlgorithm : int {
  kAuto = 0,
  kOneShot = 1,    // Every rank sends its message to all others.
  kTwoShot = 2,    // Reduce-scatter and all-gather through peer memory.
  kNcclExact = 3,  // The two-shot over NCCL, summed in rank order.
  kNccl = 4,       // ncclAllReduce and the epilogue.
  kReference = 5,  // Plain loops on the CPU: the oracle.
};
NARROWFLOAT_API std::string_view name(AllReduceAlgorithm algorithm);

// A problem says what is computed. All ranks of a call give the same one.
struct AllReduceProblem {
  int64_t tokens = 0;
  int64_t hidden = 0;
  DType element = DType::kBF16;  // F16, BF16 or F32; the MoE patterns take F16 and BF16.
  AllReducePattern pattern = AllReducePattern::kAllReduce;
  // The MoE patterns: whether the norm is quantized. Other patterns: kNone.
  AllReduceQuantization moe_quantization = AllReduceQuantization::kNone;
  // Block scales of NVFP4, MXFP4 and MXFP8.
  ScaleLayoutId scale_layout = ScaleLayoutId::kSwizzled128x4;
  int group = 0;  // kFp8Group: 16, 32, 64, 128 or 256 columns.
  AllReduceAccumulation accumulation = AllReduceAccumulation::kFp32;
  AllReduceExactness exactness = AllReduceExactness::kExact;
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::kAuto;

  friend bool operator==(const AllReduceProblem&, const AllReduceProblem&) = default;
};
NARROWFLOAT_API std::string to_string(const AllReduceProblem& problem);

// The quantization of a problem's pattern, or its moe_quantization.
NARROWFLOAT_API AllReduceQuantization quantization_of(const AllReduceProblem& problem);

// When dependents of a programmatic launch may start (Stream::programmatic_launch).
// kAfterPush: the caller asserts that every later kernel on the stream that could reach the
// workspace, or read the outputs, waits for this one.
enum class AllReduceTrigger : int { kAtEnd = 0, kAfterPush = 1 };

// The MoE patterns' inputs. E is the problem's element type.
struct AllReduceMoe {
  // kMoeReduction: a = +0; a = fma(expert_rows[x], expert_scales[x], a) for x ascending; then
  // + token_input.
  TensorView expert_rows;    // E [experts, tokens, hidden]
  TensorView expert_scales;  // F32 [experts, tokens]
  TensorView num_experts;    // Optional, I32 [1] on the device: how many of them are active.
  TensorView token_input;    // E [tokens, hidden]: the shared expert, added once.

  // kMoeFinalize: a = +0; a = fma(weight, row, a) for slots ascending; * routed_scaling unless it
  // is 1; + shared_expert. An index outside [-1, rows) counts as -1 and sets the error of the
  // workspace.
  TensorView permuted_rows;  // E [rows, hidden]
  TensorView slot_to_row;    // I32 [tokens, top_k]; -1: not on this rank.
  TensorView slot_weights;   // F32 or E [tokens, top_k]; absent: 1.
  TensorView shared_expert;  // Optional, E [tokens, hidden].
  float routed_scaling = 1.0F;
};

// The tensors of one rank. Absent views are not wanted; all tensors are dense and lie on the
// workspace's device. input may be the same memory as any output of its shape, residual_out the
// same as residual_in; nothing else overlaps.
struct AllReduceArgs {
  TensorView input;        // E [tokens, hidden]: this rank's partial sums. Absent for MoE patterns.
  TensorView residual_in;  // E [tokens, hidden]: all patterns but kAllReduce.
  TensorView gamma;        // E [hidden]: the weight of the norm.
  TensorView ar_out;       // E [tokens, hidden]: kAllReduce; optional for the MoE patterns.
  TensorView residual_out;  // E [tokens, hidden]: required with a norm; optional for MoE patterns.
  TensorView norm_out;      // E [tokens, hidden]: the patterns that store it; optional for MoE.
  TensorView quant_out;     // F8_E4M3 or U8 [tokens, hidden], or U8 or F4 [tokens, hidden / 2].
  // NVFP4, MXFP4, MXFP8: U8 or the scale type, scale_layout's padded bytes. FP8 blocks: F32
  // [tokens, ceil(hidden / 128)]. FP8 token: F32 [tokens]. FP8 group: I32, the exponents of groups
  // 4c to 4c + 3 of token t in word c * align(tokens, 4) + t; the last column may end after
  // `tokens` words.
  TensorView scale_out;
  TensorView row_scale_out;  // kNvfp4PerToken: F32 [tokens].
  // kFp8Tensor: the decode scale; kNvfp4: the encode scale, usually 448 * 6 / amax. F32 [1] on the
  // device of the workspace, so that graphs see its present value.
  TensorView global_scale;
  float eps = 1e-6F;
  float weight_bias = 0.0F;  // 0, or 1 for norms that scale by 1 + gamma (Gemma).
  AllReduceMoe moe;
  AllReduceTrigger trigger = AllReduceTrigger::kAtEnd;
};

// How peers reach each other's memory.
enum class AllReduceTransport : int {
  kAuto = 0,
  kThreads = 1,       // Ranks are threads of this process, on the CPU.
  kSharedMemory = 2,  // POSIX shared memory, on the CPU.
  kCudaIpc = 3,
  kCudaVmm = 4,  // Virtual memory management, handles passed as file descriptors.
  kVirtual = 5,  // All ranks on one GPU, in this process.
  kNone = 6,     // No peer memory: NCCL alone.
};
NARROWFLOAT_API std::string_view name(AllReduceTransport transport);

// Which calls compare their problem over the bootstrap before anything is launched. Ranks that
// disagree all throw kInvalidArgument.
enum class AllReduceAgreement : int { kFirstCall = 0, kEveryCall = 1, kNever = 2 };

struct AllReduceWorkspaceOptions {
  Device device;
  DType element = DType::kBF16;  // F16 and BF16 share workspaces; F32 needs one of its own.
  // Largest message of one rank (tokens * hidden * bytes of an element) that the one-shot and the
  // two-shot take, up to 4 and 16 GiB; 0: the defaults of default_allreduce_capacities().
  int64_t oneshot_bytes = 0;
  int64_t twoshot_bytes = 0;
  // Largest message that the NCCL algorithms take; 0: twoshot_bytes. Needs twice as much memory.
  int64_t nccl_bytes = 0;
  bool use_nccl = true;  // GPUs: loads NCCL if it is found.
  AllReduceTransport transport = AllReduceTransport::kAuto;
  // Bounds each wait for a peer, but for those of NCCL's kernels; 0: no bound.
  std::chrono::milliseconds deadline{30'000};
  AllReduceAgreement agreement = AllReduceAgreement::kFirstCall;
};

// Ranks of a workspace with peer memory.
inline constexpr int kMostAllReduceRanks = 8;

struct AllReduceCapacities {
  int64_t oneshot_bytes = 0;
  int64_t twoshot_bytes = 0;
};
// 2 ranks: 2 MiB and 32 MiB; up to 4: 256 KiB and 32 MiB; up to 8: 128 KiB and 32 MiB (the docs
// say why).
NARROWFLOAT_API AllReduceCapacities default_allreduce_capacities(int ranks);

// Peer-visible bytes that a workspace allocates on each rank. Throws kInvalidArgument for ranks
// outside 1 to 8, and capacities below 0 or beyond 4 GiB (one-shot) and 16 GiB (two-shot).
NARROWFLOAT_API int64_t allreduce_workspace_bytes(int ranks, const AllReduceCapacities& capacities);

// One rank's workspace: peer memory, control words and the engines. Calls on one workspace must
// not overlap: use one stream, or order streams by events. Use one workspace for each group and
// pipeline stage.
class NARROWFLOAT_API AllReduceWorkspace {
 public:
  // Collective over the bootstrap's ranks; the workspace keeps the bootstrap alive. Throws on all
  // ranks if one fails or if options differ. More than 8 ranks, and GPUs that cannot reach each
  // other's memory, run by NCCL alone.
  static AllReduceWorkspace create(std::shared_ptr<Bootstrap> bootstrap,
                                   const AllReduceWorkspaceOptions& options);
  // `ranks` workspaces of one process: threads on the CPU, or virtual ranks of one GPU. On a GPU
  // the calls of all ranks must be in flight together: use allreduce_virtual_ranks(), or a stream
  // for each.
  static std::vector<AllReduceWorkspace> create_local(int ranks,
                                                      const AllReduceWorkspaceOptions& options);

  AllReduceWorkspace(AllReduceWorkspace&&) noexcept;
  AllReduceWorkspace& operator=(AllReduceWorkspace&&) noexcept;
  AllReduceWorkspace(const AllReduceWorkspace&) = delete;
  AllReduceWorkspace& operator=(const AllReduceWorkspace&) = delete;
  // Frees without waiting for other ranks; call destroy() first where they may still run.
  ~AllReduceWorkspace();

  [[nodiscard]] int rank() const;
  [[nodiscard]] int ranks() const;
  [[nodiscard]] Device device() const;
  [[nodiscard]] AllReduceTransport transport() const;
  [[nodiscard]] AllReduceCapacities capacities() const;
  [[nodiscard]] int64_t nccl_bytes() const;  // 0 without NCCL.
  // Whether calls of these sizes run, by any algorithm. No side effects.
  [[nodiscard]] bool fits(int64_t tokens, int64_t hidden, DType element) const;

  // Throws kDevice if a call has failed: a peer was late or dead, or an index was out of range. On
  // a GPU, synchronize with the stream first. The workspace then refuses calls until reset().
  void check_error() const;
  // Collective: clears all buffers, control words and the error.
  void reset();
  // Collective: waits for all ranks, then frees. The object is empty afterwards.
  void destroy();

  class Impl;  // Internal.
  [[nodiscard]] Impl& impl() const;

 private:
  explicit AllReduceWorkspace(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Checks everything that the host can know, then queues the operation on `stream` (on the CPU:
// returns when it is done). Returns the algorithm that runs it. Allocates no device memory and
// never waits for a GPU; can be captured into a graph. tokens = 0 does nothing and leaves the
// protocol's state alone. A failed check leaves it alone too. One rank runs the epilogue alone.
// Throws kInvalidArgument, kUnsupported (no algorithm takes the problem; the message lists each
// with its reason), or kDevice (an earlier call on this workspace failed).
NARROWFLOAT_API AllReduceAlgorithm allreduce(AllReduceWorkspace& workspace,
                                             const AllReduceProblem& problem,
                                             const AllReduceArgs& args, Stream stream = {});

// Runs all virtual ranks of a GPU in one launch, for tests and measurements on one GPU; args has
// one entry for each workspace of create_local(). CPU ranks run in threads.
NARROWFLOAT_API AllReduceAlgorithm allreduce_virtual_ranks(std::span<AllReduceWorkspace> workspaces,
                                                           const AllReduceProblem& problem,
                                                           std::span<const AllReduceArgs> args,
                                                           Stream stream = {});

// Describes a workspace and a call, so that explain_allreduce() needs neither.
struct AllReduceExplainRequest {
  int ranks = 2;
  Device device;
  AllReduceProblem problem;
  bool has_peer_memory = true;
  bool has_nccl = true;
  AllReduceCapacities capacities;  // Zeros: the defaults.
  int64_t nccl_bytes = 0;          // 0: the two-shot's capacity.
};
NARROWFLOAT_API Explanation explain_allreduce(const AllReduceExplainRequest& request);

// nccl_info() and gpu_links() say what the machine offers, for `doctor` and bug reports.
struct NcclInfo {
  bool found = false;
  std::string version;  // "2.28.9"
  std::string path;     // File that the loader found.
  std::string reason;   // Why not.
};
NARROWFLOAT_API NcclInfo nccl_info();

struct GpuLink {
  int from = 0;
  int to = 0;
  bool peer_access = false;
  bool native_atomics = false;
  int performance_rank = 0;  // cudaDevP2PAttrPerformanceRank: 0 is the best of this machine.
};
// Every ordered pair of GPUs. Empty without CUDA or with fewer than two GPUs.
NARROWFLOAT_API std::vector<GpuLink> gpu_links();

}  // namespace narrowfloat
