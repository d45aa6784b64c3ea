// See moe_golden_case.h.
#include "golden/moe_golden_case.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "support/fills.h"

namespace narrowfloat::testing {
namespace {

size_t element_bytes(DType dtype) { return static_cast<size_t>(bits(dtype)) / 8; }

// NumPy's resize: the elements of `pool` again and again.
OwnedTensor repeated(const OwnedTensor& pool, std::vector<int64_t> shape) {
  OwnedTensor result(pool.dtype, std::move(shape), 0);
  for (size_t i = 0; i < result.bytes.size(); ++i) {
    result.bytes[i] = pool.bytes[i % pool.bytes.size()];
  }
  return result;
}

// Packs linear scales [experts, rows, blocks] expert by expert; padding is zero.
OwnedTensor swizzled(const OwnedTensor& linear) {
  const int64_t rows = linear.shape[1];
  const int64_t blocks = linear.shape[2];
  const int64_t size = scale_image_size(ScaleLayoutId::kSwizzled128x4, rows, blocks);
  OwnedTensor packed(linear.dtype, {linear.shape[0], size}, 0);
  for (int64_t i = 0; i < linear.count(); ++i) {
    const int64_t row = i / blocks % rows;
    const int64_t tile = row / 128 * ((blocks + 3) / 4) + i % blocks / 4;
    const int64_t inside = row % 32 * 16 + row % 128 / 32 * 4 + i % blocks % 4;
    const int64_t expert = i / (rows * blocks);
    packed.bytes[static_cast<size_t>(expert * size + tile * 512 + inside)] =
        linear.bytes[static_cast<size_t>(i)];
  }
  return packed;
}

OwnedTensor transposed(const OwnedTensor& matrix) {
  const auto rows = static_cast<size_t>(matrix.shape[0]);
  const auto cols = static_cast<size_t>(matrix.shape[1]);
  const size_t width = element_bytes(matrix.dtype);
  OwnedTensor result(matrix.dtype, {matrix.shape[1], matrix.shape[0]}, 0);
  for (size_t i = 0; i < rows * cols; ++i) {
    const size_t to = i % cols * rows + i / cols;
    std::memcpy(&result.bytes[to * width], &matrix.bytes[i * width], width);
  }
  return result;
}

ScaleType scale_type(DType dtype) {
  if (dtype == DType::kF32) return ScaleType::kF32;
  return dtype == DType::kF8E8M0 ? ScaleType::kUE8M0 : ScaleType::kE4M3;
}

template <typename T>
double read(const std::vector<uint8_t>& bytes, size_t index) {
  T value;
  std::memcpy(&value, &bytes[index * sizeof(T)], sizeof(T));
  return static_cast<double>(value);
}

}  // namespace

OwnedTensor::OwnedTensor(DType type, std::vector<int64_t> extents, uint8_t fill)
    : dtype(type), shape(std::move(extents)) {
  bytes.assign(static_cast<size_t>(count()) * element_bytes(type), fill);
}

int64_t OwnedTensor::count() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

TensorView OwnedTensor::view() const {
  TensorView view;
  // Empty tensors have an address too: that of a view that is not absent.
  static uint8_t nothing[64];
  view.data = bytes.empty() ? nothing : const_cast<uint8_t*>(bytes.data());
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = shape[i];
    view.strides[i] = stride;
    stride *= shape[i];
  }
  return view;
}

double OwnedTensor::at(int64_t index) const {
  const auto i = static_cast<size_t>(index);
  switch (dtype) {
    case DType::kF64:
      return read<double>(bytes, i);
    case DType::kI32:
      return read<int32_t>(bytes, i);
    case DType::kU8:
    case DType::kF8E8M0:
      return bytes[i];
    default:
      return static_cast<double>(load_element(dtype, bytes.data(), index));
  }
}

OwnedTensor OwnedTensor::gathered(const std::vector<int64_t>& source) const {
  std::vector<int64_t> extents = shape;
  extents[0] = static_cast<int64_t>(source.size());
  OwnedTensor result(dtype, extents, 0xFF);
  const size_t width = result.bytes.size() / std::max<size_t>(1, source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] < 0) continue;
    std::memcpy(&result.bytes[i * width], &bytes[static_cast<size_t>(source[i]) * width], width);
  }
  return result;
}

