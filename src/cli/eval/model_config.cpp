// Reads what it needs and refuses what it would have to ignore.
#include "cli/eval/model_config.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "narrowfloat/error.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

using Config = nlohmann::json;

constexpr int64_t kMaxModelExtent = 1 << 20;
constexpr int64_t kBytes = 256;  // Values of a byte: one token each.
// Windows are no longer than this, whatever a model could take: memory grows with them.
constexpr int64_t kMaxWindow = 4096;

// One config.json and where it came from.
struct Source {
  Config config;
  std::string path;

  [[noreturn]] void refuse(std::string_view what) const {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("{}: {}; eval computes Qwen3-MoE models over bytes only, such as "
                            "models/tiny-moe",
                            printable(path), what));
  }
  [[noreturn]] void reject(std::string_view key, std::string_view expected) const {
    throw Error(ErrorKind::kCorruptData, fmt::format("{}: '{}' in config.json: expected {}",
                                                     printable(path), key, expected));
  }
  [[nodiscard]] int64_t extent(const char* key) const {
    const auto found = config.find(key);
    if (found == config.end() || !found->is_number_integer()) reject(key, "an integer");
    const auto value = found->get<int64_t>();
    if (value < 1 || value > kMaxModelExtent) reject(key, fmt::format("1 to {}", kMaxModelExtent));
    return value;
  }
  [[nodiscard]] double positive(const char* key) const {
    const auto found = config.find(key);
    if (found == config.end() || !found->is_number()) reject(key, "a number");
    const auto value = found->get<double>();
    if (!(value > 0)) reject(key, "a number above 0");
    return value;
  }
  // True where the key is there and says something other than "no".
  [[nodiscard]] bool is_set(const char* key) const {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) return false;
    if (found->is_boolean()) return found->get<bool>();
    return !(found->is_array() && found->empty());
  }
};

Source parse_source(const std::string& config_text, const std::string& path) {
  Source source{Config::parse(config_text, nullptr, false), path};
  if (config_text.empty()) source.refuse("there is no config.json");
  if (!source.config.is_object()) {
    throw Error(ErrorKind::kCorruptData,
                fmt::format("{}: config.json: not a JSON object", printable(path)));
  }
  return source;
}

// At the top level, or in `rope_parameters` as newer files have it.
double rope_theta(const Source& source) {
  const auto parameters = source.config.find("rope_parameters");
  if (parameters == source.config.end() || parameters->is_null()) {
    return source.positive("rope_theta");
  }
  if (!parameters->is_object()) source.reject("rope_parameters", "an object");
  const std::string type = parameters->value("rope_type", Config("default")).dump();
  if (type != "\"default\"") source.refuse(fmt::format("rope_type is {}", printable(type)));
  for (const auto& [key, value] : parameters->items()) {
    if (key != "rope_type" && key != "rope_theta") {
      source.refuse(fmt::format("config.json sets '{}'", printable("rope_parameters." + key)));
    }
  }
  if (!parameters->contains("rope_theta")) return source.positive("rope_theta");
  return Source{*parameters, source.path}.positive("rope_theta");
}

void check_architecture(const Source& source) {
  const std::string type =
      source.config.contains("model_type") && source.config["model_type"].is_string()
          ? source.config["model_type"].get<std::string>()
          : "none";
  if (type != "qwen3_moe") source.refuse(fmt::format("model_type is '{}'", printable(type)));
  for (const char* key : {"attention_bias", "use_sliding_window", "rope_scaling", "mlp_only_layers",
                          "quantization_config"}) {
    if (source.is_set(key)) source.refuse(fmt::format("config.json sets '{}'", key));
  }
  if (source.config.contains("partial_rotary_factor") &&
      source.positive("partial_rotary_factor") != 1.0) {
    source.refuse("config.json sets 'partial_rotary_factor'");
  }
  if (source.config.contains("decoder_sparse_step") && source.extent("decoder_sparse_step") != 1) {
    source.refuse("not every layer has experts (decoder_sparse_step)");
  }
}

}  // namespace

ModelConfig parse_model_config(const std::string& config_text, const std::string& path) {
  const Source source = parse_source(config_text, path);
  check_architecture(source);
  ModelConfig config;
  config.hidden = source.extent("hidden_size");
  config.layers = source.extent("num_hidden_layers");
  config.heads = source.extent("num_attention_heads");
  config.kv_heads = source.extent("num_key_value_heads");
  config.head_dim = source.extent("head_dim");
  config.vocabulary = source.extent("vocab_size");
  config.window = std::min(source.extent("max_position_embeddings"), kMaxWindow);
  config.rope_theta = rope_theta(source);
  config.eps = static_cast<float>(source.positive("rms_norm_eps"));
  config.has_tied_embeddings = source.is_set("tie_word_embeddings");
  if (config.vocabulary != kBytes) {
    source.refuse(fmt::format("vocab_size is {}, not {}", config.vocabulary, kBytes));
  }
  if (config.heads % config.kv_heads != 0) {
    source.reject("num_key_value_heads", "a divisor of num_attention_heads");
  }
  if (config.head_dim % 2 != 0) source.reject("head_dim", "an even number");
  if (config.window < 2) source.reject("max_position_embeddings", "at least 2");
  return config;
}

}  // namespace narrowfloat::cli
