// Made-up weights, activations and routing for `narrowfloat moe bench`, the same on every run.
// Codes and scales are drawn directly; the scales of blocks are random and differ, so that a wrong
// scale index shows (moe spec 13.5).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

// Weights that keep values of size 1 at size 1. Owns what weights() views.
class RandomWeights {
 public:
  RandomWeights(const MoeConfig& config, bool has_bias);

  [[nodiscard]] const MoeWeights& weights() const { return weights_; }
  [[nodiscard]] static double bytes(const MoeConfig& config);  // Of codes and block scales.

 private:
  // Memory that is not cleared first: weights may be most of what there is.
  struct Buffer {
    std::unique_ptr<std::byte[]> data;
    size_t size = 0;
  };

  std::byte* add_buffer(int64_t size_bytes);
  WeightView add_weight(const MoeConfig& config, int64_t rows, int64_t cols, uint64_t seed);
  PerExpert add_factors(const MoeConfig& config, float base, uint64_t seed);
  TensorView add_bias(const MoeConfig& config, int64_t rows, uint64_t seed);
  void add_global_factors(const MoeConfig& config);

  MoeWeights weights_;
  std::vector<Buffer> buffers_;
};

// About normal with variance 1.
std::vector<float> random_normal(size_t count, uint64_t seed);

// Logits [T, E] whose best experts are all equally likely, or (`exponent` above 0) fall off with
// their rank as 1 / rank^exponent: Gumbel noise on the logarithms.
std::vector<float> random_logits(int64_t tokens, int64_t experts, double exponent, uint64_t seed);

}  // namespace narrowfloat::cli
