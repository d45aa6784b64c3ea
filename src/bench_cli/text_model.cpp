// Windows are independent but for the experts, which take the rows of all windows at once: the
// attention of every window runs on its own thread, then the experts on all cores, layer by layer.
#include "bench_cli/text_model.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli_common/host_memory.h"
#include "narrowfloat/error.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

using Config = nlohmann::json;

constexpr int64_t kMaxModelExtent = 1 << 20;
constexpr int64_t kBytes = 256;  // Values of a byte: one token each.
// Windows are no longer than this, whatever a model could take: memory grows with them.
constexpr int64_t kMaxWindow = 4096;

// A config.json and its path.
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

// The key is at the top level, or in `rope_parameters` in newer files.
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

// Reads what it needs and refuses what it would have to ignore. `path` is for messages.
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

// Rows of queries that are worked on together. Causal attention computes up to so many columns that
// it does not need.
constexpr int64_t kQueryBlock = 16;

std::vector<float> read_tensor(const Checkpoint& checkpoint, const std::string& name,
                               const std::vector<int64_t>& shape) {
  const CheckpointTensor* tensor = checkpoint.find(name);
  if (tensor == nullptr) {
    throw Error(ErrorKind::kCorruptData,
                fmt::format("{}: there is no tensor '{}'", printable(checkpoint.path()), name));
  }
  if (tensor->info.shape != shape) {
    throw Error(ErrorKind::kCorruptData,
                fmt::format("{}: tensor '{}': expected [{}] by config.json, got [{}]",
                            printable(checkpoint.path()), name, fmt::join(shape, ", "),
                            fmt::join(tensor->info.shape, ", ")));
  }
  return read_floats(checkpoint.shards()[tensor->shard], tensor->info);
}

// x @ W.T for W [out, in]: the packed matrix is the transpose.
PackedMatrix read_linear(const Checkpoint& checkpoint, const std::string& name, int64_t out,
                         int64_t in) {
  const std::vector<float> weight = read_tensor(checkpoint, name, {out, in});
  PackedMatrix packed;
  packed.pack({.data = weight.data(), .rows = in, .cols = out, .row_stride = 1, .col_stride = in});
  return packed;
}

// out = in @ weight for dense rows.
void project(const std::vector<float>& in, const PackedMatrix& weight, int64_t length,
             std::vector<float>& out) {
  multiply({.a = in.data(),
            .a_stride = weight.inner(),
            .c = out.data(),
            .c_stride = weight.cols(),
            .rows = length,
            .inner = weight.inner(),
            .cols = weight.cols()},
           weight);
}

}  // namespace

// Buffers of one thread for one window.
struct TextModel::Scratch {
  Scratch(const ModelConfig& config, int64_t length)
      : normed(size(length, config.hidden)),
        q(size(length, config.heads * config.head_dim)),
        k(size(length, config.kv_heads * config.head_dim)),
        v(size(length, config.kv_heads * config.head_dim)),
        mixed(q.size()),
        scores(size(kQueryBlock, score_stride(length))),
        logits(size(length, config.vocabulary)) {}

  // Rows of scores have room for what softmax() overwrites.
  static int64_t score_stride(int64_t length) {
    return (length + kSoftmaxAlignment - 1) / kSoftmaxAlignment * kSoftmaxAlignment;
  }
  static size_t size(int64_t rows, int64_t cols) { return static_cast<size_t>(rows * cols); }

  std::vector<float> normed, q, k, v, mixed, scores, logits;
  PackedMatrix keys, values;
};

// Threads take buffers that fit the longest window: fresh memory costs more than its zeros.
class TextModel::ScratchPool {
 public:
  ScratchPool(const ModelConfig& config, std::span<const Window> windows) : config_(config) {
    for (const Window window : windows) {
      length_ = std::max(length_, static_cast<int64_t>(window.size()));
    }
  }

  std::unique_ptr<Scratch> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Scratch>(config_, length_);
    std::unique_ptr<Scratch> scratch = std::move(free_.back());
    free_.pop_back();
    return scratch;
  }
  void give_back(std::unique_ptr<Scratch> scratch) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(scratch));
  }

 private:
  const ModelConfig& config_;
  int64_t length_ = 0;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;
};

