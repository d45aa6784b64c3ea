// The public routing: checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "base/int_math.h"
#include "base/name_table.h"
#include "base/throw_error.h"
#include "ops/route/route_problem.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

std::span<const RouteImpl> route_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kRouteSm90Warp, kRouteSm90Sort, kRouteSm90Given, kRouteSm80Warp, kRouteSm80Sort,
        kRouteSm80Given,
#endif
        kRouteCpuBaseline, kRouteCpuReference
  };
  return kImpls;
}

std::string to_string(const RouteProblem& problem) {
  const RoutingConfig& config = problem.config;
  constexpr std::array<std::string_view, 3> kInputs{"logits", "packed", "ids"};
  std::string text =
      fmt::format("{} {} {}, {} tokens, {} of {} experts", name(problem.dtype),
                  kInputs[static_cast<size_t>(problem.input)],
                  problem.input == RoutingInput::kLogits ? name(config.method) : "precomputed",
                  problem.tokens, config.top_k, config.experts);
  if (problem.grouped()) {
    text += fmt::format(" in {} of {} groups", config.topk_group, config.n_group);
  }
  if (config.shared_experts > 0) text += fmt::format(" + {} shared", config.shared_experts);
  return text + " on " + to_string(problem.device);
}

namespace {

const TensorView& the_input(const Routing& routing, RoutingInput* input) {
  const bool has_logits = !routing.logits.is_absent();
  const bool has_packed = !routing.packed.is_absent();
  const bool has_ids = !routing.ids.is_absent();
  if (int{has_logits} + int{has_packed} + int{has_ids} != 1) {
    throw_invalid("routing: expected exactly one of logits, packed and ids, got{}{}{}",
                  has_logits ? " logits" : "", has_packed ? " packed" : "",
                  has_ids                    ? " ids"
                  : has_logits || has_packed ? ""
                                             : " none");
  }
  *input = has_logits   ? RoutingInput::kLogits
           : has_packed ? RoutingInput::kPacked
                        : RoutingInput::kUnpacked;
  return has_logits ? routing.logits : has_packed ? routing.packed : routing.ids;
}

// rows < 0 accepts any number.
void require_shape(std::string_view argument, const TensorView& view, int64_t rows, int64_t cols) {
  require_view(argument, view);
  const bool fits = view.rank == 2 && view.shape[1] == cols && (rows < 0 || view.shape[0] == rows);
  if (fits) return;
  throw_invalid("{}: expected [{}, {}], got {}", argument,
                rows < 0 ? std::string("tokens") : fmt::to_string(rows), cols, to_string(view));
}

// Requires a dense matrix of one of the types on the device; its shape is not checked.
void require_dense_matrix(std::string_view argument, const TensorView& view, Device device,
                          std::initializer_list<DType> dtypes) {
  require_dtype(argument, view, dtypes);
  require_device(argument, view.device, device);
  require_dense(argument, view);
  require_data(argument, view);
}

void take_logits(const Routing& routing, RouteProblem* problem, RouteArgs* args) {
  const RoutingConfig& config = problem->config;
  require_shape("routing.logits", routing.logits, -1, config.experts);
  require_dtype("routing.logits", routing.logits, {DType::kF32, DType::kBF16, DType::kF16});
  problem->dtype = routing.logits.dtype;
  args->logits = routing.logits.data;
  args->logits_stride = require_rows("routing.logits", routing.logits, config.experts).stride;
  if (routing.bias.is_absent()) return;
  if (!problem->spec.takes_bias()) {
    throw_invalid("routing.bias: method {} has no bias; leave it out", name(config.method));
  }
  require_dtype("routing.bias", routing.bias, {DType::kF32, DType::kBF16});
  require_vector("routing.bias", routing.bias, routing.bias.dtype, config.experts, problem->device);
  problem->bias = routing.bias.dtype;
  args->bias = routing.bias.data;
}

void take_precomputed(const Routing& routing, RouteProblem* problem, RouteArgs* args) {
  const int64_t top_k = problem->config.top_k;
  if (problem->input == RoutingInput::kPacked) {
    require_shape("routing.packed", routing.packed, -1, top_k);
    require_dense_matrix("routing.packed", routing.packed, problem->device, {DType::kI32});
    args->packed = static_cast<const int32_t*>(routing.packed.data);
    problem->dtype = DType::kBF16;
    return;
  }
  require_shape("routing.ids", routing.ids, -1, top_k);
  require_dense_matrix("routing.ids", routing.ids, problem->device, {DType::kI32, DType::kI64});
  if (routing.ids.dtype == DType::kI64) {
    args->given_wide_ids = static_cast<const int64_t*>(routing.ids.data);
  } else {
    args->given_ids = static_cast<const int32_t*>(routing.ids.data);
  }
  if (routing.weights.is_absent()) return;
  require_shape("routing.weights", routing.weights, problem->tokens, top_k);
  require_dense_matrix("routing.weights", routing.weights, problem->device,
                       {DType::kF32, DType::kBF16});
  problem->dtype = routing.weights.dtype;
  args->given_weights = routing.weights.data;
}

// Refuses arguments that belong to another kind of input.
void refuse_strays(const Routing& routing, RoutingInput input) {
  if (input != RoutingInput::kLogits && !routing.bias.is_absent()) {
    throw_invalid("routing.bias: a precomputed routing has no bias; leave it out");
  }
  if (input != RoutingInput::kUnpacked && !routing.weights.is_absent()) {
    throw_invalid("routing.weights: expected with ids only; leave them out");
  }
}

// The implementation on a device checks ids there (moe spec 1.7).
void require_given_ids(const RouteProblem& problem, const RouteArgs& args) {
  const RoutingConfig& config = problem.config;
  const bool allows_empty = config.options.negative_one_is_empty;
  for (int64_t index = 0; index < problem.tokens * config.top_k; ++index) {
    const int32_t id = given_id(args, index);
    if ((id >= 0 && id < config.experts) || (id == -1 && allows_empty)) continue;
    throw_invalid("routing.{}: expected expert ids from 0 to {}{}, got {} at index {} (token {})",
                  args.packed != nullptr ? "packed" : "ids", config.experts - 1,
                  allows_empty ? " or -1" : "",
                  args.given_wide_ids != nullptr ? args.given_wide_ids[index] : id, index,
                  index / config.top_k);
  }
}

void take_outputs(const RouteOutputs& outputs, const RouteProblem& problem, RouteArgs* args) {
  require_shape("outputs.ids", outputs.ids, problem.tokens, problem.slots());
  require_dense_matrix("outputs.ids", outputs.ids, problem.device, {DType::kI32});
  require_shape("outputs.weights", outputs.weights, problem.tokens, problem.slots());
  require_dense_matrix("outputs.weights", outputs.weights, problem.device, {DType::kF32});
  args->ids = static_cast<int32_t*>(outputs.ids.data);
  args->weights = static_cast<float*>(outputs.weights.data);
  args->errors = outputs.errors;
  if (outputs.replay.is_absent()) return;
  if (problem.config.shared_experts > 0) {
    throw_invalid("outputs.replay: not with shared experts (config.shared_experts = {})",
                  problem.config.shared_experts);
  }
  require_shape("outputs.replay", outputs.replay, -1, problem.config.top_k);
  require_dense_matrix("outputs.replay", outputs.replay, problem.device, {DType::kI16});
  if (outputs.replay.shape[0] < problem.tokens) {
    throw_invalid("outputs.replay: expected at least {} rows, got {}", problem.tokens,
                  to_string(outputs.replay));
  }
  args->replay = static_cast<int16_t*>(outputs.replay.data);
}

void require_own_buffers(const Routing& routing, const RouteOutputs& outputs) {
  const std::array written{byte_range("outputs.ids", outputs.ids),
                           byte_range("outputs.weights", outputs.weights),
                           byte_range("outputs.replay", outputs.replay)};
  const std::array read{
      byte_range("routing.logits", routing.logits), byte_range("routing.bias", routing.bias),
      byte_range("routing.packed", routing.packed), byte_range("routing.ids", routing.ids),
      byte_range("routing.weights", routing.weights)};
  require_disjoint(written, read);
}

RouteProblem problem_of(const Routing& routing, const RoutingConfig& config) {
  check_routing_config(config);
  RouteProblem problem{.config = config};
  const TensorView& input = the_input(routing, &problem.input);
  refuse_strays(routing, problem.input);
  problem.device = input.device;
  problem.tokens = input.rank > 0 ? input.shape[0] : 0;
  if (config.n_group < 1) problem.config.n_group = 1;
  problem.spec = record_of(kRoutingMethods, config.method, "routing method").spec;
  if (!config.norm_topk) problem.spec.divisor = RoutingDivisor::kNone;
  return problem;
}

// Indices of slots are int32 (moe spec 1.8).
void require_countable(const RouteProblem& problem) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  const auto slots = checked_mul(problem.tokens, problem.slots());
  if (!slots || *slots >= kLimit) {
    throw_invalid("routing: expected fewer than 2^31 slots, got {} tokens x {}; split the tokens",
                  problem.tokens, problem.slots());
  }
}

