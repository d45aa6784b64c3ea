// The tensors of an all-reduce call: what one rank gives and gets, made from the problem alone, so
// that every process makes the same inputs and any of them can compute what all ranks must get. The
// residual is equal on all ranks, as in a model, so the outputs are as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli_common/host_memory.h"
#include "cli_common/timing/machine.h"
#include "narrowfloat/allreduce.h"

namespace narrowfloat::cli {

struct RankTensor {
  std::string name;
  TensorView view;                              // Its data are those of a call.
  TensorView AllReduceArgs::*member = nullptr;  // Where a call takes it: one of these two.
  TensorView AllReduceMoe::*moe_member = nullptr;
  bool is_output = false;
  // Contents of an input: bytes made on the host, or random words, each of the equal parts from its
  // own seed. A problem with fewer tokens has the first rows of each part.
  std::vector<std::byte> content;
  RandomWords words;
  int64_t parts = 1;

  [[nodiscard]] uint64_t size_bytes() const;
};

// Bytes that one rank reads and writes in a call. Tensors come from memory; the exchange is what
// the ranks store to each other's workspaces and load again.
struct RankTraffic {
  uint64_t read_bytes = 0;
  uint64_t write_bytes = 0;
  uint64_t exchange_read_bytes = 0;
  uint64_t exchange_write_bytes = 0;

  [[nodiscard]] uint64_t total() const {
    return read_bytes + write_bytes + exchange_read_bytes + exchange_write_bytes;
  }
};

class RankTensors {
 public:
  // Throws kInvalidArgument for a problem that no all-reduce takes.
  RankTensors(const AllReduceProblem& problem, int ranks, int rank);

  [[nodiscard]] const std::vector<RankTensor>& all() const { return tensors_; }
  // Inputs come first, then outputs, each aligned to kBufferAlignment.
  [[nodiscard]] uint64_t input_bytes() const { return input_bytes_; }
  [[nodiscard]] uint64_t output_bytes() const { return output_bytes_; }
  [[nodiscard]] uint64_t offset(size_t tensor) const { return offsets_[tensor]; }

  // The arguments of a call on a copy that begins at `inputs` and `outputs`.
  [[nodiscard]] AllReduceArgs args(std::byte* inputs, std::byte* outputs, Device device) const;
  void fill_inputs(Machine& machine, std::byte* inputs) const;
  [[nodiscard]] RankTraffic traffic(AllReduceAlgorithm algorithm) const;
  // Returns the first difference between the outputs and those that are expected; empty without
  // one.
  [[nodiscard]] std::string difference(const std::byte* got, const std::byte* expected) const;
  // The same for NCCL's own sum, whose order is not defined: the first output of the element type
  // must be as near as sums in any order are; the others follow from it.
  [[nodiscard]] std::string distance(const std::byte* got, const std::byte* expected) const;
  // Whether the first row of the outputs that have rows is that of another problem's outputs.
  [[nodiscard]] bool has_first_row_of(const std::byte* outputs, const RankTensors& other,
                                      const std::byte* others) const;

 private:
  void add_words(std::string_view name, TensorView AllReduceArgs::*member, TensorView view,
                 int seed);
  void add_moe_words(std::string_view name, TensorView AllReduceMoe::*member, TensorView view,
                     int seed, int64_t parts);
  void add_content(std::string_view name, TensorView view, std::vector<std::byte> content);
  void add_output(std::string_view name, TensorView AllReduceArgs::*member, TensorView view);
  void add_moe_inputs(int rank);
  void add_outputs();
  void add_quantized();
  void place();

  AllReduceProblem problem_;
  int ranks_;
  std::vector<RankTensor> tensors_;
  std::vector<uint64_t> offsets_;
  uint64_t input_bytes_ = 0;
  uint64_t output_bytes_ = 0;
};

int64_t message_bytes(const AllReduceProblem& problem);
// Patterns whose outputs have block scales in a layout.
bool has_layouts(AllReduceQuantization quantization);

// The outputs of one rank, as RankTensors places them, from plain loops on the CPU.
std::vector<std::byte> reference_outputs(const AllReduceProblem& problem, int ranks);

}  // namespace narrowfloat::cli
