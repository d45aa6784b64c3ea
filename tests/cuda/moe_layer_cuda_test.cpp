// The whole layer on a GPU against the CPU (moe spec 12, 13): every mode with every activation,
// gate order and routing method, exact cases to the bit, shards, shared experts, precomputed
// routings, every plain and coded input, and a soak over everything at once.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "cuda/gpu_test.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/fills.h"
#include "support/gpu_moe.h"
#include "support/moe_batch.h"
#include "support/moe_exact_case.h"
#include "support/moe_sampling.h"
#include "tensor/row_format.h"

namespace narrowfloat::testing {
namespace {

class MoeOnTheGpu : public GpuTestWith<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, MoeOnTheGpu, ::testing::ValuesIn(every_gpu_moe_mode()),
                         mode_test_name);

void expect_gpu_agrees(MoeCase& layer_case, const GpuMoeStyle& style = {}) {
  const MoeResult actual = run_on_gpu(prepare_on_gpu(layer_case), layer_case, style);
  expect_close(layer_case, layer_case.config(), fp64_reference(layer_case), actual);
}

// One that does every activation of a mode.
std::string pinned_activation(MoeMode mode) {
  return gpu_implementation(has_row_scale(moe_mode_info(mode).intermediate) ? "token_rows"
                                                                            : "portable");
}

std::string activation_of(const MoeConfig& config, int64_t tokens = 3) {
  for (const Explanation& stage : explain_moe(config, tokens, gpu())) {
    if (stage.op == "activation") return stage.chosen;
  }
  return "";
}

// 11 activations; method and order meet every mode and activation over the modes.
TEST_P(MoeOnTheGpu, AgreesWithTheCpuForEveryActivationMethodAndOrder) {
  const auto mode = static_cast<size_t>(GetParam());
  const auto methods = all_routing_methods();
  for (size_t j = 0; j < all_activations().size(); ++j) {
    const LayerAxes axes{.mode = GetParam(),
                         .activation = all_activations()[j].id,
                         .method = methods[(mode + j) % methods.size()].id,
                         .order = static_cast<GateOrder>((mode + 2 * j) % 3)};
    for_cases(2, [&](int64_t index) {
      SCOPED_TRACE(to_string(axes) + " case " + std::to_string(index));
      const uint64_t seed = case_seed("gpu" + to_string(axes), index);
      Random random(seed);
      const auto layer_case =
          sample_moe_case(axes, sample_moe_shape(axes.mode, random), random, seed);
      expect_gpu_agrees(*layer_case, {.programmatic_launch = index % 2 == 1});
    });
  }
}

TEST_P(MoeOnTheGpu, AgreesForEveryNumberOfTokens) {
  for (const int64_t tokens : {0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 300}) {
    SCOPED_TRACE(tokens);
    const MoeShape shape{.tokens = tokens, .hidden = 256, .inter = 384, .experts = 16, .top_k = 4};
    MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 21);
    expect_gpu_agrees(layer_case);
  }
}

// Sums of integers and scales of 1 (moe spec 12.4).
TEST_P(MoeOnTheGpu, GivesTheBitsOfExactCases) {
  const int64_t unit = moe_mode_info(GetParam()).multiple;
  for (const int64_t tokens : {1, 9, 70}) {
    for (const int64_t blocks : {2, 3, 5}) {
      const MoeShape shape{.tokens = tokens,
                           .hidden = std::max<int64_t>(2 * 16, unit * blocks),
                           .inter = std::max<int64_t>(2 * 16, unit * (blocks + 1)),
                           .experts = 5,
                           .top_k = 3,
                           .shared_experts = static_cast<int32_t>(blocks % 2)};
      ExactMoe exact(GetParam(), shape, static_cast<uint64_t>(tokens * blocks));
      const MoeResult expected = exact.layer_case().run();
      ASSERT_EQ(fp64_reference(exact.layer_case()), expected) << "the case is not exact";
      EXPECT_EQ(run_on_gpu(prepare_on_gpu(exact.layer_case()), exact.layer_case()), expected)
          << tokens << " tokens, hidden " << shape.hidden;
    }
  }
}

