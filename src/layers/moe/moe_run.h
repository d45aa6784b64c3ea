// One run of a prepared layer: the stages, in the order of moe spec 6.1, over one workspace.
#pragma once

#include "base/words_to_clear.h"
#include "layers/moe/moe_checks.h"
#include "layers/moe/prepared_moe.h"
#include "tensor/decoded_rows.h"

namespace narrowfloat {

class MoeRun {
 public:
  // `call` was checked. Allocates nothing.
  MoeRun(const PreparedMoe& layer, const MoeWorkspace& plan, const MoeCall& call, Stream stream);
  // The stages up to `last`.
  void run(MoeStage last);

 private:
  // With few tokens: the next two, and the rows that are coded once each, in one launch. False
  // where that is not possible, with nothing queued.
  [[nodiscard]] bool begin_jointly();
  void route_tokens();
  void permute_slots();
  // Rows of the first GEMM: one for each token, or one for each slot at the slot's row.
  struct InputRows {
    CodedRows rows;
    bool by_token = true;
    bool is_decoded = false;  // In the first GEMM's workspace.
  };
  [[nodiscard]] InputRows coded_input();
  // Plain rows are coded; by token: not for each expert that reads them.
  [[nodiscard]] bool codes_input() const;
  [[nodiscard]] bool codes_by_token() const;
  [[nodiscard]] CodedRows coded_rows() const;
  // Where the GEMMs take quantized rows as bf16 from, if they do.
  [[nodiscard]] DecodedRows decoded_input() const;
  // Those that a fused activation, and what codes its rows as a whole, leave for the second GEMM.
  [[nodiscard]] DecodedRows left_intermediate() const;
  void multiply_first(const InputRows& input);
  // What is left to do of the activation.
  void activate_rows();
  void activate_apart();
  [[nodiscard]] GemmActivation fused_activation() const;
  void multiply_second();
  void combine_slots();

  [[nodiscard]] RouteOutputs route_outputs() const;
  [[nodiscard]] std::byte* at(int64_t offset) const;
  [[nodiscard]] TensorView first_workspace() const;
  [[nodiscard]] TensorView second_workspace() const;
  // Of the GEMMs on a GPU: cleared with the permutation.
  [[nodiscard]] WordsToClear counters() const;
  [[nodiscard]] uint32_t* counter(int64_t gemm) const;
  // `requested`, or workspace of the same shape where the caller did not ask for it.
  [[nodiscard]] TensorView output_or(const TensorView& requested, int64_t offset,
                                     DType dtype) const;

  const PreparedMoe& layer_;
  const MoeWorkspace& plan_;
  const MoeCall& call_;
  Stream stream_;
  TensorView ids_;
  TensorView weights_;
  Permutation permutation_;
  TensorView fc1_;          // With a fused activation bf16 rows that are coded, or nothing.
  CodedRows intermediate_;  // The rows of the second GEMM.
  TensorView slot_rows_;
};

}  // namespace narrowfloat