MoeGoldenFile::MoeGoldenFile(std::string_view name) {
  const SafetensorsReader reader(NARROWFLOAT_SOURCE_DIR "/tests/golden/vectors/moe/" +
                                 std::string(name) + ".safetensors");
  cases_ = Json::parse(reader.metadata().at("cases"));
  for (const TensorInfo& info : reader.tensors()) {
    OwnedTensor& tensor = tensors_[info.name];
    tensor.dtype = info.dtype;
    tensor.shape = info.shape;
    tensor.bytes.resize(info.size_bytes);
    reader.read(info, 0, std::as_writable_bytes(std::span(tensor.bytes)));
  }
}

const OwnedTensor& MoeGoldenFile::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw std::out_of_range("no tensor " + name);
  return found->second;
}

RoutingConfig routing_config(const Json& router) {
  RoutingConfig config;
  config.experts = router.at("experts").get<int32_t>();
  config.top_k = router.at("top_k").get<int32_t>();
  config.method = static_cast<RoutingMethod>(router.value("method", 1));
  config.shared_experts = router.value("shared", 0);
  config.n_group = router.value("n_group", 1);
  config.topk_group = router.value("topk_group", 1);
  config.routed_scale = router.value("scale", 1.0F);
  config.norm_topk = router.value("norm_topk", true);
  config.options.weights_bf16 = router.value("weights_bf16", false);
  config.options.grouped_bias_bf16 = router.value("grouped_bias_bf16", false);
  config.options.negative_one_is_empty = router.value("negative_one_is_empty", false);
  return config;
}

MoeGoldenCase::MoeGoldenCase(const MoeGoldenFile& file, size_t index)
    : file_(file),
      prefix_(std::to_string(index) + "."),
      plan_(file.cases().at(index)),
      mode_(moe_mode_info(parse_moe_mode(plan_.at("mode").get<std::string>()))),
      experts_(plan_.at("local_experts").get<int32_t>() + plan_.at("router").value("shared", 0)) {
  const auto hidden = plan_.at("hidden").get<int64_t>();
  const auto inter = plan_.at("inter").get<int64_t>();
  const int64_t rows = activation_info(activation().kind).is_gated ? 2 * inter : inter;
  w1_ = make_matrix("w1", rows, hidden);
  w2_ = make_matrix("w2", hidden, inter);
  bias1_ = make_bias("bias1", rows);
  bias2_ = make_bias("bias2", hidden);
  if (has("x_scales")) column_scales_ = transposed(tensor("x_scales"));
  weights_.w1 = weight_view(w1_);
  weights_.w2 = weight_view(w2_);
  weights_.up_scale = per_expert("up_scale", 1);
  weights_.gate_scale = per_expert("gate_scale", 1);
  weights_.down_scale = per_expert("down_scale", 1);
  weights_.inter_multiplier = per_expert("inter_multiplier", 1);
  const Json& scalars = plan_.value("scalars", Json::object());
  if (scalars.contains("input_multiplier")) {
    weights_.input_multiplier = scalars.at("input_multiplier").get<float>();
  }
  if (!bias1_.shape.empty()) weights_.bias1 = bias1_.view();
  if (!bias2_.shape.empty()) weights_.bias2 = bias2_.view();
}

MoeGoldenCase::Matrix MoeGoldenCase::make_matrix(const std::string& name, int64_t rows,
                                                 int64_t cols) const {
  const OwnedTensor& pool = file_.tensor(name);
  Matrix matrix;
  matrix.values = repeated(pool, {experts_, rows, pool.dtype == DType::kU8 ? cols / 2 : cols});
  if (!file_.has(name + "_scales")) return matrix;
  const bool is_grid = mode_.weights == WeightFormat::kFp8Block;
  const int64_t block = is_grid ? 128 : (mode_.weights == WeightFormat::kNvfp4 ? 16 : 32);
  matrix.scale_rows = is_grid ? rows / 128 : rows;
  matrix.blocks = cols / block;
  matrix.scales =
      repeated(file_.tensor(name + "_scales"), {experts_, matrix.scale_rows, matrix.blocks});
  matrix.layout = parse_scale_layout(plan_.value("w_scales", "linear"));
  if (matrix.layout == ScaleLayoutId::kSwizzled128x4) matrix.scales = swizzled(matrix.scales);
  return matrix;
}

