// Made-up weights, activations and logits, the same on every run, and their way to the memory of a
// machine. Codes and scales are drawn directly; the scales of blocks are random and differ, so that
// a wrong scale index shows (moe spec 13.5).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "cli_common/host_memory.h"
#include "cli_common/timing/machine.h"
#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

// A tensor of codes or of byte scales, which are most of a layer: nothing but random words.
struct RandomTensor {
  WeightView MoeWeights::*weight;
  bool is_scales = false;  // Otherwise these are the values.
  uint64_t size_bytes = 0;
  RandomWords words;

  [[nodiscard]] void*& data(MoeWeights& weights) const {
    return is_scales ? (weights.*weight).scales.data : (weights.*weight).values.data;
  }
  [[nodiscard]] Device& device(MoeWeights& weights) const {
    return is_scales ? (weights.*weight).scales.device : (weights.*weight).values.device;
  }
};

// Weights that keep values of size 1 at size 1. Owns what weights() views. Until fill(), the
// tensors() have no memory: a device makes them itself.
class RandomWeights {
 public:
  // Weights of local experts `experts` only, one after another: the same as in the layer with all
  // of them.
  RandomWeights(const MoeConfig& config, bool has_bias,
                std::optional<std::vector<int32_t>> experts = {});
  // One matrix of each of these experts, as w1.
  RandomWeights(MoeMode mode, int64_t rows, int64_t cols, std::vector<int32_t> experts);
  // Rows of activations, each an expert of one row.
  RandomWeights(RowFormat format, int64_t cols, std::vector<int32_t> rows);

  void fill();  // In host memory.
  [[nodiscard]] const std::vector<RandomTensor>& tensors() const { return tensors_; }
  [[nodiscard]] const MoeWeights& weights() const { return weights_; }
  // The bytes of codes and block scales.
  [[nodiscard]] static double bytes(const MoeConfig& config);

  struct Storage;  // The elements and block scales of a format in memory.

 private:
  struct Matrix {
    int64_t rows, cols;
    uint64_t seed;
  };

  std::byte* add_buffer(uint64_t size_bytes);
  float* add_floats(int64_t count);
  float* add_per_expert(int64_t count, const std::function<float(uint64_t)>& value);
  void add_weight(const Storage& storage, WeightView MoeWeights::*member, const Matrix& matrix);
  PerExpert add_factors(float base, uint64_t seed);
  TensorView add_bias(int64_t rows, uint64_t seed);
  void add_global_factors(const MoeConfig& config);

  std::vector<int32_t> experts_;
  MoeWeights weights_;
  std::vector<RandomTensor> tensors_;
  // This memory is not cleared first: weights may be most of what there is.
  std::vector<std::unique_ptr<std::byte[]>> buffers_;
};

// Tensors on their way to the memory of a machine: those that are there already stay, the others
// are copied, and random ones are made there.
class Transfer {
 public:
  explicit Transfer(Machine& machine) : machine_(machine) {}

  void add(TensorView& view);
  void add(ScaleView& view);
  void add(PerExpert& given) { add(given.values); }
  // Reserves memory that nothing is copied to.
  void add_buffer(std::byte*& data, uint64_t size_bytes) {
    buffers_.push_back({&data, size_bytes});
  }

  // Lets the machine make a tensor itself.
  void add(const RandomTensor& tensor, MoeWeights& weights);

  // Places everything; the views then are views of it.
  void send();

 private:
  struct Copy {
    void** data;
    uint64_t size_bytes;
    Device* device;
  };
  struct Made {
    void** data;
    uint64_t size_bytes;
    Device* device;
    const RandomWords* words;
  };
  struct Buffer {
    std::byte** data;
    uint64_t size_bytes;
  };
  void add(void*& data, uint64_t size_bytes, Device* device) {
    if (data == nullptr || *device == machine_.device()) return;
    copies_.push_back({&data, size_bytes, device});
  }

  Machine& machine_;
  std::vector<Copy> copies_;
  std::vector<Made> made_;
  std::vector<Buffer> buffers_;
};

// Values that are about normal with variance 1.
std::vector<float> random_normal(size_t count, uint64_t seed);

// Logits [T, E] whose best experts are all equally likely, or (`exponent` above 0) fall off with
// their rank as 1 / rank^exponent: Gumbel noise on the logarithms.
std::vector<float> random_logits(int64_t tokens, int64_t experts, double exponent, uint64_t seed);

}  // namespace narrowfloat::cli
