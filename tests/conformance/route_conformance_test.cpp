// Every implementation of route against cpu_reference, for every method and kind of input: the same
// bytes, logits of any bits included.
#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "narrowfloat/error.h"
#include "ops/route/route_problem.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kCasesPerMethod = 60;

RoutingConfig sample_config(RoutingMethod method, Random& random) {
  RoutingConfig config{.method = method};
  const RoutingSpec spec = kRoutingMethods[static_cast<size_t>(method)].spec;
  config.experts = random.pick({1, 2, 3, 8, 16, 72, 90, 96, 128, 160, 256, 384, 512, 1000, 4094});
  config.top_k =
      static_cast<int32_t>(random.chance(80) ? random.range(1, std::min(22, config.experts))
                                             : random.range(1, config.experts));
  config.shared_experts = random.chance(20) ? random.pick({1, 2}) : 0;
  if (spec.single) config.top_k = 1;
  if (spec.norm_optional) config.norm_topk = random.chance(50);
  if (spec.scaled) config.routed_scale = random.pick({1.0F, 2.5F, -0.5F});
  if (spec.grouped && config.experts % 8 == 0 && random.chance(80)) {
    config.n_group = random.pick({2, 4, 8, config.experts / 2});
    if (config.experts / config.n_group < 2) config.n_group = config.experts / 2;
    config.topk_group = static_cast<int32_t>(random.range(1, config.n_group));
    const int32_t kept = config.topk_group * (config.experts / config.n_group);
    config.top_k = std::min(config.top_k, kept);
  } else {
    config.n_group = random.pick({0, 1});
  }
  config.options.weights_bf16 = random.chance(30);
  config.options.grouped_bias_bf16 = random.chance(30);
  config.options.negative_one_is_empty = true;
  return config;
}

// RouteInputs of one case; what they hold follows from the seed alone.
struct RouteInputs {
  Matrix logits;
  Vector bias;
  GuardedBuffer ids;
  Matrix weights;
  Routing routing;
};

void give_logits(const RoutingConfig& config, int64_t tokens, Random& random, RouteInputs* inputs) {
  const MatrixShape shape{.dtype = random.pick({DType::kF32, DType::kBF16, DType::kF16}),
                          .rows = tokens,
                          .cols = config.experts,
                          .gap = random.chance(30) ? random.range(1, 40) : 0};
  const auto fill = static_cast<Fill>(random.range(0, kNumFills - 1));
  inputs->logits =
      Matrix::filled(shape, fill, random.bits(), {.poison = 0xFF, .guard = Guard::kPage});
  inputs->routing.logits = inputs->logits.view();
  const bool takes_bias = kRoutingMethods[static_cast<size_t>(config.method)].spec.takes_bias();
  if (!takes_bias || random.chance(30)) return;
  const DType dtype = random.pick({DType::kF32, DType::kBF16});
  inputs->bias = Vector(dtype, config.experts, {.guard = Guard::kPage});
  const auto bias_fill = random.pick({Fill::kNormal, Fill::kQuarterIntegers, Fill::kSpecials});
  fill_elements(bias_fill, dtype, random, config.experts, inputs->bias.buffer().data());
  inputs->routing.bias = inputs->bias.view();
}

void give_ids(const RoutingConfig& config, int64_t tokens, Random& random, RouteInputs* inputs) {
  const bool is_packed = random.chance(50);
  const DType dtype = !is_packed && random.chance(50) ? DType::kI64 : DType::kI32;
  const int64_t slots = tokens * config.top_k;
  inputs->ids = GuardedBuffer(slots * bits(dtype) / 8, {.guard = Guard::kPage});
  for (int64_t i = 0; i < slots; ++i) {
    int64_t id = random.range(-1, config.experts - 1);
    if (is_packed) {
      id = static_cast<int32_t>((static_cast<uint32_t>(id) << 16) | (random.bits32() & 0xFFFFU));
    }
    const auto at = static_cast<size_t>(i);
    if (dtype == DType::kI64) {
      inputs->ids.span<int64_t>()[at] = id;
    } else {
      inputs->ids.span<int32_t>()[at] = static_cast<int32_t>(id);
    }
  }
  const TensorView view = TensorView::contiguous(inputs->ids.data(), dtype, {tokens, config.top_k});
  (is_packed ? inputs->routing.packed : inputs->routing.ids) = view;
  if (is_packed || random.chance(20)) return;
  inputs->weights = Matrix::filled(
      {.dtype = random.pick({DType::kF32, DType::kBF16}), .rows = tokens, .cols = config.top_k},
      Fill::kRandomBits, random.bits(), {.guard = Guard::kPage});
  inputs->routing.weights = inputs->weights.view();
}