TextModel::TextModel(const Checkpoint& checkpoint)
    : config_(parse_model_config(checkpoint.config_text(), checkpoint.path())) {
  constexpr const char* kEmbedding = "model.embed_tokens.weight";
  embedding_ = read_tensor(checkpoint, kEmbedding, {config_.vocabulary, config_.hidden});
  head_ = read_linear(checkpoint, config_.has_tied_embeddings ? kEmbedding : "lm_head.weight",
                      config_.vocabulary, config_.hidden);
  norm_ = read_tensor(checkpoint, "model.norm.weight", {config_.hidden});
  for (int64_t i = 0; i < config_.layers; ++i) layers_.push_back(load_layer(checkpoint, i));
  // This comes last, because by now the tensors have confirmed the sizes of config.json.
  rotary_ = RotaryTable(config_.window, config_.head_dim, config_.rope_theta);
}

TextModel::Layer TextModel::load_layer(const Checkpoint& checkpoint, int64_t index) const {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const std::string attention = prefix + "self_attn.";
  const int64_t q_width = config_.heads * config_.head_dim;
  const int64_t kv_width = config_.kv_heads * config_.head_dim;
  Layer layer;
  layer.input_norm = read_tensor(checkpoint, prefix + "input_layernorm.weight", {config_.hidden});
  layer.expert_norm =
      read_tensor(checkpoint, prefix + "post_attention_layernorm.weight", {config_.hidden});
  layer.q_norm = read_tensor(checkpoint, attention + "q_norm.weight", {config_.head_dim});
  layer.k_norm = read_tensor(checkpoint, attention + "k_norm.weight", {config_.head_dim});
  layer.q = read_linear(checkpoint, attention + "q_proj.weight", q_width, config_.hidden);
  layer.k = read_linear(checkpoint, attention + "k_proj.weight", kv_width, config_.hidden);
  layer.v = read_linear(checkpoint, attention + "v_proj.weight", kv_width, config_.hidden);
  layer.o = read_linear(checkpoint, attention + "o_proj.weight", config_.hidden, q_width);
  return layer;
}

// scores = q @ k.T / sqrt(head_dim), causal; mixed = softmax(scores) @ v.
void TextModel::attend_head(int64_t head, int64_t length, Scratch& scratch) const {
  const int64_t dim = config_.head_dim;
  const int64_t q_width = config_.heads * dim;
  const int64_t kv_width = config_.kv_heads * dim;
  const int64_t kv_column = head / (config_.heads / config_.kv_heads) * dim;
  const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
  scratch.keys.pack({.data = scratch.k.data() + kv_column,
                     .rows = dim,
                     .cols = length,
                     .row_stride = 1,
                     .col_stride = kv_width});
  scratch.values.pack({.data = scratch.v.data() + kv_column,
                       .rows = length,
                       .cols = dim,
                       .row_stride = kv_width,
                       .col_stride = 1});
  const int64_t stride = Scratch::score_stride(length);
  for (int64_t first = 0; first < length; first += kQueryBlock) {
    const int64_t rows = std::min(kQueryBlock, length - first);
    const int64_t visible = first + rows;
    float* scores = scratch.scores.data();
    multiply({.a = scratch.q.data() + first * q_width + head * dim,
              .a_stride = q_width,
              .c = scores,
              .c_stride = stride,
              .rows = rows,
              .inner = dim,
              .cols = visible},
             scratch.keys);
    for (int64_t r = 0; r < rows; ++r) {
      float* row = scores + r * stride;
      const int64_t seen = first + r + 1;
      softmax(row, seen, scale);
      std::fill(row + seen, row + visible, 0.0F);
    }
    multiply({.a = scores,
              .a_stride = stride,
              .c = scratch.mixed.data() + first * q_width + head * dim,
              .c_stride = q_width,
              .rows = rows,
              .inner = visible,
              .cols = dim},
             scratch.values);
  }
}

void TextModel::norm_and_rotate(float* heads, int64_t count, std::span<const float> norm,
                                int64_t length) const {
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t h = 0; h < count; ++h) {
      float* head = heads + (t * count + h) * config_.head_dim;
      rms_norm(head, norm, config_.eps, head);
      rotary_.rotate(head, t);
    }
  }
}

