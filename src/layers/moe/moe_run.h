// One run of a prepared layer: the stages, in the order of moe spec 6.1, over one workspace.
#pragma once

#include "layers/moe/moe_checks.h"
#include "layers/moe/prepared_moe.h"

namespace narrowfloat {

class MoeRun {
 public:
  // `call` was checked. Allocates nothing.
  MoeRun(const PreparedMoe& layer, const MoeWorkspace& plan, const MoeCall& call, Stream stream);
  // The stages up to `last`.
  void run(MoeStage last);

 private:
  void route_tokens();
  void permute_slots();
  // Rows of the first GEMM: one for each token, or one for each slot at the slot's row.
  struct InputRows {
    CodedRows rows;
    bool by_token = true;
  };
  [[nodiscard]] InputRows coded_input();
  void multiply_first(const InputRows& input);
  [[nodiscard]] CodedRows activate_rows();
  void multiply_second(const CodedRows& intermediate);
  void combine_slots();

  [[nodiscard]] std::byte* at(int64_t offset) const;
  [[nodiscard]] TensorView gemm_workspace() const;
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
  TensorView fc1_;
  TensorView slot_rows_;
};

}  // namespace narrowfloat
