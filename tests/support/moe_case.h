// Random Mixture-of-Experts layers for tests: weights with an independent scale in every block
// (moe spec 13.5), inputs, logits, and runs in guarded, poisoned memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/moe.h"
#include "support/guarded_buffer.h"
#include "support/moe_modes.h"
#include "support/random.h"

namespace narrowfloat::testing {

struct MoeShape {
  int64_t tokens = 7;
  int64_t hidden = 256;
  int64_t inter = 128;
  int32_t experts = 8;
  int32_t top_k = 2;
  int32_t shared_experts = 0;
};

// Bytes of every output, for comparisons.
struct MoeResult {
  std::vector<uint8_t> out;
  std::vector<uint8_t> slot_rows;  // Slots without a row are zero.
  std::vector<uint8_t> expert_weights;
  std::vector<uint8_t> topk_ids;
  std::vector<uint8_t> slot_to_row;
  bool operator==(const MoeResult&) const = default;
};

struct MoeRunStyle {
  uint8_t poison = 0xFF;  // Poison of workspace and outputs.
  Guard guard = Guard::kCanary;
};

// The experts [offset, offset + count) of `weights` alone, as another rank holds them.
MoeWeights expert_range(const MoeWeights& weights, int32_t offset, int32_t count);

class MoeCase {
 public:
  // Fills a layer of `mode`; everything about `config()` may be changed before prepare(), except
  // mode, activation kind and extents.
  MoeCase(MoeMode mode, const MoeShape& shape, const Activation& activation, uint64_t seed);

  MoeCase(const MoeCase&) = delete;  // Its views point into itself.
  MoeCase& operator=(const MoeCase&) = delete;

  [[nodiscard]] const MoeShape& shape() const { return shape_; }
  MoeConfig& config() { return config_; }
  [[nodiscard]] const MoeConfig& config() const { return config_; }
  MoeWeights& weights() { return weights_; }
  MoeInputs& inputs() { return inputs_; }
  Routing& routing() { return routing_; }
  [[nodiscard]] std::vector<float>& logits() { return logits_; }
  [[nodiscard]] std::vector<uint16_t>& x() { return x_; }  // bf16 [tokens, hidden]
  // The router's correction bias, for methods that read it.
  void add_router_bias();
  // FC1 and FC2 biases.
  void add_biases();
  // Alpha, beta and limits that differ between experts, where the activation reads them.
  void add_per_expert_parameters();
  [[nodiscard]] MoeWeights shard(int32_t offset, int32_t count) const {
    return expert_range(weights_, offset, count);
  }

  [[nodiscard]] MoeLayer prepare() const { return MoeLayer::prepare(weights_, config_); }
  [[nodiscard]] MoeLayer prepare_reference(const MoeReferenceOptions& options) const {
    return MoeLayer::prepare_reference(weights_, config_, options);
  }
  // Everything the layer can return. Expects that the guards stay intact.
  MoeResult run(const MoeLayer& layer, const MoeRunStyle& style = {}) const;
  MoeResult run() const { return run(prepare()); }
  MoeResult run_reference(const MoeReferenceOptions& options) const {
    return run(prepare_reference(options));
  }

 private:
  void fill_weight(WeightView& view, int64_t rows, int64_t cols, Random& random);
  void fill_scales(WeightView& view, int64_t rows, int64_t cols, Random& random);
  float* floats(int64_t count);
  PerExpert factors(float base, Random& random);

  MoeShape shape_;
  MoeConfig config_;
  MoeWeights weights_;
  MoeInputs inputs_;
  Routing routing_;
  std::vector<uint16_t> x_;
  std::vector<float> logits_;
  std::vector<std::vector<uint8_t>> storage_;
  uint64_t seed_;
};

// Relative distance in the Frobenius norm, and the largest of a row whose reference is not zero
// (moe spec 12.1). Rows whose reference is zero must be zero.
struct Distance {
  double rel = 0;
  double row = 0;
};
Distance distance(const std::vector<float>& a, const std::vector<float>& reference, int64_t cols);

// out of `dtype` as fp32.
std::vector<float> as_floats(const std::vector<uint8_t>& bytes, DType dtype);

// Value of NARROWFLOAT_FORCE's form that pins every operation of the layer to `implementation`.
std::string force_moe(std::string_view implementation);

}  // namespace narrowfloat::testing
