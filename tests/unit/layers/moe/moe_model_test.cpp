// The whole layer against a model in double that is written here from moe spec 4.2, 6.1 and 6.6:
// which expert, half, bias, factor and weight goes where. Rows stay fp32 and sums are fp64, so that
// the bound is a few units of fp32.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "narrowfloat/moe.h"
#include "support/guarded_buffer.h"
#include "support/moe_case.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kModelHidden = 48;
constexpr int64_t kModelInter = 32;
constexpr int32_t kModelExperts = 5;
constexpr double kAlpha = 1.702;
constexpr double kBeta = 1.0;
constexpr double kLimit = 1.25;

struct Variation {
  int64_t tokens = 7;
  int32_t top_k = 2;
  int32_t shared_experts = 0;
  int32_t offset = 0;
  int32_t local_experts = kModelExperts;
  GateOrder order = GateOrder::kUpGate;
  bool weight_on_input = false;
  bool add_fc2_bias = true;
};

class ModelledLayer {
 public:
  explicit ModelledLayer(const Variation& variation) : v_(variation) {
    Random random(17);
    const int64_t experts = local();
    const auto fill = [&](std::vector<float>& values, int64_t count, float scale) {
      for (int64_t i = 0; i < count; ++i) values.push_back(scale * random.normal());
    };
    fill(x_, v_.tokens * kModelHidden, 1.0F);
    fill(logits_, v_.tokens * kModelExperts, 2.0F);
    fill(bias1_, experts * 2 * kModelInter, 0.5F);
    fill(bias2_, experts * kModelHidden, 0.5F);
    for (int64_t e = 0; e < experts; ++e) {
      up_.push_back(0.25F + 0.125F * static_cast<float>(e));
      gate_.push_back(0.5F - 0.0625F * static_cast<float>(e));
      down_.push_back(0.375F + 0.25F * static_cast<float>(e));
    }
    for (int64_t i = 0; i < experts * 2 * kModelInter * kModelHidden; ++i) {
      w1_.push_back(float_to_bf16(random.normal()));
    }
    for (int64_t i = 0; i < experts * kModelHidden * kModelInter; ++i) {
      w2_.push_back(float_to_bf16(random.normal()));
    }
  }

  [[nodiscard]] std::vector<float> run() const {
    const MoeLayer layer = MoeLayer::prepare_reference(
        weights(), config(), {.accumulation = Accumulation::kFp64, .fp32_rows = true});
    const int64_t bytes = layer.required_workspace(v_.tokens);
    const GuardedBuffer workspace(bytes, {.poison = 0xFF, .guard = Guard::kPage});
    std::vector<float> out(static_cast<size_t>(v_.tokens * kModelHidden),
                           std::numeric_limits<float>::quiet_NaN());
    MoeInputs inputs;
    inputs.values = TensorView::contiguous(x_.data(), DType::kF32, {v_.tokens, kModelHidden});
    Routing routing;
    routing.logits =
        TensorView::contiguous(logits_.data(), DType::kF32, {v_.tokens, kModelExperts});
    MoeOutputs outputs;
    outputs.out = TensorView::contiguous(out.data(), DType::kF32, {v_.tokens, kModelHidden});
    layer.run(inputs, routing, outputs,
              TensorView::contiguous(workspace.data(), DType::kU8, {bytes}));
    return out;
  }

  [[nodiscard]] std::vector<float> expected() const {
    std::vector<float> out;
    for (int64_t token = 0; token < v_.tokens; ++token) {
      std::vector<double> sum(kModelHidden, 0.0);
      for (const auto& [expert, weight] : routed(token)) add_slot(token, expert, weight, sum);
      for (const double value : sum) out.push_back(static_cast<float>(value));
    }
    return out;
  }

 private:
  [[nodiscard]] int32_t local() const { return v_.local_experts + v_.shared_experts; }

