// Mixture-of-Experts layers of the C API.
#include <algorithm>
#include <memory>
#include <vector>

#include "c_api/boundary.h"
#include "narrowfloat/checkpoint.h"
#include "narrowfloat/moe.h"
#include "narrowfloat/moe_checkpoint.h"
#include "tensor/view_checks.h"

// A layer, and the router of the checkpoint that it is from.
struct NfMoe {
  narrowfloat::MoeLayer layer;
  std::vector<float> router_weight;
  std::vector<float> router_logit_bias;
  std::vector<float> router_bias;
};

namespace narrowfloat::c_api {

namespace {

Activation activation_of(const NfMoeConfig& given) {
  Activation activation;
  activation.kind = parse_activation(text_or(given.activation, "swiglu"));
  if (given.alpha != 0) activation.alpha = given.alpha;
  if (given.beta != 0) activation.beta = given.beta;
  if (given.limit_gate != 0) activation.limit_gate = given.limit_gate;
  if (given.limit_up != 0) activation.limit_up = given.limit_up;
  return activation;
}

MoeConfig config_of(const NfMoeConfig& given) {
  MoeConfig config;
  config.hidden = given.hidden;
  config.inter = given.inter;
  config.routing.experts = given.experts;
  config.routing.top_k = given.top_k;
  config.routing.method = parse_routing_method(text_or(given.routing, "renormalize"));
  if (given.n_group != 0) config.routing.n_group = given.n_group;
  if (given.topk_group != 0) config.routing.topk_group = given.topk_group;
  if (given.routed_scale != 0) config.routing.routed_scale = given.routed_scale;
  config.expert_offset = given.expert_offset;
  config.local_experts =
      given.local_experts != 0 ? given.local_experts : given.experts - given.expert_offset;
  config.mode = parse_moe_mode(text_or(given.mode, "bf16"));
  config.gate_order = parse_gate_order(text_or(given.gate_order, "up_gate"));
  config.activation = activation_of(given);
  if (given.out_dtype != nullptr) config.out_dtype = to_dtype("config.out_dtype", given.out_dtype);
  config.fast_sums = to_bool("config.fast_sums", given.fast_sums);
  return config;
}

// Scales of weights have a type for each format, and no strides.
void require_scales(const std::string& argument, const TensorView& scales, WeightFormat format) {
  if (format == WeightFormat::kFp8Block) {
    require_dtype(argument, scales, {DType::kF32});
  } else if (format == WeightFormat::kNvfp4) {
    require_dtype(argument, scales, {DType::kU8, DType::kF8E4M3});
  } else {
    require_dtype(argument, scales, {DType::kU8, DType::kF8E8M0});
  }
  require_dense(argument, scales);
}

WeightView weight_of(const std::string& argument, const NfTensor& values, const NfTensor& scales,
                     WeightFormat format, ScaleLayoutId layout) {
  WeightView weight;
  weight.values = to_view(argument, values);
  const TensorView view = to_view(argument + "_scales", scales);
  if (view.is_absent()) return weight;
  require_scales(argument + "_scales", view, format);
  if (weight.values.rank != 3) {
    throw_invalid(argument, "expected [experts, rows, cols], got " + to_string(weight.values));
  }
  const int64_t rows = weight.values.shape[1];
  const int64_t stored = weight.values.shape[2];
  const int64_t cols = weight.values.dtype == DType::kU8 ? 2 * stored : stored;
  ScaleView& to = weight.scales;
  to.data = view.data;
  to.type = ScaleType::kUE8M0;
  to.layout = layout;
  to.device = view.device;
  to.batch = weight.values.shape[0];
  to.rows = rows;
  to.blocks = cols / 32;
  to.capacity = view.num_elements();
  if (format == WeightFormat::kNvfp4) {
    to.type = ScaleType::kE4M3;
    to.blocks = cols / 16;
  } else if (format == WeightFormat::kFp8Block) {
    to.type = ScaleType::kF32;
    to.rows = (rows + 127) / 128;
    to.blocks = (cols + 127) / 128;
  }
  return weight;
}

MoeWeights weights_of(const NfMoeWeights& given, MoeMode mode) {
  const WeightFormat format = moe_mode_info(mode).weights;
  const ScaleLayoutId layout = parse_scale_layout(text_or(given.scale_layout, "linear"));
  MoeWeights weights;
  weights.w1 = weight_of("weights.w1", given.w1, given.w1_scales, format, layout);
  weights.w2 = weight_of("weights.w2", given.w2, given.w2_scales, format, layout);
  const auto set = [](PerExpert* to, const char* argument, const NfTensor& tensor) {
    const TensorView view = to_view(argument, tensor);
    if (!view.is_absent()) *to = PerExpert(view);
  };
  set(&weights.up_scale, "weights.up_scale", given.up_scale);
  set(&weights.gate_scale, "weights.gate_scale", given.gate_scale);
  set(&weights.down_scale, "weights.down_scale", given.down_scale);
  set(&weights.inter_multiplier, "weights.inter_multiplier", given.inter_multiplier);
  const TensorView multiplier = to_view("weights.input_multiplier", given.input_multiplier);
  if (!multiplier.is_absent()) weights.input_multiplier = PerExpert(multiplier);
  weights.bias1 = to_view("weights.bias1", given.bias1);
  weights.bias2 = to_view("weights.bias2", given.bias2);
  return weights;
}

std::vector<float> floats_of(const TensorView& view) {
  if (view.is_absent()) return {};
  const auto* data = static_cast<const float*>(view.data);
  return {data, data + view.num_elements()};
}

NfTensor tensor_of(const std::vector<float>& values, int64_t rows, int64_t cols) {
  NfTensor tensor = {};
  if (values.empty()) return tensor;
  tensor.data = const_cast<float*>(values.data());
  tensor.dtype = "F32";
  tensor.device = -1;
  tensor.rank = cols == 0 ? 1 : 2;
  tensor.shape[0] = rows;
  tensor.shape[1] = cols;
  tensor.strides[0] = cols == 0 ? 1 : cols;
  tensor.strides[1] = cols == 0 ? 0 : 1;
  return tensor;
}

LoadMoeOptions options_of(const NfMoeLoadOptions& given) {
  LoadMoeOptions options;
  if (given.mode != nullptr) options.mode = parse_moe_mode(given.mode);
  if (given.input_amax != 0) options.input_amax = given.input_amax;
  if (given.inter_amax != 0) options.inter_amax = given.inter_amax;
  options.expert_offset = given.expert_offset;
  if (given.local_experts != 0) options.local_experts = given.local_experts;
  options.tensor_rank = given.tensor_rank;
  if (given.tensor_ranks != 0) options.tensor_ranks = given.tensor_ranks;
  return options;
}

}  // namespace

}  // namespace narrowfloat::c_api