struct Outputs {
  std::vector<uint8_t> ids;
  std::vector<uint8_t> weights;
  std::vector<uint8_t> replay;
  std::vector<uint8_t> errors;
  bool operator==(const Outputs&) const = default;
};

struct RunStyle {
  bool on_host = false;
  bool programmatic_launch = false;
};

Outputs run(const RouteInputs& inputs, const RoutingConfig& config, int64_t tokens,
            const RunStyle& how) {
  const int64_t slots = config.top_k + config.shared_experts;
  const BufferStyle style{.poison = 0xFF};
  const GuardedBuffer ids(tokens * slots * 4, style);
  const GuardedBuffer weights(tokens * slots * 4, style);
  const GuardedBuffer replay((tokens + 2) * config.top_k * 2, style);
  const Vector errors(DType::kI64, 2);
  // Logits take any alignment of their elements on every device.
  const DeviceCopies device(
      {&inputs.logits.buffer(), &inputs.bias.buffer(), &inputs.ids, &inputs.weights.buffer(), &ids,
       &weights, &replay, &errors.buffer()},
      {.on_host = how.on_host, .alignment = 1, .programmatic_launch = how.programmatic_launch});
  const Routing routing{.logits = device.view(inputs.routing.logits),
                        .bias = device.view(inputs.routing.bias),
                        .packed = device.view(inputs.routing.packed),
                        .ids = device.view(inputs.routing.ids),
                        .weights = device.view(inputs.routing.weights)};
  RouteOutputs outputs{
      .ids = device.view(TensorView::contiguous(ids.data(), DType::kI32, {tokens, slots})),
      .weights = device.view(TensorView::contiguous(weights.data(), DType::kF32, {tokens, slots})),
      .errors = static_cast<DeviceErrors*>(device.view(errors.view()).data)};
  if (config.shared_experts == 0) {
    outputs.replay =
        device.view(TensorView::contiguous(replay.data(), DType::kI16, {tokens + 2, config.top_k}));
  }
  route(routing, config, outputs, device.stream());
  EXPECT_TRUE(device.take_back());
  EXPECT_TRUE(ids.intact() && weights.intact() && replay.intact() && errors.buffer().intact());
  return {ids.copy(), weights.copy(), replay.copy(), errors.buffer().copy()};
}

Outputs expected_outputs(const RouteInputs& inputs, const RoutingConfig& config, int64_t tokens) {
  const ForcedImplementation forced("route", "cpu_reference");
  return run(inputs, config, tokens, {.on_host = true});
}

class RouteConformance : public DeviceTest<RoutingMethod> {};

TEST_P(RouteConformance, EveryImplementationGivesTheReferencesBytes) {
  Coverage coverage;
  for_cases(kCasesPerMethod, [&](int64_t index) {
    Random random(case_seed("route" + std::string(name(GetParam())), index));
    const RoutingConfig config = sample_config(GetParam(), random);
    // The oracle passes over all experts for each one that it selects.
    const int64_t work = int64_t{config.experts} * config.top_k;
    const int64_t tokens = std::min(sample_rows(random), 1 + 2000000 / work);
    RouteInputs inputs;
    const bool from_logits = random.chance(75);
    from_logits ? give_logits(config, tokens, random, &inputs)
                : give_ids(config, tokens, random, &inputs);
    const Outputs expected = expected_outputs(inputs, config, tokens);
    for (const RouteImpl& impl : route_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::string note =
          fmt::format("{}\n  {} {} tokens, {} of {} experts, groups {}/{}",
                      repro_line("route", impl.name, index), from_logits ? "logits" : "ids", tokens,
                      config.top_k, config.experts, config.n_group, config.topk_group);
      set_crash_note(note.c_str());
      const ForcedImplementation forced("route", impl.name);
      try {
        const RunStyle how{.programmatic_launch = index % 2 == 0};
        EXPECT_TRUE(run(inputs, config, tokens, how) == expected) << note;
        coverage.ran(impl.name);
      } catch (const Error& error) {
        ASSERT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what() << "\n" << note;
        coverage.refused(impl.name, error.what());
      }
    }
    coverage.end_case(true, name(GetParam()));
  });
  coverage.report(name(GetParam()));
}

std::vector<RoutingMethod> all_methods() {
  std::vector<RoutingMethod> methods;
  for (const RoutingMethodInfo& info : all_routing_methods()) methods.push_back(info.id);
  return methods;
}

INSTANTIATE_TEST_SUITE_P(All, RouteConformance, ::testing::ValuesIn(all_methods()),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(RouteImplementations, EndWithTheOracle) {
  ASSERT_FALSE(route_impls().empty());
  EXPECT_EQ(route_impls().back().name, "cpu_reference");
}

}  // namespace
}  // namespace narrowfloat::testing
