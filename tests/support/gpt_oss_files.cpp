// See gpt_oss_files.h.
#include "support/gpt_oss_files.h"

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>

#include "formats/float16.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kLayers = 2;
constexpr int64_t kBlock = 32;

std::vector<uint8_t> random_bytes(int64_t count, int64_t low, int64_t high, Random& random) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.range(low, high));
  return bytes;
}

std::vector<uint16_t> random_bf16(int64_t count, float scale, Random& random) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = float_to_bf16(scale * random.normal());
  return values;
}

template <typename T>
FileTensor file_tensor(const std::string& name, DType dtype, std::vector<int64_t> shape,
                       const std::vector<T>& values) {
  FileTensor tensor{{name, dtype, std::move(shape)}, {}};
  tensor.data.resize(values.size() * sizeof(T));
  std::memcpy(tensor.data.data(), values.data(), tensor.data.size());
  return tensor;
}

// E2M1 by its table, times a power of two (checkpoint formats: code * 2^(scale - 127)).
float decoded(const std::vector<uint8_t>& codes, const std::vector<uint8_t>& scales,
              int64_t index) {
  constexpr std::array kMagnitudes{0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  const int byte = codes[static_cast<size_t>(index / 2)];
  const int code = index % 2 == 0 ? byte & 0xF : byte >> 4;
  const float magnitude = kMagnitudes[static_cast<size_t>(code & 7)];
  const int exponent = scales[static_cast<size_t>(index / kBlock)] - 127;
  return std::ldexp(code >= 8 ? -magnitude : magnitude, exponent);
}

struct CodedWeights {
  std::string name;
  const std::vector<uint8_t>& codes;
  const std::vector<uint8_t>& scales;
  int64_t experts, rows, cols;
};

FileTensor plain(const CodedWeights& matrix, bool is_transposed) {
  std::vector<uint16_t> values(static_cast<size_t>(matrix.experts * matrix.rows * matrix.cols));
  const auto [name, codes, scales, experts, rows, cols] = matrix;
  for (int64_t index = 0; index < experts * rows * cols; ++index) {
    const int64_t expert = index / (rows * cols);
    const int64_t row = index / cols % rows;
    const int64_t at = is_transposed ? (expert * cols + index % cols) * rows + row : index;
    values[static_cast<size_t>(at)] = float_to_bf16(decoded(codes, scales, index));
  }
  return file_tensor(name, DType::kBF16,
                     {experts, is_transposed ? cols : rows, is_transposed ? rows : cols}, values);
}

void add_coded(std::vector<FileTensor>& tensors, const CodedWeights& matrix,
               const std::string& joint) {
  const int64_t blocks = matrix.cols / kBlock;
  tensors.push_back(file_tensor(matrix.name + joint + "blocks", DType::kU8,
                                {matrix.experts, matrix.rows, blocks, kBlock / 2}, matrix.codes));
  tensors.push_back(file_tensor(matrix.name + joint + "scales", DType::kU8,
                                {matrix.experts, matrix.rows, blocks}, matrix.scales));
}

struct LayerNames {
  std::string w1, w2, bias1, bias2, router;
};

LayerNames names_of(GptOssNames names, int64_t layer) {
  const std::string index = std::to_string(layer);
  if (names == GptOssNames::kOriginal) {
    const std::string mlp = "block." + index + ".mlp.";
    return {mlp + "mlp1_weight", mlp + "mlp2_weight", mlp + "mlp1_bias", mlp + "mlp2_bias",
            mlp + "gate."};
  }
  const std::string experts = "model.layers." + index + ".mlp.experts.";
  return {experts + "gate_up_proj", experts + "down_proj", experts + "gate_up_proj_bias",
          experts + "down_proj_bias", "model.layers." + index + ".mlp.router."};
}

}  // namespace

MoeWeights GptOssLayer::weights(const GptOssShape& shape) const {
  const auto [hidden, inter, experts, top_k] = shape;
  const auto view = [&, count = shape.experts](const std::vector<uint8_t>& values,
                                               const std::vector<uint8_t>& blocks, int64_t rows,
                                               int64_t cols) {
    WeightView result;
    result.values = TensorView::contiguous(values.data(), DType::kU8, {count, rows, cols / 2});
    result.scales.data = const_cast<uint8_t*>(blocks.data());
    result.scales.type = ScaleType::kUE8M0;
    result.scales.layout = ScaleLayoutId::kLinear;
    result.scales.batch = count;
    result.scales.rows = rows;
    result.scales.blocks = cols / kBlock;
    result.scales.capacity = count * rows * cols / kBlock;
    return result;
  };
  MoeWeights weights;
  weights.w1 = view(w1, w1_scales, 2 * inter, hidden);
  weights.w2 = view(w2, w2_scales, hidden, inter);
  weights.bias1 = TensorView::contiguous(bias1.data(), DType::kBF16, {experts, 2 * inter});
  weights.bias2 = TensorView::contiguous(bias2.data(), DType::kBF16, {experts, hidden});
  return weights;
}