  // The k largest logits with their softmax, then the shared experts.
  [[nodiscard]] std::vector<std::pair<int32_t, double>> routed(int64_t token) const {
    const float* logits = logits_.data() + token * kModelExperts;
    std::vector<int32_t> ids(kModelExperts);
    std::iota(ids.begin(), ids.end(), 0);
    std::sort(ids.begin(), ids.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    ids.resize(static_cast<size_t>(v_.top_k));
    double sum = 0;
    for (const int32_t id : ids) sum += std::exp(static_cast<double>(logits[id]));
    std::vector<std::pair<int32_t, double>> result;
    for (const int32_t id : ids) {
      result.emplace_back(id, std::exp(static_cast<double>(logits[id])) / sum);
    }
    for (int32_t s = 0; s < v_.shared_experts; ++s) result.emplace_back(kModelExperts + s, 1.0);
    return result;
  }

  // Row of w1 that holds the up or the gate row i.
  [[nodiscard]] int64_t row_of(bool is_gate, int64_t i) const {
    switch (v_.order) {
      case GateOrder::kUpGate:
        return is_gate ? kModelInter + i : i;
      case GateOrder::kGateUp:
        return is_gate ? i : kModelInter + i;
      case GateOrder::kInterleaved:
        return is_gate ? 2 * i : 2 * i + 1;
    }
    return -1;
  }

  [[nodiscard]] double half(int64_t token, int64_t e, bool is_gate, int64_t i,
                            double factor) const {
    const int64_t row = e * 2 * kModelInter + row_of(is_gate, i);
    double sum = 0;
    for (int64_t j = 0; j < kModelHidden; ++j) {
      sum += static_cast<double>(x_[static_cast<size_t>(token * kModelHidden + j)]) *
             static_cast<double>(bf16_to_float(w1_[static_cast<size_t>(row * kModelHidden + j)]));
    }
    const float scale = (is_gate ? gate_ : up_)[static_cast<size_t>(e)];
    return static_cast<double>(scale) * factor * sum +
           static_cast<double>(bias1_[static_cast<size_t>(row)]);
  }

  void add_slot(int64_t token, int32_t expert, double weight, std::vector<double>& out) const {
    const int64_t e = expert - v_.offset;
    if (e < 0 || e >= local()) return;
    const double inside = v_.weight_on_input ? weight : 1.0;
    const double outside = v_.weight_on_input ? 1.0 : weight;
    std::vector<double> h;
    for (int64_t i = 0; i < kModelInter; ++i) {
      const double u = std::clamp(half(token, e, false, i, inside), -kLimit, kLimit);
      const double g = std::min(half(token, e, true, i, inside), kLimit);
      h.push_back(g / (1 + std::exp(-kAlpha * g)) * (u + kBeta));
    }
    for (int64_t o = 0; o < kModelHidden; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < kModelInter; ++i) {
        const auto at = static_cast<size_t>((e * kModelHidden + o) * kModelInter + i);
        sum += h[static_cast<size_t>(i)] * static_cast<double>(bf16_to_float(w2_[at]));
      }
      sum *= static_cast<double>(down_[static_cast<size_t>(e)]);
      if (v_.add_fc2_bias) {
        sum += static_cast<double>(bias2_[static_cast<size_t>(e * kModelHidden + o)]);
      }
      out[static_cast<size_t>(o)] += outside * sum;
    }
  }

  [[nodiscard]] MoeConfig config() const {
    MoeConfig config;
    config.hidden = kModelHidden;
    config.inter = kModelInter;
    config.routing.experts = kModelExperts;
    config.routing.top_k = v_.top_k;
    config.routing.shared_experts = v_.shared_experts;
    config.expert_offset = v_.offset;
    config.local_experts = v_.local_experts;
    config.gate_order = v_.order;
    config.activation = Activation::swiglu_oai(1.702F, 1.0F, 1.25F);
    config.weight_on_input = v_.weight_on_input;
    config.add_fc2_bias = v_.add_fc2_bias;
    config.out_dtype = DType::kF32;
    config.slot_dtype = DType::kF32;
    return config;
  }

  [[nodiscard]] MoeWeights weights() const {
    const int64_t experts = local();
    const auto each = [&](const std::vector<float>& values) {
      return PerExpert(TensorView::contiguous(values.data(), DType::kF32, {experts}));
    };
    MoeWeights weights;
    weights.w1.values =
        TensorView::contiguous(w1_.data(), DType::kBF16, {experts, 2 * kModelInter, kModelHidden});
    weights.w2.values =
        TensorView::contiguous(w2_.data(), DType::kBF16, {experts, kModelHidden, kModelInter});
    weights.up_scale = each(up_);
    weights.gate_scale = each(gate_);
    weights.down_scale = each(down_);
    weights.bias1 = TensorView::contiguous(bias1_.data(), DType::kF32, {experts, 2 * kModelInter});
    weights.bias2 = TensorView::contiguous(bias2_.data(), DType::kF32, {experts, kModelHidden});
    return weights;
  }

  Variation v_;
  std::vector<float> x_, logits_, bias1_, bias2_, up_, gate_, down_;
  std::vector<uint16_t> w1_, w2_;
};

void expect_model(const Variation& variation) {
  const ModelledLayer layer(variation);
  const std::vector<float> out = layer.run();
  for (const float value : out) ASSERT_TRUE(std::isfinite(value));
  const Distance apart = distance(out, layer.expected(), kModelHidden);
  EXPECT_LT(apart.rel, 1e-6);
  EXPECT_LT(apart.row, 1e-5);
}

TEST(MoeModel, HoldsForEveryNumberOfTokens) {
  for (const int64_t tokens : {0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 1000}) {
    SCOPED_TRACE(tokens);
    expect_model({.tokens = tokens});
  }
}

TEST(MoeModel, HoldsForEveryTopK) {
  for (int32_t top_k = 1; top_k <= kModelExperts; ++top_k) {
    SCOPED_TRACE(top_k);
    expect_model({.tokens = 33, .top_k = top_k});
    expect_model({.tokens = 33, .top_k = top_k, .shared_experts = 2});
  }
}

TEST(MoeModel, HoldsForEveryGateOrder) {
  for (const GateOrder order : {GateOrder::kUpGate, GateOrder::kGateUp, GateOrder::kInterleaved}) {
    SCOPED_TRACE(name(order));
    expect_model({.tokens = 20, .order = order});
  }
}

TEST(MoeModel, HoldsForEveryShard) {
  for (int32_t offset = 0; offset < kModelExperts; ++offset) {
    for (int32_t count = 1; count <= kModelExperts - offset; ++count) {
      SCOPED_TRACE(std::to_string(offset) + " + " + std::to_string(count));
      expect_model({.tokens = 20, .offset = offset, .local_experts = count});
    }
  }
}

TEST(MoeModel, HoldsForWeightsOnTheInputAndOmittedBiases) {
  expect_model({.top_k = 1, .weight_on_input = true});
  expect_model({.top_k = 1, .shared_experts = 1, .weight_on_input = true});
  expect_model({.add_fc2_bias = false});
}

}  // namespace
}  // namespace narrowfloat::testing