TEST_P(MoeOnTheGpu, ShardsHoldTheRowsOfTheWholeLayer) {
  const MoeShape shape{.tokens = 33, .hidden = 256, .inter = 128, .experts = 12, .top_k = 3};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 4);
  layer_case.add_biases();
  layer_case.add_per_expert_parameters();
  layer_case.config().token_tile = 8;
  const MoeResult whole = run_on_gpu(prepare_on_gpu(layer_case), layer_case);
  const auto* const ids = reinterpret_cast<const int32_t*>(whole.topk_ids.data());
  for (const auto& [offset, count] : {std::pair{0, 4}, {4, 8}, {7, 1}}) {
    MoeConfig config = layer_case.config();
    config.expert_offset = offset;
    config.local_experts = count;
    for (PerExpert* parameter : {&config.activation.alpha, &config.activation.beta,
                                 &config.activation.limit_gate, &config.activation.limit_up}) {
      if (parameter->values.is_absent()) continue;
      parameter->values.data = static_cast<float*>(parameter->values.data) + offset;
      parameter->values.shape[0] = count;
    }
    const MoeResult part =
        run_on_gpu(prepare_on_gpu(layer_case.shard(offset, count), config), layer_case);
    const auto* const rows = reinterpret_cast<const int32_t*>(part.slot_to_row.data());
    for (size_t slot = 0; slot < part.slot_to_row.size() / 4; ++slot) {
      const bool is_local = ids[slot] >= offset && ids[slot] < offset + count;
      ASSERT_EQ(rows[slot] >= 0, is_local);
      const size_t row_bytes = static_cast<size_t>(shape.hidden) * 2;
      if (!is_local) continue;
      ASSERT_EQ(std::memcmp(&part.slot_rows[slot * row_bytes], &whole.slot_rows[slot * row_bytes],
                            row_bytes),
                0)
          << "slot " << slot;
    }
  }
}

TEST_P(MoeOnTheGpu, TakesPrecomputedRoutings) {
  const MoeShape shape{.tokens = 19, .hidden = 128, .inter = 128, .experts = 8, .top_k = 4};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 12);
  Random random(12);
  std::vector<int32_t> ids(19 * 4);
  std::vector<float> weights(19 * 4);
  for (size_t i = 0; i < ids.size(); ++i) {
    // Empty slots, and experts twice in a token.
    ids[i] = static_cast<int32_t>(random.range(-1, 7));
    weights[i] = random.normal();
  }
  std::fill_n(ids.begin(), 4, -1);
  layer_case.config().routing.options.negative_one_is_empty = true;
  layer_case.routing() = {};
  layer_case.routing().ids = TensorView::contiguous(ids.data(), DType::kI32, {19, 4});
  layer_case.routing().weights = TensorView::contiguous(weights.data(), DType::kF32, {19, 4});
  expect_gpu_agrees(layer_case);
}

// Ids and bf16 weights in one word each, and apart.
TEST_P(MoeOnTheGpu, PackedAndUnpackedRoutingsAgree) {
  const MoeShape shape{.tokens = 11, .hidden = 128, .inter = 128, .experts = 8, .top_k = 3};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 13);
  Random random(13);
  std::vector<int32_t> packed;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (int i = 0; i < 33; ++i) {
    const auto weight = static_cast<uint16_t>(element_bits(DType::kBF16, random.normal()));
    ids.push_back(static_cast<int32_t>(random.range(0, 7)));
    packed.push_back(ids.back() << 16 | weight);
    weights.push_back(load_element(DType::kBF16, &weight, 0));
  }
  const MoeLayer layer = prepare_on_gpu(layer_case);
  layer_case.routing() = {};
  layer_case.routing().packed = TensorView::contiguous(packed.data(), DType::kI32, {11, 3});
  const MoeResult from_packed = run_on_gpu(layer, layer_case);
  layer_case.routing() = {};
  layer_case.routing().ids = TensorView::contiguous(ids.data(), DType::kI32, {11, 3});
  layer_case.routing().weights = TensorView::contiguous(weights.data(), DType::kF32, {11, 3});
  EXPECT_EQ(run_on_gpu(layer, layer_case), from_packed);
}

