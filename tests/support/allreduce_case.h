// The tensors of an all-reduce call of several ranks, filled and poisoned, on the host or on a
// device. Two cases of the same description have the same inputs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "narrowfloat/allreduce.h"
#include "support/device_copies.h"
#include "support/fills.h"
#include "support/guarded_buffer.h"

namespace narrowfloat::testing {

struct AllReduceCaseSpec {
  AllReduceProblem problem;
  int ranks = 2;
  uint64_t seed = 1;
  Fill fill = Fill::kNormal;
  uint8_t poison = 0xCC;
  bool is_in_place = false;  // ar_out, or residual_out, is the memory of its input.
  float weight_bias = 0.0F;
  // MoE patterns.
  bool has_element_weights = false;  // Else fp32.
  bool has_shared_expert = true;
  bool has_all_outputs = true;  // Else residual_out alone, or the quantized ones.
};
std::string to_string(const AllReduceCaseSpec& spec);

class AllReduceCase {
 public:
  explicit AllReduceCase(const AllReduceCaseSpec& spec);
  ~AllReduceCase();
  AllReduceCase(AllReduceCase&&) noexcept;
  AllReduceCase(const AllReduceCase&) = delete;
  AllReduceCase& operator=(const AllReduceCase&) = delete;

  [[nodiscard]] const AllReduceCaseSpec& spec() const { return spec_; }
  [[nodiscard]] AllReduceArgs args(int rank) const;
  // The same for copies of buffers().
  [[nodiscard]] AllReduceArgs args(int rank, const DeviceCopies& copies) const;
  [[nodiscard]] std::vector<AllReduceArgs> all_args() const;
  [[nodiscard]] std::vector<AllReduceArgs> all_args(const DeviceCopies& copies) const;
  [[nodiscard]] Buffers buffers() const;  // All ranks'.

  struct Output {
    std::string name;
    std::vector<uint8_t> bytes;
  };
  [[nodiscard]] std::vector<Output> outputs(int rank) const;
  [[nodiscard]] bool intact() const;
  // Poisons the outputs and fills the inputs with another seed.
  void refill(uint64_t seed);

 private:
  struct Rank;
  AllReduceCaseSpec spec_;
  std::vector<Rank> ranks_;
};

// Expects equal bytes of every output of every rank.
void expect_same_outputs(const AllReduceCase& expected, const AllReduceCase& actual);

}  // namespace narrowfloat::testing
