// One run of a prepared layer: the stages of its plan over one workspace (moe spec 6.1).
#pragma once

#include "layers/moe/moe_checks.h"
#include "layers/moe/prepared_moe.h"
#include "moe_shared/dequantized_rows.h"
#include "moe_shared/words_to_clear.h"
#include "ops/route/route_permute.h"
#include "runtime/cuda/kernel_chain.h"

namespace narrowfloat {

class MoeRun {
 public:
  // `call` has passed the checks. `plan` is the layer's plan for its tokens; the run lists its
  // stages. Allocates nothing.
  MoeRun(const PreparedMoe& layer, const MoePlan& plan, const MoeCall& call, Stream stream);
  // Runs the stages up to `last`.
  void run(MoeStage last);

 private:
  void run_stage(MoePlanStageKind kind);
  void route_and_permute_slots();
  void route_tokens();
  void permute_slots();
  void quantize_input();
  void multiply_first();
  void quantize_fc1();
  void activate_rows();
  void quantize_intermediate();
  void multiply_second();
  void combine_slots();

  // Unquantized rows are quantized once for each token, not for each expert that reads them.
  [[nodiscard]] bool quantizes_by_token() const;
  [[nodiscard]] CodedRows quantized_input() const;
  // The place from which a GEMM takes quantized rows as bf16, if it does.
  [[nodiscard]] DequantizedRows dequantized_input() const;
  [[nodiscard]] DequantizedRows dequantized_intermediate() const;
  [[nodiscard]] GemmActivation fused_activation() const;
  [[nodiscard]] RouteOutputs route_outputs() const;
  [[nodiscard]] RoutePermuteArgs route_permute_args() const;

  [[nodiscard]] std::byte* at(MoeBufferId id) const;
  [[nodiscard]] TensorView scratch(MoeBufferId id) const;
  // The tile counters of the GEMMs on a GPU, which the permutation clears.
  [[nodiscard]] WordsToClear counters() const;
  [[nodiscard]] uint32_t* counter(int64_t gemm) const;
  // Returns `requested`, or workspace of the same shape if the caller did not ask for it.
  [[nodiscard]] TensorView output_or(const TensorView& requested, MoeBufferId id,
                                     DType dtype) const;

  const PreparedMoe& layer_;
  MoePlan plan_;
  const MoeCall& call_;
  Stream stream_;
  KernelChain chain_;
  TensorView ids_;
  TensorView weights_;
  Permutation permutation_;
  RoutePermuteArgs route_permute_;  // Empty on a CPU.
  // The rows of the first GEMM: one for each token, or one for each slot, at the row of the slot.
  CodedRows input_;
  bool input_by_token_ = true;
  bool input_is_dequantized_ = false;  // They are also in the scratch of the first GEMM, as bf16.
  TensorView fc1_;                     // bf16 rows, or nothing, with a fused activation.
  CodedRows fc1_quantized_;
  CodedRows intermediate_;  // The rows of the second GEMM.
  TensorView slot_rows_;
};

}  // namespace narrowfloat