TEST_P(MoeOnTheGpu, SlotsCombinedAfterwardsAreTheOutput) {
  const MoeShape shape{.tokens = 23, .hidden = 256, .inter = 128, .experts = 8, .top_k = 3};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 14);
  const MoeLayer layer = prepare_on_gpu(layer_case);
  const MoeResult expected = run_on_gpu(layer, layer_case);
  const GpuMoeRun run(layer, layer_case);
  const CudaStream stream;
  run.poison(0x5A);
  run.queue_slots(stream.get());
  stream.synchronize();
  MoeResult slots = run.take();
  EXPECT_EQ(slots.out, std::vector<uint8_t>(expected.out.size(), 0x5A));
  run.queue_combine(stream.get());
  stream.synchronize();
  EXPECT_EQ(run.take(), expected);
}

TEST_P(MoeOnTheGpu, CodesEveryPlainInput) {
  const MoeModeInfo& mode = moe_mode_info(GetParam());
  if (mode.input == RowFormat::kBf16) GTEST_SKIP() << "bf16 rows are not coded";
  const MoeShape shape{.tokens = 10, .hidden = 384, .inter = 128, .experts = 4, .top_k = 2};
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const bool per_expert : {false, true}) {
      MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 2);
      if (per_expert && !layer_case.weights().input_multiplier) continue;
      std::vector<uint8_t> x(10 * 384 * 4);
      Random random(8);
      for (int64_t i = 0; i < 10 * 384; ++i) {
        store_element(dtype, element_bits(dtype, random.normal()), i, x.data());
      }
      layer_case.inputs().values = TensorView::contiguous(x.data(), dtype, {10, 384});
      std::vector<float> each(4);
      if (per_expert) {
        const float base = layer_case.weights().input_multiplier->value;
        std::iota(each.begin(), each.end(), 1.0F);
        for (float& value : each) value *= 0.3F * base;
        layer_case.weights().input_multiplier =
            PerExpert(TensorView::contiguous(each.data(), DType::kF32, {4}));
      }
      expect_gpu_agrees(layer_case);
    }
  }
}

TEST_P(MoeOnTheGpu, GivesZerosWithoutLocalExperts) {
  const MoeShape shape{.tokens = 9, .hidden = 128, .inter = 128, .experts = 8, .top_k = 2};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 5);
  std::vector<int32_t> ids(18, 1);
  layer_case.routing() = {};
  layer_case.routing().ids = TensorView::contiguous(ids.data(), DType::kI32, {9, 2});
  MoeConfig config = layer_case.config();
  config.expert_offset = 4;
  config.local_experts = 4;
  const MoeResult result = run_on_gpu(prepare_on_gpu(layer_case.shard(4, 4), config), layer_case);
  EXPECT_EQ(result.out, std::vector<uint8_t>(result.out.size()));
}

// The weights are laid out for a fused activation all the same.
TEST_P(MoeOnTheGpu, AgreesWithAnActivationOfItsOwn) {
  for (const int64_t tokens : {3, 70}) {
    for (const GateOrder order :
         {GateOrder::kUpGate, GateOrder::kGateUp, GateOrder::kInterleaved}) {
      const MoeShape shape{.tokens = tokens, .hidden = 256, .inter = 384, .experts = 4, .top_k = 2};
      MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 17);
      layer_case.config().gate_order = order;
      layer_case.add_biases();
      const MoeResult expected = fp64_reference(layer_case);
      const ForcedImplementation pinned("activation", pinned_activation(GetParam()));
      expect_close(layer_case, layer_case.config(), expected,
                   run_on_gpu(prepare_on_gpu(layer_case), layer_case));
    }
  }
}