void TextModel::attend(const Layer& layer, float* x, int64_t length, Scratch& scratch) const {
  norm_rows(x, layer.input_norm, length, scratch.normed.data());
  project(scratch.normed, layer.q, length, scratch.q);
  project(scratch.normed, layer.k, length, scratch.k);
  project(scratch.normed, layer.v, length, scratch.v);
  norm_and_rotate(scratch.q.data(), config_.heads, layer.q_norm, length);
  norm_and_rotate(scratch.k.data(), config_.kv_heads, layer.k_norm, length);
  for (int64_t head = 0; head < config_.heads; ++head) attend_head(head, length, scratch);
  project(scratch.mixed, layer.o, length, scratch.normed);
  const auto count = static_cast<size_t>(length * config_.hidden);
  for (size_t i = 0; i < count; ++i) x[i] += scratch.normed[i];
}

void TextModel::norm_rows(const float* x, std::span<const float> weight, int64_t length,
                          float* out) const {
  for (int64_t t = 0; t < length; ++t) {
    rms_norm(x + t * config_.hidden, weight, config_.eps, out + t * config_.hidden);
  }
}

double TextModel::score_window(Window window, const float* x, Scratch& scratch) const {
  const auto length = static_cast<int64_t>(window.size());
  norm_rows(x, norm_, length, scratch.normed.data());
  project(scratch.normed, head_, length, scratch.logits);
  const auto vocabulary = static_cast<size_t>(config_.vocabulary);
  double bits = 0;
  for (size_t i = 1; i < window.size(); ++i) {
    const std::span<const float> logits(scratch.logits.data() + (i - 1) * vocabulary, vocabulary);
    bits += surprise_bits(logits, window[i]);
  }
  return bits;
}

template <typename Body>
void TextModel::for_each_window(std::span<const Window> windows, ScratchPool& pool,
                                const Body& body) const {
  std::vector<size_t> begins;
  size_t end = 0;
  for (const Window window : windows) {
    begins.push_back(end);
    end += window.size() * static_cast<size_t>(config_.hidden);
  }
  for_each_index(static_cast<int64_t>(windows.size()), [&](int64_t index) {
    const auto i = static_cast<size_t>(index);
    std::unique_ptr<Scratch> scratch = pool.take();
    body(i, begins[i], *scratch);
    pool.give_back(std::move(scratch));
  });
}

std::vector<float> TextModel::begin(std::span<const Window> windows) const {
  std::vector<float> x;
  for (const Window window : windows) {
    for (const uint8_t byte : window) {
      const auto row = embedding_.begin() + static_cast<std::ptrdiff_t>(byte * config_.hidden);
      x.insert(x.end(), row, row + config_.hidden);
    }
  }
  ScratchPool pool(config_, windows);
  for_each_window(windows, pool, [&](size_t i, size_t begin, Scratch& scratch) {
    attend(layers_.front(), x.data() + begin, static_cast<int64_t>(windows[i].size()), scratch);
  });
  return x;
}

double TextModel::score(std::span<const Window> windows, std::vector<float> x,
                        const ExpertFunction& experts) const {
  std::vector<float> rows(x.size());
  ScratchPool pool(config_, windows);
  for (size_t l = 0; l < layers_.size(); ++l) {
    for_each_window(windows, pool, [&](size_t i, size_t begin, Scratch& scratch) {
      const auto length = static_cast<int64_t>(windows[i].size());
      if (l > 0) attend(layers_[l], x.data() + begin, length, scratch);
      norm_rows(x.data() + begin, layers_[l].expert_norm, length, rows.data() + begin);
    });
    experts(static_cast<int64_t>(l), rows, x);
  }
  std::vector<double> bits(windows.size());
  for_each_window(windows, pool, [&](size_t i, size_t begin, Scratch& scratch) {
    bits[i] = score_window(windows[i], x.data() + begin, scratch);
  });
  double total = 0;
  for (const double window_bits : bits) total += window_bits;
  return total;
}

}  // namespace narrowfloat::cli
