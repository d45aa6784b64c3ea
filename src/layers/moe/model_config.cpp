// Three families of routers cover the models with experts stored one by one; what a family reads is
// in its function.
#include "layers/moe/model_config.h"

#include <array>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

using nlohmann::json;

// Members of config.json with errors that name file and member.
class ConfigReader {
 public:
  ConfigReader(const json& config, const std::string& path) : config_(config), path_(path) {}

  [[nodiscard]] int32_t integer(std::string_view key) const {
    const auto member = config_.find(key);
    if (member == config_.end() || !member->is_number_integer()) fail(key, "an integer");
    const auto value = member->get<int64_t>();
    if (value < 0 || value > 1'000'000) fail(key, "an integer from 0 to 1000000");
    return static_cast<int32_t>(value);
  }
  [[nodiscard]] float number(std::string_view key) const {
    const auto member = config_.find(key);
    if (member == config_.end() || !member->is_number()) fail(key, "a number");
    return member->get<float>();
  }
  [[nodiscard]] bool flag_or(std::string_view key, bool missing) const {
    const auto member = config_.find(key);
    if (member == config_.end() || member->is_null()) return missing;
    if (!member->is_boolean()) fail(key, "true or false");
    return member->get<bool>();
  }
  [[nodiscard]] std::string text_or(std::string_view key, std::string missing) const {
    const auto member = config_.find(key);
    if (member == config_.end() || member->is_null()) return missing;
    if (!member->is_string()) fail(key, "a string");
    return member->get<std::string>();
  }
  [[noreturn]] void unsupported(std::string_view key, std::string_view got,
                                std::string_view expected) const {
    throw_error(ErrorKind::kUnsupported, "{}/config.json: {}: expected {}, got {}",
                printable(path_), key, expected, printable(got));
  }

 private:
  [[noreturn]] void fail(std::string_view key, std::string_view expected) const {
    throw_error(ErrorKind::kCorruptData, "{}/config.json: {}: expected {}", printable(path_), key,
                expected);
  }

  const json& config_;
  const std::string& path_;
};

// Softmax over all experts, then the best k; normalised to 1, or not.
RoutingConfig softmax_router(const ConfigReader& config) {
  RoutingConfig routing;
  routing.method = config.flag_or("norm_topk_prob", false) ? RoutingMethod::kRenormalize
                                                           : RoutingMethod::kDefault;
  routing.experts = config.integer("num_experts");
  routing.top_k = config.integer("num_experts_per_tok");
  return routing;
}

RoutingConfig mixtral_router(const ConfigReader& config) {
  RoutingConfig routing;
  routing.method = RoutingMethod::kRenormalize;
  routing.experts = config.integer("num_local_experts");
  routing.top_k = config.integer("num_experts_per_tok");
  return routing;
}

// Sigmoid with a correction bias and expert groups.
RoutingConfig deepseek_router(const ConfigReader& config) {
  if (!config.flag_or("norm_topk_prob", true)) {
    config.unsupported("norm_topk_prob", "false", "true for a sigmoid router with groups");
  }
  const std::string scoring = config.text_or("scoring_func", "sigmoid");
  if (scoring != "sigmoid") config.unsupported("scoring_func", scoring, "sigmoid");
  RoutingConfig routing;
  routing.method = RoutingMethod::kDeepSeekV3;
  routing.experts = config.integer("n_routed_experts");
  routing.top_k = config.integer("num_experts_per_tok");
  // Required: what a missing member means differs between readers of such files.
  routing.n_group = config.integer("n_group");
  routing.topk_group = config.integer("topk_group");
  routing.routed_scale = config.number("routed_scaling_factor");
  return routing;
}

struct ModelFamily {
  std::string_view model_type;
  RoutingConfig (*router)(const ConfigReader& config);
};
constexpr std::array kFamilies{
    ModelFamily{"qwen3_moe", softmax_router},    ModelFamily{"qwen2_moe", softmax_router},
    ModelFamily{"olmoe", softmax_router},        ModelFamily{"mixtral", mixtral_router},
    ModelFamily{"deepseek_v3", deepseek_router}, ModelFamily{"kimi_k2", deepseek_router},
    ModelFamily{"glm4_moe", deepseek_router},
};

Activation read_activation(const ConfigReader& config) {
  const std::string text = config.text_or("hidden_act", "silu");
  if (text == "silu" || text == "swish") return Activation::swiglu();
  if (text == "gelu") return Activation::plain(ActivationKind::kGegluErf);
  if (text == "gelu_pytorch_tanh") return Activation::plain(ActivationKind::kGegluTanh);
  config.unsupported("hidden_act", text, "silu, gelu or gelu_pytorch_tanh");
}

}  // namespace

MoeModelConfig read_moe_config(const std::string& config_text, const std::string& path) {
  const json config = json::parse(config_text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    throw_error(ErrorKind::kCorruptData, "{}: no config.json with a JSON object", printable(path));
  }
  const ConfigReader reader(config, path);
  const std::string type = reader.text_or("model_type", "");
  std::vector<std::string_view> known;
  for (const ModelFamily& family : kFamilies) {
    if (family.model_type == type) return {family.router(reader), read_activation(reader)};
    known.push_back(family.model_type);
  }
  reader.unsupported("model_type", type.empty() ? "nothing" : type,
                     fmt::format("one of {}", fmt::join(known, ", ")));
}

}  // namespace narrowfloat