TEST_P(MoeOnTheGpu, NanStaysInItsToken) {
  const MoeShape shape{.tokens = 21, .hidden = 256, .inter = 128, .experts = 4, .top_k = 2};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 5);
  const MoeLayer layer = prepare_on_gpu(layer_case);
  const MoeResult clean = run_on_gpu(layer, layer_case);
  std::fill_n(layer_case.x().begin() + 3 * 256, 256, uint16_t{0x7FC0});
  const MoeResult result = run_on_gpu(layer, layer_case);
  const size_t row_bytes = 256 * 2;
  for (size_t token = 0; token < 21; ++token) {
    const bool is_same =
        std::memcmp(&result.out[token * row_bytes], &clean.out[token * row_bytes], row_bytes) == 0;
    EXPECT_EQ(is_same, token != 3) << token;
  }
}

TEST_P(MoeOnTheGpu, ReportsIdsThatDoNotExist) {
  const MoeShape shape{.tokens = 3, .hidden = 128, .inter = 128, .experts = 8, .top_k = 2};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 5);
  std::vector<int32_t> ids{0, 7, 3, 8, -1, 2147483647};
  layer_case.routing() = {};
  layer_case.routing().ids = TensorView::contiguous(ids.data(), DType::kI32, {3, 2});
  const MoeLayer layer = prepare_on_gpu(layer_case);
  const GpuMoeRun run(layer, layer_case);
  run.poison(0xFF);
  const CudaStream stream;
  run.queue(stream.get());
  stream.synchronize();
  const DeviceErrors errors = run.errors();
  EXPECT_EQ(errors.count, 3U);
  EXPECT_EQ(errors.kind, 1U);
  EXPECT_EQ(errors.first_index, 3);
  const MoeResult result = run.take();
  const std::vector<uint8_t> zeros(128 * 2);
  EXPECT_EQ(std::memcmp(&result.out[2 * 128 * 2], zeros.data(), zeros.size()), 0);
}

class MoeGpuChecks : public GpuTest {};

TEST_F(MoeGpuChecks, HostTensorsAreRefused) {
  const MoeShape shape{.tokens = 3, .hidden = 128, .inter = 128, .experts = 4, .top_k = 2};
  MoeCase layer_case(MoeMode::kBf16, shape, Activation::swiglu(), 5);
  expect_error(ErrorKind::kInvalidArgument, {"weights.w1.values", "cuda:0", "cpu", "copy it there"},
               [&] { (void)MoeLayer::prepare(layer_case.weights(), layer_case.config(), gpu()); });
  const MoeLayer layer = prepare_on_gpu(layer_case);
  expect_error(ErrorKind::kInvalidArgument, {"cuda:0", "cpu"}, [&] { layer_case.run(layer); });
}

TEST_F(MoeGpuChecks, WhatIsRefusedWritesNothing) {
  const MoeShape shape{.tokens = 3, .hidden = 128, .inter = 128, .experts = 4, .top_k = 2};
  MoeCase layer_case(MoeMode::kFp8Block, shape, Activation::swiglu(), 5);
  const GpuMoeRun run(prepare_on_gpu(layer_case), layer_case);
  run.poison(0xFF);
  const CudaStream stream;
  expect_error(ErrorKind::kInvalidArgument, {"outputs.out", "16 bytes"},
               [&] { run.queue_first_cols(125, stream.get()); });
  stream.synchronize();
  const MoeResult result = run.take();
  for (const std::vector<uint8_t>* bytes :
       {&result.out, &result.expert_weights, &result.topk_ids, &result.slot_to_row}) {
    EXPECT_EQ(*bytes, std::vector<uint8_t>(bytes->size(), 0xFF));
  }
}

