// The fused Mixture-of-Experts layer: route, permute, first GEMM, activation, second GEMM, combine
// (FlashInfer's finalize; moe spec 1, 6). Prepared once, run many times.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/activation.h"
#include "narrowfloat/combine.h"
#include "narrowfloat/export.h"
#include "narrowfloat/gemm.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/permute.h"
#include "narrowfloat/route.h"
#include "narrowfloat/runtime.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

struct MoeConfig {
  int64_t hidden = 0;  // H
  int64_t inter = 0;   // I: the width of this rank's experts, after gating.
  RoutingConfig routing;
  // Expert parallelism: routed experts [expert_offset, expert_offset + local_experts) are here.
  int32_t expert_offset = 0;
  int32_t local_experts = 0;  // EL; all experts where S > 0.

  MoeMode mode = MoeMode::kBf16;
  GateOrder gate_order = GateOrder::kUpGate;
  Activation activation;
  // Llama-4: the routing weight multiplies the rows of the first GEMM, and combine uses 1; k must
  // be 1.
  bool weight_on_input = false;
  bool add_fc2_bias = true;           // Tensor parallelism: true on exactly one rank.
  DType out_dtype = DType::kBF16;     // BF16, F16 or F32.
  DType slot_dtype = DType::kBF16;    // Type of one slot's result: BF16 or F32.
  std::optional<int32_t> token_tile;  // A power of two; default: default_token_tile.
  // On a CPU: the GEMMs have Accumulation::kFast. GPUs, and references, ignore it.
  bool fast_sums = false;
};

// Options of a reference beside its configuration, on the CPU alone (prepare_reference()).
struct MoeReferenceOptions {
  Accumulation accumulation = Accumulation::kFp32;
  bool fp32_rows = false;  // Modes with bf16 rows: input and intermediate stay fp32.
  // kFp8Block: the result of the first GEMM is quantized to 1x128 as well, as in pipelines with a
  // separate activation kernel (spec 6.5).
  bool double_quantize_fc1 = false;
};

// Canonical weights; the first extent is EL + S, shared experts last. Factors that a mode does not
// have stay 1.
struct MoeWeights {
  WeightView w1;  // [EL + S, F1, H]
  WeightView w2;  // [EL + S, H, I]
  // In place of w1 and w2: one expert at a time, first all of w1, so that original and packed
  // weights need not exist together.
  ExpertSource w1_source;
  ExpertSource w2_source;
  // Factors of the halves of w1: global scale of the weights times static scale of the input. Not
  // gated: up_scale alone.
  PerExpert up_scale;
  PerExpert gate_scale;
  PerExpert down_scale;        // Global scale of w2 over inter_multiplier.
  PerExpert inter_multiplier;  // kFp8Tensor, kNvfp4: static quant multiplier of the intermediate.
  // kFp8Tensor, kNvfp4: static quant multiplier of unquantized input rows; absent: rows must come
  // quantized. With a value per expert a token is quantized once for each of its experts.
  std::optional<PerExpert> input_multiplier;
  TensorView bias1;  // F32 or BF16 [EL + S, F1] and [EL + S, H], optional, in real units.
  TensorView bias2;
};

// [T, H] in the mode's input format, or unquantized BF16, F16 or F32 rows that the layer quantizes
// with the bits of quantize() (modes with bf16 rows: BF16, or F32 where a reference has fp32_rows).
using MoeInputs = CodedRows;

// Every member is optional but one of out and slot_out.
struct MoeOutputs {
  TensorView out;             // out_dtype [T, N], N <= H: the last columns are dropped.
  TensorView slot_out;        // slot_dtype [max_rows(T), H]: every slot's result at its row.
  TensorView expert_weights;  // F32 [T, k + S]
  TensorView slot_to_row;     // I32 [T * (k + S)]: where slot_out has a slot; -1: not local.
  TensorView topk_ids;        // I32 [T, k + S]
  TensorView routing_replay;  // I16 [>= T, k]; not with S > 0.
  DeviceErrors* errors = nullptr;
};

// The stages of a run, in execution order. One kernel may do several of them, as chosen by
// implementation and number of tokens; run_up_to() then ends all of these with the first.
enum class MoeStage : int {
  kRoute = 0,
  kPermute = 1,
  kQuantizeInput = 2,  // Unquantized rows, in modes with quantized ones.
  kFirstGemm = 3,
  kActivation = 4,
  kSecondGemm = 5,
  kCombine = 6,
};
NARROWFLOAT_API std::string_view name(MoeStage stage);       // "first_gemm"
NARROWFLOAT_API std::span<const MoeStage> all_moe_stages();  // In their order.

