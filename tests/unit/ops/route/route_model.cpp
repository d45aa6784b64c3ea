// See route_model.h.
#include "route_model.h"

#include <algorithm>
#include <cmath>
#include <compare>
#include <limits>
#include <numeric>

namespace narrowfloat::testing {
namespace {

float sigmoid(float z) {
  const auto t = static_cast<float>(std::tanh(static_cast<double>(0.5F * z)));
  return 0.5F * t + 0.5F;
}

bool is_softmax(RoutingMethod method) {
  return method == RoutingMethod::kDefault || method == RoutingMethod::kRenormalize ||
         method == RoutingMethod::kRenormalizeNaive;
}

float key_of(RoutingMethod method, float logit, float bias) {
  float key = logit;
  if (method == RoutingMethod::kSigmoid || method == RoutingMethod::kSigmoidRenorm) {
    key = sigmoid(logit);
  } else if (method == RoutingMethod::kDeepSeekV3 || method == RoutingMethod::kMiniMax2) {
    key = sigmoid(logit) + bias;
  } else {
    return key;
  }
  return std::isnan(key) ? std::numeric_limits<float>::quiet_NaN() : key;
}

// Indices of `values` (a subset), best first.
void sort_best_first(std::vector<int32_t>& indices, const std::vector<float>& values) {
  std::stable_sort(indices.begin(), indices.end(), [&](int32_t a, int32_t b) {
    return std::strong_order(values[static_cast<size_t>(a)], values[static_cast<size_t>(b)]) > 0;
  });
}

std::vector<int32_t> iota(int32_t begin, int32_t count) {
  std::vector<int32_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), begin);
  return all;
}

std::vector<int32_t> experts_of_kept_groups(const std::vector<float>& keys,
                                            const RoutingConfig& config) {
  const int32_t size = config.experts / config.n_group;
  std::vector<float> scores;
  for (int32_t group = 0; group < config.n_group; ++group) {
    std::vector<int32_t> members = iota(group * size, size);
    sort_best_first(members, keys);
    const float score =
        keys[static_cast<size_t>(members[0])] + keys[static_cast<size_t>(members[1])];
    scores.push_back(std::isnan(score) ? std::numeric_limits<float>::quiet_NaN() : score);
  }
  std::vector<int32_t> groups = iota(0, config.n_group);
  sort_best_first(groups, scores);
  groups.resize(static_cast<size_t>(config.topk_group));
  std::sort(groups.begin(), groups.end());
  std::vector<int32_t> experts;
  for (const int32_t group : groups) {
    for (const int32_t expert : iota(group * size, size)) experts.push_back(expert);
  }
  return experts;
}

// exp(x - maximum) / sum; the difference in fp32, as the definition has it.
std::vector<double> softmax(const std::vector<float>& over, const std::vector<float>& of) {
  float maximum = -std::numeric_limits<float>::infinity();
  for (const float x : over) maximum = std::fmax(maximum, x);
  double sum = 0.0;
  for (const float x : over) sum += std::exp(static_cast<double>(x - maximum));
  std::vector<double> weights;
  for (const float x : of) weights.push_back(std::exp(static_cast<double>(x - maximum)) / sum);
  return weights;
}

float sigmoid_weight(const RoutingConfig& config, float s, float sum) {
  switch (config.method) {
    case RoutingMethod::kDeepSeekV3:
    case RoutingMethod::kMiniMax2:
      return s * config.routed_scale / (sum + 1e-20F);
    case RoutingMethod::kSigmoidRenorm:
      return config.norm_topk ? s / (sum < 1e-20F ? 1e-20F : sum) : s;
    default:
      return s;
  }
}

}  // namespace

ModelRow model_row(const std::vector<float>& logits, const std::vector<float>& bias,
                   const RoutingConfig& config) {
  std::vector<float> keys;
  for (size_t e = 0; e < logits.size(); ++e) {
    keys.push_back(key_of(config.method, logits[e], bias[e]));
  }
  ModelRow row;
  row.ids = config.n_group > 1 ? experts_of_kept_groups(keys, config) : iota(0, config.experts);
  sort_best_first(row.ids, keys);
  row.ids.resize(static_cast<size_t>(config.top_k));
  std::vector<float> selected;
  for (const int32_t id : row.ids) selected.push_back(logits[static_cast<size_t>(id)]);
  if (is_softmax(config.method)) {
    row.weights = softmax(config.method == RoutingMethod::kDefault ? logits : selected, selected);
  } else if (config.method == RoutingMethod::kTopK) {
    row.weights.assign(selected.begin(), selected.end());
  } else {
    float sum = 0.0F;
    for (const float x : selected) sum += sigmoid(x);
    for (const float x : selected) row.weights.push_back(sigmoid_weight(config, sigmoid(x), sum));
  }
  return row;
}

bool weight_matches(const RoutingConfig& config, float actual, double expected) {
  if (std::isnan(expected)) return std::isnan(actual);
  if (!is_softmax(config.method)) return static_cast<double>(actual) == expected;
  const int32_t terms = config.method == RoutingMethod::kDefault ? config.experts : config.top_k;
  const double bound = (4 + terms) * 0x1p-24 * expected + 0x1p-147;
  return std::fabs(static_cast<double>(actual) - expected) <= bound;
}

}  // namespace narrowfloat::testing