// 600 million tokens of two slots: 2^31 groups of 128 columns of the activation, or more.
TEST_F(MoeGpuChecks, RowsThatAStageCannotCountAreRefusedWithTheWorkspace) {
  const MoeShape shape{.tokens = 3, .hidden = 128, .inter = 128, .experts = 4, .top_k = 2};
  MoeCase layer_case(MoeMode::kFp8Block, shape, Activation::swiglu_step(7.0F), 5);
  const MoeLayer layer = prepare_on_gpu(layer_case);
  expect_error(ErrorKind::kUnsupported, {"activation", "2^31"},
               [&] { (void)layer.required_workspace(600'000'000); });
}

TEST_F(MoeGpuChecks, ExplainNamesTheImplementationsOfTheDevice) {
  const MoeShape shape{.tokens = 3, .hidden = 128, .inter = 128, .experts = 4, .top_k = 2};
  for (const MoeMode mode : every_gpu_moe_mode()) {
    MoeCase layer_case(mode, shape, Activation::swiglu(), 5);
    for (const Explanation& stage : explain_moe(layer_case.config(), 3, gpu())) {
      // Portable code has the three operations in its place.
      if (stage.op == "route_permute" && !gpu_has_own_code()) {
        EXPECT_EQ(stage.chosen, "") << name(mode);
        continue;
      }
      // It fuses the activation with rows of bf16.
      const RowFormat rows = moe_mode_info(mode).intermediate;
      const bool is_fused = stage.op == "activation" &&
                            (gpu_has_own_code() || rows == RowFormat::kBf16 || has_row_scale(rows));
      EXPECT_TRUE(is_fused ? stage.chosen == "fused into grouped_gemm"
                           : stage.chosen.starts_with(gpu_implementation("")))
          << name(mode) << " " << stage.op << " " << stage.chosen;
    }
  }
}

TEST_F(MoeGpuChecks, OtherActivationsAreStagesOfTheirOwn) {
  const MoeShape shape{.tokens = 3, .hidden = 128, .inter = 128, .experts = 4, .top_k = 2};
  for (const MoeMode mode : every_gpu_moe_mode()) {
    MoeCase layer_case(mode, shape, Activation::swiglu_step(7.0F), 5);
    EXPECT_TRUE(activation_of(layer_case.config()).starts_with(gpu_implementation("")))
        << name(mode);
    layer_case.config().activation = Activation::swiglu();
    const ForcedImplementation pinned("activation", pinned_activation(mode));
    EXPECT_EQ(activation_of(layer_case.config()), pinned_activation(mode)) << name(mode);
  }
}

// Halves that lie apart, with one value for all experts, run the kernel with the hardware's
// exponential; all other layers run the portable one.
TEST_F(MoeGpuChecks, LayersOfFp8BlocksWithLargeTilesChooseTheirSwiglu) {
  for (const int64_t tokens : {40, 300}) {
    const MoeShape shape{.tokens = tokens, .hidden = 256, .inter = 384, .experts = 4, .top_k = 2};
    for (const GateOrder order :
         {GateOrder::kUpGate, GateOrder::kGateUp, GateOrder::kInterleaved}) {
      for (const int parameters : {0, 1, 2}) {  // None, for all experts, for each expert.
        SCOPED_TRACE(std::string(name(order)) + " " + std::to_string(parameters));
        MoeCase layer_case(
            MoeMode::kFp8Block, shape,
            parameters == 0 ? Activation::swiglu() : Activation::swiglu_oai(1.702F, 1.0F, 2.0F),
            23);
        if (parameters == 2) layer_case.add_per_expert_parameters();
        layer_case.config().gate_order = order;
        layer_case.config().token_tile = 128;
        const bool streams = order != GateOrder::kInterleaved && parameters != 2;
        EXPECT_EQ(activation_of(layer_case.config(), tokens),
                  gpu_implementation(streams ? "swiglu" : "portable"));
        expect_gpu_agrees(layer_case);
      }
    }
  }
}