class MoeTuning;  // moe_tuning.h
class TunedTiles;

// Immutable after prepare, cheap to copy; concurrent run() calls with workspaces of their own are
// legal. run() neither allocates nor synchronises. A default-constructed layer is empty: whatever
// reads it throws kInvalidArgument.
class NARROWFLOAT_API MoeLayer {
 public:
  // Copies what it needs. Throws kInvalidArgument for anything that does not fit together.
  static MoeLayer prepare(const MoeWeights& weights, const MoeConfig& config, Device device = {},
                          Stream stream = {});
  // Makes a layer on the CPU that other layers are compared with. Throws as prepare() does, and for
  // options that the mode does not have.
  static MoeLayer prepare_reference(const MoeWeights& weights, const MoeConfig& config,
                                    const MoeReferenceOptions& options);

  // Returns the same layer and weights with the token tiles of a tuning, where it has entries about
  // this layer on this machine. config.token_tile has priority over the tuning, and the tuning over
  // the rule. The tiles determine the places of rows in slot_out, max_rows() and
  // required_workspace(): ask the new layer for them.
  [[nodiscard]] MoeLayer with_tuning(const MoeTuning& tuning) const;

  [[nodiscard]] const MoeConfig& config() const;
  [[nodiscard]] int64_t weight_bytes() const;  // Packed weights of both GEMMs.
  // Bytes for up to `tokens` tokens; never decreases. Formula: docs/moe.md.
  [[nodiscard]] int64_t required_workspace(int64_t tokens) const;
  [[nodiscard]] int32_t token_tile(int64_t tokens) const;
  [[nodiscard]] int64_t max_rows(int64_t tokens) const;  // Rows of slot_out.

  // workspace: U8 [>= required_workspace(T)], aligned to 256 bytes, any contents. The call checks
  // everything that can be decided on the host before it writes anything.
  void run(const MoeInputs& inputs, const Routing& routing, const MoeOutputs& outputs,
           const TensorView& workspace, Stream stream = {}) const;

  // Does what run() does up to stage `last` and ends there, for measurements. Outputs of later
  // stages keep their contents.
  void run_up_to(MoeStage last, const MoeInputs& inputs, const Routing& routing,
                 const MoeOutputs& outputs, const TensorView& workspace, Stream stream = {}) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
  std::shared_ptr<const TunedTiles> tiles_;  // Null: the rule.
};

// Which implementation each stage of a run on `tokens` tokens (from logits) would use, and why the
// others do not: route, permute, quantize_activations (unquantized rows, in modes with quantized
// ones), grouped_gemm (first and second), activation, combine in the order they run; with
// double_quantize_fc1 quantize_activations before the activation too. On a GPU route_permute (the
// fused prologue) is asked first: where it takes the problem it does the first three. Launches
// inside a stage are not listed: docs/kernels/grouped_gemm_sm90.md says which modes dequantize rows
// first. Throws kInvalidArgument for configurations that MoeLayer::prepare refuses.
NARROWFLOAT_API std::vector<Explanation> explain_moe(const MoeConfig& config, int64_t tokens,
                                                     Device device = {});
// Explains a reference layer likewise.
NARROWFLOAT_API std::vector<Explanation> explain_moe_reference(const MoeConfig& config,
                                                               const MoeReferenceOptions& options,
                                                               int64_t tokens);

// The plan of such a run: its stages, and the parts of the workspace that they read and write.
// Input multipliers per expert are a property of the weights, not of a configuration: a layer with
// them needs the larger workspace that MoeLayer::required_workspace tells.
struct MoePlanInfo {
  struct Stage {
    std::string stage;           // "first_gemm"
    std::string op;              // "grouped_gemm"
    std::string implementation;  // Empty if none fits.
    std::vector<std::string> reads;
    std::vector<std::string> writes;
  };
  struct Buffer {
    std::string name;  // "input_rows"
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  std::vector<Stage> stages;
  std::vector<Buffer> buffers;
  int64_t workspace_bytes = 0;
};
NARROWFLOAT_API MoePlanInfo plan_moe(const MoeConfig& config, int64_t tokens, Device device = {});

}  // namespace narrowfloat