WeightView MoeGoldenCase::weight_view(const Matrix& matrix) const {
  WeightView view;
  view.values = matrix.values.view();
  if (matrix.blocks == 0) return view;
  view.scales = {.data = matrix.scales.view().data,
                 .type = scale_type(matrix.scales.dtype),
                 .layout = matrix.layout,
                 .device = {},
                 .batch = experts_,
                 .rows = matrix.scale_rows,
                 .blocks = matrix.blocks,
                 .capacity = matrix.scales.count()};
  return view;
}

OwnedTensor MoeGoldenCase::make_bias(const std::string& name, int64_t width) const {
  const std::string dtype = plan_.value("bias_dtype", "");
  if (dtype.empty()) return {};
  return repeated(file_.tensor(name + "_" + dtype), {experts_, width});
}

PerExpert MoeGoldenCase::per_expert(const std::string& name, float otherwise) const {
  if (has(name)) return PerExpert(tensor(name).view());
  if (plan_.contains("scalars") && plan_.at("scalars").contains(name)) {
    return plan_.at("scalars").at(name).get<float>();
  }
  return otherwise;
}

Activation MoeGoldenCase::activation() const {
  const auto kind = plan_.at("activation").get<std::string>();
  Activation activation;
  // The file's name of swiglu with all of its parameters.
  activation.kind = parse_activation(kind == "swiglu_oai" ? "swiglu" : kind);
  activation.alpha = per_expert("alpha", 1);
  activation.beta = per_expert("beta", 0);
  activation.limit_gate = per_expert("limit_gate", Activation::kNoLimit);
  activation.limit_up = per_expert("limit_up", Activation::kNoLimit);
  return activation;
}

TensorView MoeGoldenCase::view_or_absent(const std::string& name) const {
  return has(name) ? tensor(name).view() : TensorView{};
}

MoeConfig MoeGoldenCase::config() const {
  MoeConfig config;
  config.hidden = plan_.at("hidden").get<int64_t>();
  config.inter = plan_.at("inter").get<int64_t>();
  config.routing = routing_config(plan_.at("router"));
  config.expert_offset = plan_.at("expert_offset").get<int32_t>();
  config.local_experts = plan_.at("local_experts").get<int32_t>();
  config.mode = mode_.id;
  config.gate_order = parse_gate_order(plan_.at("gate_order").get<std::string>());
  config.activation = activation();
  config.weight_on_input = plan_.value("weight_on_input", false);
  config.add_fc2_bias = plan_.value("add_fc2_bias", true);
  config.out_dtype = parse_dtype(plan_.value("out_dtype", "BF16")).value();
  config.slot_dtype = parse_dtype(plan_.value("slot_dtype", "BF16")).value();
  config.token_tile = plan_.at("token_tile").get<int32_t>();
  return config;
}

MoeReferenceOptions MoeGoldenCase::reference(Accumulation accumulation) const {
  return {.accumulation = accumulation,
          .fp32_rows = plan_.value("fp32_rows", false),
          .double_quantize_fc1 = plan_.value("double_quantize_fc1", false)};
}

MoeInputs MoeGoldenCase::inputs() const {
  MoeInputs inputs;
  inputs.values = tensor("x").view();
  inputs.scales = view_or_absent("x_scales");
  inputs.row_scale = view_or_absent("x_row_scale");
  if (!inputs.scales.is_absent() && plan_.value("x_scales", "rows") == "columns") {
    inputs.scales.data = column_scales_.view().data;
    inputs.scales.strides = {1, inputs.scales.shape[0]};
  }
  return inputs;
}

Routing MoeGoldenCase::routing() const {
  return {.logits = view_or_absent("logits"),
          .bias = view_or_absent("bias"),
          .packed = view_or_absent("packed"),
          .ids = view_or_absent("ids"),
          .weights = view_or_absent("weights")};
}

RowFormat MoeGoldenCase::intermediate() const {
  return plan_.value("fp32_rows", false) ? RowFormat::kFp32 : mode_.intermediate;
}

bool MoeGoldenCase::has_coded_input() const {
  return mode_.input == RowFormat::kBf16 || plan_.value("input", "coded") == "coded";
}

}  // namespace narrowfloat::testing