// 2.3e9 elements of slots' results (moe spec 13.3).
TEST_F(MoeGpuChecks, OffsetsHave64Bits) {
  const MoeShape shape{.tokens = 40960, .hidden = 7168, .inter = 32, .experts = 8, .top_k = 8};
  MoeCase layer_case(MoeMode::kMxfp4Mxfp8, shape, Activation::swiglu(), 6);
  const GpuMoeRun run(prepare_on_gpu(layer_case), layer_case);
  run.poison(0xFF);
  const CudaStream stream;
  run.queue(stream.get());
  stream.synchronize();
  constexpr int64_t kChecked = 3;
  const MoeLayer reference = layer_case.prepare();
  for (const int64_t begin : {int64_t{0}, shape.tokens / 2 + 1, shape.tokens - kChecked}) {
    MoeInputs& inputs = layer_case.inputs();
    TensorView& logits = layer_case.routing().logits;
    inputs.values.data = layer_case.x().data() + begin * shape.hidden;
    logits.data = layer_case.logits().data() + begin * shape.experts;
    inputs.values.shape[0] = logits.shape[0] = kChecked;
    const std::vector<float> expected =
        as_floats(layer_case.run(reference).out, layer_case.config().out_dtype);
    EXPECT_LE(distance(run.output_of(begin, kChecked), expected, shape.hidden).rel, 2e-2) << begin;
  }
}

// Everything at once: four layers a mode, 144 with NARROWFLOAT_CONFORMANCE_CASES=36.
class MoeSoak : public GpuTestWith<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, MoeSoak, ::testing::ValuesIn(every_gpu_moe_mode()), mode_test_name);

MoeShape soak_shape(MoeMode mode, Random& random) {
  const int64_t unit = moe_mode_info(mode).multiple;
  MoeShape shape;
  shape.tokens = random.pick<int64_t>({0, 1, 1, 2, 5, 8, 16, 31, 64, 65, 130, 300});
  const auto extent = [&] {
    return random.chance(50) ? 128 * random.range(1, 5) : unit * random.range(1, 640 / unit);
  };
  shape.hidden = extent();
  shape.inter = extent();
  shape.experts = 8 * static_cast<int32_t>(random.range(1, 6));
  shape.top_k = static_cast<int32_t>(random.range(1, 6));
  return shape;
}

// Routings of moe spec 13.2 in place of the drawn logits.
void skew_logits(MoeCase& layer_case, Random& random) {
  const int choice = static_cast<int>(random.range(0, 5));
  const auto experts = static_cast<size_t>(layer_case.shape().experts);
  for (size_t i = 0; i < layer_case.logits().size(); ++i) {
    float& logit = layer_case.logits()[i];
    const auto expert = static_cast<float>(i % experts);
    if (choice == 0) logit = 0.0F;                             // Ties everywhere.
    if (choice == 1) logit = -expert;                          // The same experts.
    if (choice == 2) logit -= 3.0F * std::log(1.0F + expert);  // Zipf.
    if (choice == 3) logit = std::nearbyint(logit);            // Some ties.
  }
}

TEST_P(MoeSoak, RandomLayersAgreeWithTheCpu) {
  constexpr int64_t kLayersAMode = 4;
  for_cases(kLayersAMode, [&](int64_t index) {
    const uint64_t seed = case_seed("soak" + std::string(name(GetParam())), index);
    Random random(seed);
    const LayerAxes axes{.mode = GetParam(),
                         .activation = random.pick(all_activations()).id,
                         .method = random.pick(all_routing_methods()).id,
                         .order = static_cast<GateOrder>(random.range(0, 2))};
    SCOPED_TRACE(to_string(axes) + " soak case " + std::to_string(index));
    const auto layer_case = sample_moe_case(axes, soak_shape(axes.mode, random), random, seed);
    skew_logits(*layer_case, random);
    if (random.chance(30)) layer_case->config().token_tile = 1 << random.range(0, 7);
    expect_gpu_agrees(*layer_case, {.poison = random.chance(50) ? uint8_t{0xFF} : uint8_t{0x7F},
                                    .programmatic_launch = random.chance(50)});
  });
}

}  // namespace
}  // namespace narrowfloat::testing