// A call without its outputs.
RouteCall take_inputs(const Routing& routing, const RoutingConfig& config) {
  RouteCall call{.problem = problem_of(routing, config), .args = {}};
  if (call.problem.input == RoutingInput::kLogits) {
    take_logits(routing, &call.problem, &call.args);
  } else {
    take_precomputed(routing, &call.problem, &call.args);
  }
  require_countable(call.problem);
  return call;
}

}  // namespace

RouteProblem route_problem(const Routing& routing, const RoutingConfig& config) {
  return take_inputs(routing, config).problem;
}

RouteCall route_call(const Routing& routing, const RoutingConfig& config,
                     const RouteOutputs& outputs) {
  RouteCall call = take_inputs(routing, config);
  take_outputs(outputs, call.problem, &call.args);
  require_own_buffers(routing, outputs);
  return call;
}

void route(const Routing& routing, const RoutingConfig& config, const RouteOutputs& outputs,
           Stream stream) {
  const auto [problem, args] = route_call(routing, config, outputs);
  const bool is_precomputed = problem.input != RoutingInput::kLogits;
  if (is_precomputed && problem.device.type == DeviceType::kCpu) require_given_ids(problem, args);
  select("route", route_impls(), problem).run(problem, args, stream);
}

}  // namespace narrowfloat
