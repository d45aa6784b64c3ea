// See expert_names.h.
#include "layers/moe/expert_names.h"

#include <charconv>

#include <fmt/ranges.h>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

// Removes the last dotted component of `text` and returns it.
std::string_view take_last(std::string_view& text) {
  const size_t dot = text.rfind('.');
  const std::string_view last = dot == std::string_view::npos ? text : text.substr(dot + 1);
  text = dot == std::string_view::npos ? std::string_view{} : text.substr(0, dot);
  return last;
}

std::optional<int64_t> parse_index(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

std::optional<ExpertMatrix> parse_matrix(std::string_view block, std::string_view text) {
  if (block == "mlp" || block == "feed_forward") {
    if (text == "gate_proj") return ExpertMatrix::kGate;
    if (text == "up_proj") return ExpertMatrix::kUp;
    if (text == "down_proj") return ExpertMatrix::kDown;
  } else if (block == "block_sparse_moe" || block == "ffn") {
    if (text == "w1") return ExpertMatrix::kGate;
    if (text == "w3") return ExpertMatrix::kUp;
    if (text == "w2") return ExpertMatrix::kDown;
  }
  return std::nullopt;
}

void check_stacked(const LayerExperts& layer, const std::string& path) {
  if (!layer.experts.empty()) {
    throw_error(ErrorKind::kCorruptData, "{}: {}: its experts are there one by one and stacked",
                printable(path), printable(layer.block));
  }
  for (size_t matrix = 0; matrix < 2; ++matrix) {
    if (layer.stacked[matrix] != nullptr) continue;
    throw_error(ErrorKind::kCorruptData, "{}: {}: beside '{}' the {} matrices of the experts lack",
                printable(path), printable(layer.block), printable(layer.stacked[1 - matrix]->name),
                matrix == 0 ? "gate and up" : "down");
  }
}

void check_complete(const LayerExperts& layer, const std::string& path) {
  for (size_t expert = 0; expert < layer.experts.size(); ++expert) {
    for (size_t matrix = 0; matrix < 3; ++matrix) {
      if (layer.experts[expert][matrix] != nullptr) continue;
      throw_error(ErrorKind::kCorruptData, "{}: {}: expert {} lacks its {} matrix", printable(path),
                  printable(layer.block), expert, name(static_cast<ExpertMatrix>(matrix)));
    }
  }
}

}  // namespace

std::string_view name(ExpertMatrix matrix) {
  constexpr std::array<std::string_view, 3> kNames{"gate", "up", "down"};
  return kNames[static_cast<size_t>(matrix)];
}

std::optional<ExpertName> parse_expert_name(std::string_view tensor) {
  std::string_view rest = tensor;
  if (take_last(rest) != "weight") return std::nullopt;
  const std::string_view projection = take_last(rest);
  const std::optional<int64_t> expert = parse_index(take_last(rest));
  if (!expert || take_last(rest) != "experts") return std::nullopt;
  ExpertName result{.block = rest, .layer = 0, .expert = *expert, .matrix = ExpertMatrix::kGate};
  const std::optional<ExpertMatrix> matrix = parse_matrix(take_last(rest), projection);
  const std::optional<int64_t> layer = parse_index(take_last(rest));
  if (!matrix || !layer || take_last(rest) != "layers") return std::nullopt;
  result.matrix = *matrix;
  result.layer = *layer;
  return result;
}

std::optional<StackedName> parse_stacked_name(std::string_view tensor) {
  std::string_view rest = tensor;
  const std::string_view matrix = take_last(rest);
  StackedName result;
  if (matrix == "mlp1_weight" || matrix == "mlp2_weight") {
    result.block = rest;
    result.is_down = matrix == "mlp2_weight";
    if (take_last(rest) != "mlp") return std::nullopt;
    const std::optional<int64_t> layer = parse_index(take_last(rest));
    if (!layer || take_last(rest) != "block") return std::nullopt;
    result.layer = *layer;
    return result;
  }
  if (matrix != "gate_up_proj" && matrix != "down_proj") return std::nullopt;
  if (take_last(rest) != "experts") return std::nullopt;
  result.block = rest;
  result.is_down = matrix == "down_proj";
  result.is_transposed = true;
  const std::string_view block = take_last(rest);
  const std::optional<int64_t> layer = parse_index(take_last(rest));
  if (!layer || take_last(rest) != "layers") return std::nullopt;
  if (block != "mlp" && block != "feed_forward") return std::nullopt;
  result.layer = *layer;
  return result;
}

std::string stacked_bias_name(std::string_view weight) {
  constexpr std::string_view kWeight = "_weight";
  if (weight.ends_with(kWeight)) weight.remove_suffix(kWeight.size());
  return std::string(weight) + "_bias";
}

std::set<int64_t> layers_with_experts(std::span<const LogicalTensor> tensors) {
  std::set<int64_t> layers;
  for (const LogicalTensor& tensor : tensors) {
    if (const auto parsed = parse_expert_name(tensor.name)) layers.insert(parsed->layer);
    if (const auto parsed = parse_stacked_name(tensor.name)) layers.insert(parsed->layer);
  }
  return layers;
}

LayerExperts layer_experts(std::span<const LogicalTensor> tensors, int64_t layer,
                           const std::string& path) {
  LayerExperts result;
  for (const LogicalTensor& tensor : tensors) {
    const auto stacked = parse_stacked_name(tensor.name);
    if (stacked && stacked->layer == layer) {
      result.stacked[stacked->is_down ? 1 : 0] = &tensor;
      result.block = stacked->block;
    }
    const auto parsed = parse_expert_name(tensor.name);
    if (!parsed || parsed->layer != layer) continue;
    const auto expert = static_cast<size_t>(parsed->expert);
    // More experts than tensors cannot all be there; nothing is allocated for such a number.
    if (expert >= tensors.size()) {
      throw_error(ErrorKind::kCorruptData, "{}: tensor '{}': expert number {} has gaps below it",
                  printable(path), printable(tensor.name), expert);
    }
    if (expert >= result.experts.size()) result.experts.resize(expert + 1, {});
    result.experts[expert][static_cast<size_t>(parsed->matrix)] = &tensor;
    result.block = parsed->block;
  }
  if (result.stacked[0] != nullptr || result.stacked[1] != nullptr) {
    check_stacked(result, path);
  } else if (result.experts.empty()) {
    throw_invalid("layer: {} has no experts in layer {}; layers with experts: {}", printable(path),
                  layer, fmt::join(layers_with_experts(tensors), ", "));
  }
  check_complete(result, path);
  return result;
}

}  // namespace narrowfloat