GptOssModel::GptOssModel(const GptOssShape& shape, uint64_t seed) : shape_(shape) {
  Random random(seed);
  const auto [hidden, inter, experts, top_k] = shape;
  for (int64_t index = 0; index < kLayers; ++index) {
    GptOssLayer layer;
    layer.w1 = random_bytes(experts * 2 * inter * hidden / 2, 0, 255, random);
    layer.w1_scales = random_bytes(experts * 2 * inter * hidden / kBlock, 118, 124, random);
    layer.w2 = random_bytes(experts * hidden * inter / 2, 0, 255, random);
    layer.w2_scales = random_bytes(experts * hidden * inter / kBlock, 118, 124, random);
    layer.bias1 = random_bf16(experts * 2 * inter, 0.5F, random);
    layer.bias2 = random_bf16(experts * hidden, 0.5F, random);
    layer.router_weight = random_bf16(experts * hidden, 0.3F, random);
    layer.router_bias = random_bf16(experts, 1.0F, random);
    layers_.push_back(std::move(layer));
  }
}

MoeConfig GptOssModel::config() const {
  MoeConfig config;
  config.hidden = shape_.hidden;
  config.inter = shape_.inter;
  config.routing.method = RoutingMethod::kRenormalize;
  config.routing.experts = static_cast<int32_t>(shape_.experts);
  config.routing.top_k = static_cast<int32_t>(shape_.top_k);
  config.local_experts = config.routing.experts;
  config.mode = MoeMode::kMxfp4Bf16;
  config.gate_order = GateOrder::kInterleaved;
  config.activation = Activation::swiglu_oai(1.702F, 1.0F, 7.0F);
  return config;
}

std::vector<FileTensor> GptOssModel::tensors(GptOssNames names) const {
  const auto [hidden, inter, experts, top_k] = shape_;
  std::vector<FileTensor> tensors;
  for (int64_t index = 0; index < kLayers; ++index) {
    const GptOssLayer& layer = layers_[static_cast<size_t>(index)];
    const LayerNames name = names_of(names, index);
    const std::string joint = names == GptOssNames::kOriginal ? "." : "_";
    add_coded(tensors, {name.w1, layer.w1, layer.w1_scales, experts, 2 * inter, hidden}, joint);
    add_coded(tensors, {name.w2, layer.w2, layer.w2_scales, experts, hidden, inter}, joint);
    const auto bf16 = [&](const std::string& tensor, const std::vector<int64_t>& extents,
                          const std::vector<uint16_t>& values) {
      tensors.push_back(file_tensor(tensor, DType::kBF16, extents, values));
    };
    bf16(name.bias1, {experts, 2 * inter}, layer.bias1);
    bf16(name.bias2, {experts, hidden}, layer.bias2);
    bf16(name.router + "weight", {experts, hidden}, layer.router_weight);
    bf16(name.router + "bias", {experts}, layer.router_bias);
  }
  return tensors;
}

std::vector<FileTensor> GptOssModel::plain_tensors(GptOssNames names) const {
  const auto [hidden, inter, experts, top_k] = shape_;
  const bool is_transposed = names == GptOssNames::kHuggingFace;
  std::vector<FileTensor> tensors;
  for (FileTensor& tensor : this->tensors(names)) {
    if (tensor.spec.dtype == DType::kBF16) tensors.push_back(std::move(tensor));
  }
  for (int64_t index = 0; index < kLayers; ++index) {
    const GptOssLayer& layer = layers_[static_cast<size_t>(index)];
    const LayerNames name = names_of(names, index);
    tensors.push_back(
        plain({name.w1, layer.w1, layer.w1_scales, experts, 2 * inter, hidden}, is_transposed));
    tensors.push_back(
        plain({name.w2, layer.w2, layer.w2_scales, experts, hidden, inter}, is_transposed));
  }
  return tensors;
}

std::string GptOssModel::config_text(GptOssNames names, bool is_quantized) const {
  const std::string experts = std::to_string(shape_.experts);
  const std::string top_k = std::to_string(shape_.top_k);
  if (names == GptOssNames::kOriginal) {
    return R"({"num_experts": )" + experts + R"(, "experts_per_token": )" + top_k +
           R"(, "swiglu_limit": 7.0})";
  }
  const std::string quantization =
      R"(, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert":
          ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
           "lm_head"]})";
  return R"({"model_type": "gpt_oss", "hidden_act": "silu", "num_local_experts": )" + experts +
         R"(, "experts_per_token": )" + top_k + R"(, "num_experts_per_tok": )" + top_k +
         R"(, "swiglu_limit": 7.0)" + (is_quantized ? quantization : "") + "}";
}

void GptOssModel::write(const std::string& directory, GptOssNames names) const {
  std::filesystem::create_directories(directory);
  write_tensors(directory + "/model.safetensors", tensors(names));
  std::ofstream(directory + "/config.json") << config_text(names);
}

void write_tensors(const std::string& path, const std::vector<FileTensor>& tensors) {
  std::vector<TensorSpec> specs;
  specs.reserve(tensors.size());
  for (const FileTensor& tensor : tensors) specs.push_back(tensor.spec);
  SafetensorsWriter writer(path, specs, {});
  for (const FileTensor& tensor : tensors) {
    writer.write(tensor.spec.name, 0, std::as_bytes(std::span(tensor.data)));
  }
  writer.commit();
}

}  // namespace narrowfloat::testing
