// A file may hold many layers: tensors with the layer's name come first.
#include "cli/moe/activations.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include <fmt/format.h>

#include "cli/float_tensors.h"
#include "cli/plain_math.h"
#include "narrowfloat/error.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

// The tensor "layers.L.NAME" or "NAME"; nullptr if there is neither.
const TensorInfo* find_tensor(const SafetensorsReader& file, int64_t layer, std::string_view name) {
  const TensorInfo* of_layer = file.find(fmt::format("layers.{}.{}", layer, name));
  return of_layer != nullptr ? of_layer : file.find(name);
}

void check_shape(const SafetensorsReader& file, const TensorInfo& tensor, std::string_view rows,
                 int64_t cols) {
  if (tensor.shape.size() == 2 && tensor.shape[1] == cols) return;
  throw Error(ErrorKind::kCorruptData,
              fmt::format("{}: tensor '{}': expected [{}, {}] for this layer, got [{}]",
                          printable(file.path()), printable(tensor.name), rows, cols,
                          fmt::join(tensor.shape, ", ")));
}

}  // namespace

std::optional<std::string> default_activations(const std::string& directory) {
  const auto path = std::filesystem::path(directory) / "calibration" / "activations.safetensors";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  return path.string();
}

Activations read_activations(const std::string& path, int64_t layer, const LoadedMoe& moe,
                             int64_t max_tokens) {
  const SafetensorsReader file(path);
  const TensorInfo* rows = find_tensor(file, layer, "hidden_states");
  if (rows == nullptr) {
    throw Error(ErrorKind::kCorruptData,
                fmt::format("{}: there is neither a tensor 'layers.{}.hidden_states' nor "
                            "'hidden_states'",
                            printable(path), layer));
  }
  const int64_t hidden = moe.config().hidden;
  check_shape(file, *rows, "tokens", hidden);
  Activations result;
  result.path = path;
  result.rows = read_floats(file, *rows);
  result.tokens = rows->shape[0];
  if (max_tokens > 0) result.tokens = std::min(result.tokens, max_tokens);
  result.rows.resize(static_cast<size_t>(result.tokens * hidden));
  const int64_t experts = moe.config().routing.experts;
  if (const TensorInfo* logits = find_tensor(file, layer, "router_logits")) {
    check_shape(file, *logits, "tokens", experts);
    if (logits->shape[0] != rows->shape[0]) {
      throw Error(ErrorKind::kCorruptData,
                  fmt::format("{}: hidden_states has {} rows, router_logits {}", printable(path),
                              rows->shape[0], logits->shape[0]));
    }
    result.logits = read_floats(file, *logits);
    result.logits.resize(static_cast<size_t>(result.tokens * experts));
    result.has_stored_logits = true;
  } else {
    result.logits = router_logits(moe, result.rows);
  }
  return result;
}

std::vector<float> router_logits(const LoadedMoe& moe, std::span<const float> rows) {
  const TensorView& weight = moe.router_weight();
  const int64_t experts = weight.shape[0];
  const int64_t hidden = weight.shape[1];
  PackedMatrix packed;
  packed.pack({.data = static_cast<const float*>(weight.data),
               .rows = hidden,
               .cols = experts,
               .row_stride = 1,
               .col_stride = hidden});
  const int64_t tokens = static_cast<int64_t>(rows.size()) / hidden;
  std::vector<float> logits(static_cast<size_t>(tokens * experts));
  multiply({.a = rows.data(),
            .a_stride = hidden,
            .c = logits.data(),
            .c_stride = experts,
            .rows = tokens,
            .inner = hidden,
            .cols = experts},
           packed);
  const TensorView& bias = moe.router_logit_bias();
  if (bias.is_absent()) return logits;
  const auto* values = static_cast<const float*>(bias.data);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += values[i % static_cast<size_t>(experts)];
  return logits;
}

}  // namespace narrowfloat::cli
