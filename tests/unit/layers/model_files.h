// Small checkpoints for the tests of this folder: tensors with reproducible contents, written as
// one file or as a directory, and reading tensors back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "narrowfloat/checkpoint.h"
#include "narrowfloat/safetensors.h"
#include "unit/checkpoint/test_files.h"

namespace narrowfloat {

struct TestTensor {
  TensorSpec spec;
  std::vector<std::byte> data;
};

inline int64_t element_count(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

template <typename T>
TestTensor tensor_of(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                     const std::vector<T>& elements) {
  TestTensor tensor{{name, dtype, shape}, {}};
  const std::span<const std::byte> bytes = std::as_bytes(std::span(elements));
  tensor.data.assign(bytes.begin(), bytes.end());
  return tensor;
}

// Roughly normal values of standard deviation 0.02, the same for the same name and shape.
inline std::vector<float> weight_values(const std::string& name, int64_t count) {
  std::seed_seq seed(name.begin(), name.end());
  std::mt19937 engine(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    float sum = 0;
    for (int i = 0; i < 6; ++i) sum += static_cast<float>(engine() >> 8) * 0x1p-24F - 0.5F;
    value = 0.0283F * sum;
  }
  return values;
}

inline TestTensor bf16_tensor(const std::string& name, const std::vector<int64_t>& shape,
                              const std::vector<float>& values) {
  std::vector<uint16_t> elements;
  for (const float value : values) elements.push_back(float_to_bf16(value));
  return tensor_of(name, DType::kBF16, shape, elements);
}

inline TestTensor bf16_tensor(const std::string& name, const std::vector<int64_t>& shape) {
  return bf16_tensor(name, shape, weight_values(name, element_count(shape)));
}

inline TestTensor f32_tensor(const std::string& name, const std::vector<int64_t>& shape) {
  return tensor_of(name, DType::kF32, shape, weight_values(name, element_count(shape)));
}

// Those that quantize_checkpoint writes.
inline std::vector<ConventionInfo> written_conventions() {
  std::vector<ConventionInfo> written;
  for (const ConventionInfo& info : all_conventions()) {
    if (info.is_written) written.push_back(info);
  }
  return written;
}

inline void write_model_file(const std::string& path, const std::vector<TestTensor>& tensors,
                             std::map<std::string, std::string> metadata = {{"format", "pt"}}) {
  std::vector<TensorSpec> specs;
  for (const TestTensor& tensor : tensors) specs.push_back(tensor.spec);
  SafetensorsWriter writer(path, specs, std::move(metadata));
  for (const TestTensor& tensor : tensors) writer.write(tensor.spec.name, 0, tensor.data);
  writer.commit();
}

// A one-layer model: attention with q/k/v, two experts, and everything that must be left alone.
inline std::vector<TestTensor> tiny_model(int64_t rows = 48, int64_t cols = 64) {
  const std::string layer = "model.layers.0.";
  std::vector<TestTensor> tensors = {
      bf16_tensor("model.embed_tokens.weight", {32, cols}),
      bf16_tensor("lm_head.weight", {32, cols}),
      bf16_tensor(layer + "input_layernorm.weight", {cols}),
      bf16_tensor(layer + "mlp.gate.weight", {2, cols}),
      bf16_tensor(layer + "self_attn.q_proj.weight", {rows, cols}),
      bf16_tensor(layer + "self_attn.k_proj.weight", {16, cols}),
      bf16_tensor(layer + "self_attn.v_proj.weight", {16, cols}),
      bf16_tensor(layer + "self_attn.q_proj.bias", {rows}),
  };
  for (const char* expert : {"mlp.experts.0.", "mlp.experts.1."}) {
    for (const char* name : {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}) {
      tensors.push_back(bf16_tensor(layer + expert + name, {rows, cols}));
    }
  }
  return tensors;
}

inline constexpr const char* kTinyConfig =
    "{\n  \"model_type\": \"qwen3_moe\",\n  \"rms_norm_eps\": 1e-06\n}\n";

// A directory with the tensors in one file, config.json and a tokenizer.
inline void write_model(const std::string& directory, const std::vector<TestTensor>& tensors) {
  std::filesystem::create_directory(directory);
  write_model_file(directory + "/model.safetensors", tensors);
  write_file(directory + "/config.json", kTinyConfig);
  write_file(directory + "/tokenizer.json", "{\"tokens\": []}");
}

inline std::vector<std::byte> stored_bytes(const Checkpoint& checkpoint, const std::string& name) {
  const CheckpointTensor* tensor = checkpoint.find(name);
  if (tensor == nullptr) {
    ADD_FAILURE() << "no tensor " << name;
    return {};
  }
  std::vector<std::byte> bytes(tensor->info.size_bytes);
  checkpoint.read(*tensor, 0, bytes);
  return bytes;
}

template <typename T>
std::vector<T> stored_as(const Checkpoint& checkpoint, const std::string& name) {
  const std::vector<std::byte> bytes = stored_bytes(checkpoint, name);
  std::vector<T> elements(bytes.size() / sizeof(T));
  std::memcpy(elements.data(), bytes.data(), bytes.size());
  return elements;
}

// Sorted.
inline std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(directory)) {
    names.push_back(file.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Fails unless both hold the same files with the same bytes; prints names only.
inline void expect_same_files(const std::string& a, const std::string& b) {
  ASSERT_EQ(names_in(a), names_in(b));
  for (const std::string& name : names_in(a)) {
    EXPECT_TRUE(read_file(a + "/" + name) == read_file(b + "/" + name)) << name << " of " << a;
  }
}

}  // namespace narrowfloat
