// Checkpoints with the tensors of gpt-oss, tiny and with random contents, and the same contents as
// arrays. Two layers of experts; MXFP4 under the names of Hugging Face or of the original files, or
// plain BF16.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "narrowfloat/checkpoint.h"
#include "narrowfloat/moe.h"

namespace narrowfloat::testing {

enum class GptOssNames { kHuggingFace, kOriginal };

struct GptOssShape {
  int64_t hidden = 96;  // Three blocks of 32: no multiple of 128.
  int64_t inter = 160;
  int64_t experts = 6;
  int64_t top_k = 2;
};

struct FileTensor {
  TensorSpec spec;
  std::vector<uint8_t> data;
};

// One layer as arrays, canonical: gate and up rows interleaved.
struct GptOssLayer {
  std::vector<uint8_t> w1, w1_scales;                // [E, 2I, H/2], [E, 2I, H/32]
  std::vector<uint8_t> w2, w2_scales;                // [E, H, I/2], [E, H, I/32]
  std::vector<uint16_t> bias1, bias2;                // BF16 [E, 2I], [E, H]
  std::vector<uint16_t> router_weight, router_bias;  // BF16 [E, H], [E]

  // Into this object.
  [[nodiscard]] MoeWeights weights(const GptOssShape& shape) const;
};

class GptOssModel {
 public:
  explicit GptOssModel(const GptOssShape& shape = {}, uint64_t seed = 1);

  [[nodiscard]] const GptOssShape& shape() const { return shape_; }
  [[nodiscard]] const GptOssLayer& layer(int64_t index) const {
    return layers_[static_cast<size_t>(index)];
  }
  // The configuration with which a layer of the model is prepared.
  [[nodiscard]] MoeConfig config() const;

  [[nodiscard]] std::vector<FileTensor> tensors(GptOssNames names) const;
  // The experts decoded to BF16 by the formula, as the plain model of that naming has them.
  [[nodiscard]] std::vector<FileTensor> plain_tensors(GptOssNames names) const;
  // The config of the published models, with this shape; is_quantized: declares the quantization.
  [[nodiscard]] std::string config_text(GptOssNames names, bool is_quantized = true) const;

  // A directory with one file and config.json.
  void write(const std::string& directory, GptOssNames names = GptOssNames::kHuggingFace) const;

 private:
  GptOssShape shape_;
  std::vector<GptOssLayer> layers_;
};

void write_tensors(const std::string& path, const std::vector<FileTensor>& tensors);

}  // namespace narrowfloat::testing
