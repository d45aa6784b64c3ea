// Largest magnitudes of activations, from the two kinds of files that have them.
#include <algorithm>
#include <cmath>
#include <map>

#include <nlohmann/json.hpp>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "checkpoint/json_guard.h"
#include "layers/statistics_file.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kMaxAmaxBytes = uint64_t{256} << 20;
constexpr std::string_view kAmaxSuffix = ".amax";
constexpr std::string_view kLinearSuffix = ".linear.amax";

std::map<std::string, float> read_json(const std::string& path) {
  const std::string text = read_file_bounded(path, kMaxAmaxBytes);
  check_json_object(text, printable(path));
  std::map<std::string, float> found;
  const nlohmann::json root = nlohmann::json::parse(text);
  for (const auto& [module, value] : root.items()) {
    const float amax = value.is_number() ? value.get<float>() : 0;
    if (!(amax > 0) || !std::isfinite(amax)) {
      throw_error(
          ErrorKind::kCorruptData,
          "{}: '{}': expected the largest magnitude of the module's input, a number above 0 "
          "in the range of F32, got {}",
          printable(path), printable(module), printable(value.dump(), 40));
    }
    found.emplace(module, amax);
  }
  return found;
}

[[noreturn]] void refuse(const SafetensorsReader& file, const TensorInfo& tensor,
                         std::string_view what) {
  throw_error(ErrorKind::kCorruptData, "{}: tensor '{}' {}", printable(file.path()),
              printable(tensor.name), what);
}

// Largest magnitudes, which may be 0.
std::vector<float> read_amax(const SafetensorsReader& file, const TensorInfo& tensor) {
  if (tensor.dtype != DType::kF32 || tensor.shape.size() != 1) {
    refuse(file, tensor, "must be F32 [experts], or [1] of a linear module");
  }
  std::vector<float> amax(tensor.size_bytes / sizeof(float));
  file.read(tensor, 0, std::as_writable_bytes(std::span(amax)));
  const bool is_good = std::all_of(amax.begin(), amax.end(),
                                   [](float value) { return std::isfinite(value) && value >= 0; });
  if (!is_good) refuse(file, tensor, "must be finite and not negative");
  return amax;
}

// A module that nothing came into has no scale.
void add_linear(const SafetensorsReader& file, const TensorInfo& tensor,
                std::map<std::string, float>& found) {
  const std::vector<float> amax = read_amax(file, tensor);
  if (amax.size() != 1) refuse(file, tensor, "must be F32 [1]");
  const size_t module_size = tensor.name.size() - kLinearSuffix.size();
  if (amax[0] > 0) found[tensor.name.substr(0, module_size)] = amax[0];
}

void add_experts(const SafetensorsReader& file, const TensorInfo& tensor, const ExpertSide& side,
                 std::map<std::string, float>& found) {
  const std::vector<float> amax = read_amax(file, tensor);
  const float largest = amax.empty() ? 0 : *std::max_element(amax.begin(), amax.end());
  if (largest == 0) refuse(file, tensor, "must be above 0 for some expert");
  const size_t suffix_size = side.name.size() + kAmaxSuffix.size();
  const std::string experts = tensor.name.substr(0, tensor.name.size() - suffix_size);
  const auto add = [&](std::string_view path) {
    for (size_t expert = 0; expert < amax.size(); ++expert) {
      for (const std::string_view module : side.modules) {
        if (module.empty()) continue;
        found[fmt::format("{}.{}.{}", path, expert, module)] =
            amax[expert] > 0 ? amax[expert] : largest;
      }
    }
  };
  add(experts);
  if (!experts.ends_with(kModelExperts)) return;
  std::string_view layer = experts;
  layer.remove_suffix(kModelExperts.size());
  for (const ExpertAlias& alias : kExpertAliases) {
    if (!layer.starts_with(alias.model_prefix)) continue;
    add(fmt::format("{}{}", layer.substr(alias.model_prefix.size()), alias.in_files));
  }
}

}  // namespace

std::map<std::string, float> read_activation_amax(const std::string& path) {
  if (path.ends_with(".json")) return read_json(path);
  const SafetensorsReader file(path);
  const auto format = file.metadata().find("format");
  std::map<std::string, float> found;
  for (const TensorInfo& tensor : file.tensors()) {
    if (tensor.name.ends_with(kLinearSuffix)) add_linear(file, tensor, found);
    for (const ExpertSide& side : kExpertSides) {
      if (tensor.name.ends_with(fmt::format("{}{}", side.name, kAmaxSuffix))) {
        add_experts(file, tensor, side, found);
      }
    }
  }
  if (format == file.metadata().end() || format->second != kStatisticsFormat || found.empty()) {
    throw_error(
        ErrorKind::kCorruptData,
        "{}: expected statistics of narrowfloat.transformers.calibrate ('MODULE.input.amax', "
        "'MODULE.inter.amax' and 'MODULE.linear.amax'), or a .json file of modules and numbers",
        printable(path));
  }
  return found;
}

}  // namespace narrowfloat
