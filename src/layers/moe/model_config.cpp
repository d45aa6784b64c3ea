// A family of models is a function that reads its members. Where a model's code has a constant in
// place of a member, the function has the same constant.
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
  [[nodiscard]] float number_or(std::string_view key, float missing) const {
    const auto member = config_.find(key);
    return member == config_.end() || member->is_null() ? missing : number(key);
  }
  [[nodiscard]] bool has(std::string_view key) const { return config_.contains(key); }
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

Activation read_activation(const ConfigReader& config) {
  const std::string text = config.text_or("hidden_act", "silu");
  if (text == "silu" || text == "swish") return Activation::swiglu();
  if (text == "gelu") return Activation::plain(ActivationKind::kGegluErf);
  if (text == "gelu_pytorch_tanh") return Activation::plain(ActivationKind::kGegluTanh);
  config.unsupported("hidden_act", text, "silu, gelu or gelu_pytorch_tanh");
}

void require_text(const ConfigReader& config, std::string_view key, const std::string& wanted) {
  const std::string text = config.text_or(key, wanted);
  if (text != wanted) config.unsupported(key, text, wanted);
}

// Softmax over all experts, then the best k; normalised to 1, or not.
MoeModelConfig softmax_model(const ConfigReader& config) {
  MoeModelConfig model{.routing = {}, .activation = read_activation(config)};
  model.routing.method = config.flag_or("norm_topk_prob", false) ? RoutingMethod::kRenormalize
                                                                 : RoutingMethod::kDefault;
  // Newer versions of transformers save the number of experts by the name that Mixtral has for it.
  const bool is_newer = config.has("num_local_experts") && !config.has("num_experts");
  model.routing.experts = config.integer(is_newer ? "num_local_experts" : "num_experts");
  model.routing.top_k = config.integer("num_experts_per_tok");
  return model;
}

MoeModelConfig mixtral_model(const ConfigReader& config) {
  MoeModelConfig model{.routing = {}, .activation = read_activation(config)};
  model.routing.method = RoutingMethod::kRenormalize;
  model.routing.experts = config.integer("num_local_experts");
  model.routing.top_k = config.integer("num_experts_per_tok");
  return model;
}

// Sigmoid with a correction bias and expert groups.
MoeModelConfig deepseek_model(const ConfigReader& config) {
  if (!config.flag_or("norm_topk_prob", true)) {
    config.unsupported("norm_topk_prob", "false", "true for a sigmoid router with groups");
  }
  require_text(config, "scoring_func", "sigmoid");
  MoeModelConfig model{.routing = {}, .activation = read_activation(config)};
  model.routing.method = RoutingMethod::kDeepSeekV3;
  model.routing.experts = config.integer("n_routed_experts");
  model.routing.top_k = config.integer("num_experts_per_tok");
  // These are required: readers of such files differ about the meaning of a missing member.
  model.routing.n_group = config.integer("n_group");
  model.routing.topk_group = config.integer("topk_group");
  model.routing.routed_scale = config.number("routed_scaling_factor");
  return model;
}

// Sigmoid with a correction bias, without groups.
MoeModelConfig minimax_model(const ConfigReader& config) {
  require_text(config, "scoring_func", "sigmoid");
  if (!config.flag_or("use_routing_bias", true)) {
    config.unsupported("use_routing_bias", "false", "true");
  }
  MoeModelConfig model = mixtral_model(config);
  model.routing.method = RoutingMethod::kMiniMax2;
  model.routing.routed_scale = config.number_or("routed_scaling_factor", 1.0F);
  return model;
}

// The best k logits, a bias included, then softmax over them. The activation is the model's own,
// whatever hidden_act says; its constants are newer members of the config than the model.
MoeModelConfig gpt_oss_model(const ConfigReader& config) {
  constexpr float kAlpha = 1.702F;
  constexpr float kBeta = 1.0F;
  constexpr float kLimit = 7.0F;
  // Names of the original files and of Hugging Face's.
  const bool is_original = config.has("experts_per_token") && !config.has("num_experts_per_tok");
  MoeModelConfig model;
  model.routing.method = RoutingMethod::kRenormalize;
  model.routing.experts = config.integer(is_original ? "num_experts" : "num_local_experts");
  model.routing.top_k = config.integer(is_original ? "experts_per_token" : "num_experts_per_tok");
  model.activation = Activation::swiglu_oai(config.number_or("swiglu_alpha", kAlpha), kBeta,
                                            config.number_or("swiglu_limit", kLimit));
  model.stacked_order = GateOrder::kInterleaved;
  model.has_logit_bias = true;
  return model;
}

// One expert a token; the sigmoid of its logit multiplies the expert's input.
MoeModelConfig llama4_model(const ConfigReader& config) {
  MoeModelConfig model = mixtral_model(config);
  if (model.routing.top_k != 1) {
    config.unsupported("num_experts_per_tok", std::to_string(model.routing.top_k), "1");
  }
  model.routing.method = RoutingMethod::kLlama4;
  model.weight_on_input = true;
  model.stacked_order = GateOrder::kGateUp;
  return model;
}

struct ModelFamily {
  std::string_view model_type;
  MoeModelConfig (*read)(const ConfigReader& config);
};
constexpr std::array kFamilies{
    ModelFamily{"qwen3_moe", softmax_model},    ModelFamily{"qwen2_moe", softmax_model},
    ModelFamily{"olmoe", softmax_model},        ModelFamily{"mixtral", mixtral_model},
    ModelFamily{"deepseek_v3", deepseek_model}, ModelFamily{"kimi_k2", deepseek_model},
    ModelFamily{"glm4_moe", deepseek_model},    ModelFamily{"gpt_oss", gpt_oss_model},
    ModelFamily{"llama4_text", llama4_model},   ModelFamily{"minimax_m2", minimax_model},
};

// Multi-modal models nest the language model's config.
const json& language_model(const json& config) {
  const auto nested = config.find("text_config");
  return nested != config.end() && nested->is_object() ? *nested : config;
}

// gpt-oss' original config has no model_type, but a member that no other model has.
std::string model_type_of(const ConfigReader& config) {
  const std::string missing = config.has("experts_per_token") ? "gpt_oss" : "";
  return config.text_or("model_type", missing);
}

}  // namespace

MoeModelConfig read_moe_config(const std::string& config_text, const std::string& path) {
  const json config = json::parse(config_text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    throw_error(ErrorKind::kCorruptData, "{}: no config.json with a JSON object", printable(path));
  }
  const ConfigReader reader(language_model(config), path);
  const std::string type = model_type_of(reader);
  std::vector<std::string_view> known;
  for (const ModelFamily& family : kFamilies) {
    if (family.model_type == type) return family.read(reader);
    known.push_back(family.model_type);
  }
  reader.unsupported("model_type", type.empty() ? "nothing" : type,
                     fmt::format("one of {}", fmt::join(known, ", ")));
}

}  // namespace narrowfloat
