// See report_data.h.
#include "cli/report_data.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>

#include <fmt/format.h>

#include "cli_common/output.h"

namespace narrowfloat::cli {
namespace {

// Components before the number of a layer, as model code spells them.
constexpr std::array<std::string_view, 4> kLayerWords = {"layers", "h", "block", "blocks"};

std::vector<std::string_view> components_of(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::optional<int64_t> number_of(std::string_view text) {
  int64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc{} || result.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

// The place of the layer's number; the number of components if there is none.
size_t layer_position(const std::vector<std::string_view>& parts) {
  for (size_t i = 1; i < parts.size(); ++i) {
    const bool is_layer =
        std::find(kLayerWords.begin(), kLayerWords.end(), parts[i - 1]) != kLayerWords.end();
    if (is_layer && number_of(parts[i])) return i;
  }
  return parts.size();
}

double bits_of(uint64_t size_bytes, int64_t elements) {
  return elements == 0 ? 0 : 8 * static_cast<double>(size_bytes) / static_cast<double>(elements);
}

// The factor of the whole tensor in the direction that multiplies.
double global_factor(const CheckedTensor& checked) {
  const double stored = checked.statistics->global_scale;
  const bool divides = checked.tensor.convention == Convention::kNvfp4CompressedTensors;
  return divides ? 1 / stored : stored;
}

void add_to_type(const CheckedTensor& checked, ReportData& data) {
  const LogicalTensor& tensor = checked.tensor;
  const std::string kind = kind_of_tensor(tensor);
  TypeFacts& type = (tensor.convention ? data.quantized : data.kept)[type_of(tensor.name)];
  type.kind = type.tensors == 0 || type.kind == kind ? kind : "several";
  ++type.tensors;
  type.elements += tensor.num_elements();
  type.size_bytes += tensor.size_bytes;
  const int64_t layer = layer_of(tensor.name).value_or(0);
  if (checked.figures && std::isfinite(checked.figures->sqnr_db)) {
    type.sqnr_db.add(checked.figures->sqnr_db);
    type.by_layer[layer].add(checked.figures->sqnr_db);
  }
  if (checked.statistics && checked.statistics->global_scale > 0 &&
      checked.statistics->global_scale != 1) {
    type.scales_by_layer[layer].add(std::log2(global_factor(checked)));
  }
}

std::string declared_text(const Checkpoint& checkpoint) {
  const Json config = Json::parse(checkpoint.config_text(), nullptr, false);
  if (!config.is_object() || !config.contains("quantization_config")) return "";
  Json quantization = config["quantization_config"];
  if (!quantization.is_object()) return "";
  for (const char* list : {"ignore", "modules_to_not_convert", "exclude_modules"}) {
    if (quantization.contains(list) && quantization[list].is_array()) {
      quantization[list] = fmt::format("({} modules)", quantization[list].size());
    }
  }
  return quantization.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

void Spread::add(double value) {
  least = count == 0 ? value : std::min(least, value);
  most = count == 0 ? value : std::max(most, value);
  sum += value;
  ++count;
}

double TypeFacts::bits_per_weight() const { return bits_of(size_bytes, elements); }

void SizeFacts::add(const LogicalTensor& tensor) {
  ++tensors;
  elements += tensor.num_elements();
  size_bytes += tensor.size_bytes;
}

double SizeFacts::bits_per_weight() const { return bits_of(size_bytes, elements); }

std::vector<const CheckedTensor*> ReportData::worst() const {
  std::vector<const CheckedTensor*> tensors;
  for (const CheckedTensor& checked : check.tensors) {
    if (checked.figures) tensors.push_back(&checked);
  }
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto* a, const auto* b) {
    return a->figures->relative_error > b->figures->relative_error;
  });
  return tensors;
}

ReportData gather_report(const std::string& path, const CheckCheckpointOptions& options) {
  ReportData data;
  data.path = path;
  data.against = options.against;
  const std::filesystem::path place = std::filesystem::path(path).lexically_normal();
  data.title = (place.has_filename() ? place.filename() : place.parent_path().filename()).string();
  data.check = check_checkpoint(path, options);
  const Checkpoint checkpoint(path);
  for (const SafetensorsReader& shard : checkpoint.shards()) {
    data.files.push_back({std::filesystem::path(shard.path()).filename().string(),
                          shard.file_size(), shard.tensors().size()});
  }
  data.declared = declared_text(checkpoint);
  if (!options.against.empty()) {
    const Checkpoint source(options.against);
    for (const SafetensorsReader& shard : source.shards()) {
      data.source_bytes += shard.file_size();
    }
  }
  for (const CheckedTensor& checked : data.check.tensors) {
    data.kinds[kind_of_tensor(checked.tensor)].add(checked.tensor);
    data.all.add(checked.tensor);
    if (checked.tensor.convention) data.quantized_total.add(checked.tensor);
    add_to_type(checked, data);
    if (!checked.requantization) continue;
    ++data.num_quantized_again;
    data.num_identical += checked.requantization->is_identical() ? 1 : 0;
  }
  return data;
}

std::string type_of(const std::string& tensor) {
  const std::vector<std::string_view> parts = components_of(tensor);
  const size_t layer = layer_position(parts);
  std::string type;
  for (size_t i = layer == parts.size() ? 0 : layer + 1; i < parts.size(); ++i) {
    if (number_of(parts[i]) || (i + 1 == parts.size() && parts[i] == "weight")) continue;
    type += (type.empty() ? "" : ".") + std::string(parts[i]);
  }
  return type.empty() ? tensor : type;
}

std::optional<int64_t> layer_of(const std::string& tensor) {
  const std::vector<std::string_view> parts = components_of(tensor);
  const size_t layer = layer_position(parts);
  if (layer == parts.size()) return std::nullopt;
  return number_of(parts[layer]);
}

std::string kind_of_tensor(const LogicalTensor& tensor) {
  return std::string(tensor.convention ? convention_info(*tensor.convention).name
                                       : name(tensor.dtype));
}

}  // namespace narrowfloat::cli