namespace nf = narrowfloat;

int32_t nf_moe_prepare(const NfMoeConfig* config, const NfMoeWeights* weights, void* stream,
                       NfMoe** layer) {
  return nf::c_api::guarded([&] {
    nf::c_api::require_given("layer", layer);
    const nf::MoeConfig wanted = nf::c_api::config_of(nf::c_api::read_struct("config", config));
    const nf::MoeWeights given =
        nf::c_api::weights_of(nf::c_api::read_struct("weights", weights), wanted.mode);
    auto made = std::make_unique<NfMoe>();
    made->layer =
        nf::MoeLayer::prepare(given, wanted, given.w1.values.device, nf::c_api::to_stream(stream));
    *layer = made.release();
  });
}

int32_t nf_moe_load(const char* directory, int64_t layer_idx, const NfMoeLoadOptions* options,
                    NfMoe** layer) {
  return nf::c_api::guarded([&] {
    nf::c_api::require_given("directory", directory);
    nf::c_api::require_given("layer", layer);
    const NfMoeLoadOptions given = nf::c_api::read_optional("options", options);
    const bool fast_sums = nf::c_api::to_bool("options.fast_sums", given.fast_sums);
    const nf::LoadedMoe loaded(nf::Checkpoint(directory), layer_idx, nf::c_api::options_of(given));
    nf::MoeConfig config = loaded.config();
    if (given.out_dtype != nullptr) {
      config.out_dtype = nf::c_api::to_dtype("options.out_dtype", given.out_dtype);
    }
    config.fast_sums = fast_sums;
    auto made = std::make_unique<NfMoe>();
    made->layer = nf::MoeLayer::prepare(loaded.weights(), config);
    made->router_weight = nf::c_api::floats_of(loaded.router_weight());
    made->router_logit_bias = nf::c_api::floats_of(loaded.router_logit_bias());
    made->router_bias = nf::c_api::floats_of(loaded.router_bias());
    *layer = made.release();
  });
}

int32_t nf_moe_info(const NfMoe* layer, NfMoeInfo* info) {
  return nf::c_api::guarded([&] {
    nf::c_api::require_given("layer", layer);
    NfMoeInfo made = nf::c_api::read_struct("info", info);
    const nf::MoeConfig& config = layer->layer.config();
    made.experts = config.routing.experts;
    made.top_k = config.routing.top_k;
    made.local_experts = config.local_experts;
    made.hidden = config.hidden;
    made.inter = config.inter;
    made.weight_bytes = layer->layer.weight_bytes();
    made.mode = nf::name(config.mode).data();
    made.router_weight = nf::c_api::tensor_of(layer->router_weight, made.experts, made.hidden);
    made.router_logit_bias = nf::c_api::tensor_of(layer->router_logit_bias, made.experts, 0);
    made.router_bias = nf::c_api::tensor_of(layer->router_bias, made.experts, 0);
    std::memcpy(info, &made, std::min<size_t>(info->struct_size, sizeof(made)));
  });
}

int32_t nf_moe_workspace_bytes(const NfMoe* layer, int64_t tokens, int64_t* bytes) {
  return nf::c_api::guarded([&] {
    nf::c_api::require_given("layer", layer);
    nf::c_api::require_given("bytes", bytes);
    *bytes = layer->layer.required_workspace(tokens);
  });
}

int32_t nf_moe_run(const NfMoe* layer, const NfMoeRun* run, void* stream) {
  return nf::c_api::guarded([&] {
    nf::c_api::require_given("layer", layer);
    const NfMoeRun given = nf::c_api::read_struct("run", run);
    nf::MoeInputs inputs;
    inputs.values = nf::c_api::to_view("run.hidden", given.hidden);
    inputs.scales = nf::c_api::to_view("run.scales", given.scales);
    inputs.row_scale = nf::c_api::to_view("run.row_scale", given.row_scale);
    nf::Routing routing;
    routing.logits = nf::c_api::to_view("run.logits", given.logits);
    routing.bias = nf::c_api::to_view("run.bias", given.bias);
    routing.ids = nf::c_api::to_view("run.ids", given.ids);
    routing.weights = nf::c_api::to_view("run.weights", given.weights);
    nf::MoeOutputs outputs;
    outputs.out = nf::c_api::to_view("run.out", given.out);
    layer->layer.run(inputs, routing, outputs, nf::c_api::to_view("run.workspace", given.workspace),
                     nf::c_api::to_stream(stream));
  });
}

void nf_moe_free(NfMoe* layer) { delete layer; }
