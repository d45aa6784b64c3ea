// route_and_permute() on a GPU: the CPU's bytes of route(), permute() and quantize_activations(),
// for all methods, precomputed routings, shards, formats, and numbers of tokens around every limit.
#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "moe_shared/quantize_activations.h"
#include "narrowfloat/error.h"
#include "narrowfloat/moe.h"
#include "narrowfloat/permute.h"
#include "ops/route/route_permute.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/gpu.h"
#include "support/rows_tensor.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

struct FrontCase {
  RoutingConfig config;
  RoutingInput input = RoutingInput::kLogits;
  DType dtype = DType::kF32;  // Type of logits, or of given weights.
  int64_t tokens = 1;
  int32_t offset = 0;
  int32_t local = 0;  // 0: all experts.
  int32_t tile = 8;
  RowFormat coded = RowFormat::kBf16;
  DType rows = DType::kBF16;
  int64_t cols = 384;
  bool has_bad_ids = false;
  uint64_t seed = 1;
};

std::string to_string(const FrontCase& c) {
  return fmt::format("{} {} tokens, {} of {} experts + {}, input {}, local {} + {}, tile {}, {} {}",
                     name(c.config.method), c.tokens, c.config.top_k, c.config.experts,
                     c.config.shared_experts, static_cast<int>(c.input), c.offset, c.local, c.tile,
                     name(c.rows), name(c.coded));
}

// Everything a call reads and writes; outputs are poisoned.
class Front {
 public:
  explicit Front(const FrontCase& c)
      : case_(c),
        slots_(c.config.top_k + c.config.shared_experts),
        local_(c.local > 0 ? c.local : c.config.experts + c.config.shared_experts),
        layout_(permutation_layout(c.tokens, slots_, local_, c.tile)),
        logits_({.dtype = c.dtype, .rows = c.tokens, .cols = c.config.experts, .gap = 3}),
        bias_(DType::kF32, c.config.experts),
        given_(DType::kI32, c.tokens * c.config.top_k),
        given_weights_(c.dtype, c.tokens * c.config.top_k),
        rows_({.dtype = c.rows, .rows = c.tokens, .cols = c.cols}),
        ids_(DType::kI32, c.tokens * slots_),
        weights_(DType::kF32, c.tokens * slots_),
        replay_(DType::kI16, c.tokens * c.config.top_k),
        errors_(DType::kI64, 2, {.poison = 0x11}),
        maps_(layout_.bytes, {.poison = 0xFF}),
        coded_(c.coded, c.tokens, c.cols, {.poison = 0xFF}) {
    Random random(c.seed);
    for (int64_t token = 0; token < c.tokens; ++token) {
      const auto fill = token % 3 == 0 ? Fill::kQuarterIntegers : Fill::kNormal;
      fill_elements(fill, c.dtype, random, c.config.experts, logits_.row(token));
    }
    fill_elements(Fill::kNormal, DType::kF32, random, c.config.experts, bias_.buffer().data());
    fill_elements(Fill::kNormal, c.rows, random, c.tokens * c.cols, rows_.buffer().data());
    fill_elements(Fill::kNormal, c.dtype, random, c.tokens * c.config.top_k,
                  given_weights_.buffer().data());
    draw_ids(random);
  }

  // The arguments over copies on the device; on_host copies nothing.
  [[nodiscard]] RoutePermuteArgs arguments(const DeviceCopies& device) const {
    RoutePermuteArgs args{.routing = routing(device), .config = case_.config};
    args.outputs = {.ids = view(device, ids_, DType::kI32, slots_),
                    .weights = view(device, weights_, DType::kF32, slots_),
                    .errors = static_cast<DeviceErrors*>(device.view(errors_.view()).data)};
    if (case_.config.shared_experts == 0) {
      args.outputs.replay = view(device, replay_, DType::kI16, case_.config.top_k);
    }
    args.expert_offset = case_.offset;
    args.local_experts = local_;
    const TensorView maps =
        device.view(TensorView::contiguous(maps_.data(), DType::kI32, {layout_.bytes / 4}));
    args.permutation = layout_.bind(maps.data, maps.device);
    if (case_.coded == RowFormat::kBf16) return args;
    args.input = {.rows = device.view(rows_.view()),
                  .format = case_.coded,
                  .multiplier = has_static_multiplier() ? 2.5F : 1.0F,
                  .output = device.view(coded_.view)};
    return args;
  }

  [[nodiscard]] Buffers buffers() const {
    return {&logits_.buffer(), &bias_.buffer(), &given_.buffer(),   &given_weights_.buffer(),
            &rows_.buffer(),   &ids_.buffer(),  &weights_.buffer(), &replay_.buffer(),
            &errors_.buffer(), &maps_,          &coded_.values,     &coded_.scales,
            &coded_.row_scale};
  }

  [[nodiscard]] std::vector<std::vector<uint8_t>> outputs() const {
    return {ids_.buffer().copy(), weights_.buffer().copy(), replay_.buffer().copy(), maps_.copy(),
            coded_.bytes()};
  }
  [[nodiscard]] std::vector<uint8_t> errors() const { return errors_.buffer().copy(); }

 private:
  [[nodiscard]] bool has_static_multiplier() const {
    return case_.coded == RowFormat::kFp8Static || case_.coded == RowFormat::kNvfp4;
  }
  [[nodiscard]] TensorView view(const DeviceCopies& device, const Vector& vector, DType dtype,
                                int64_t cols) const {
    return device.view(TensorView::contiguous(vector.buffer().data(), dtype, {case_.tokens, cols}));
  }
  [[nodiscard]] Routing routing(const DeviceCopies& device) const {
    Routing routing;
    if (case_.input == RoutingInput::kLogits) {
      routing.logits = device.view(logits_.view());
      const bool takes_bias = case_.config.method == RoutingMethod::kDeepSeekV3 ||
                              case_.config.method == RoutingMethod::kMiniMax2;
      if (takes_bias) routing.bias = device.view(bias_.view());
    } else if (case_.input == RoutingInput::kPacked) {
      routing.packed = view(device, given_, DType::kI32, case_.config.top_k);
    } else {
      routing.ids = view(device, given_, DType::kI32, case_.config.top_k);
      routing.weights = view(device, given_weights_, case_.dtype, case_.config.top_k);
    }
    return routing;
  }
  void draw_ids(Random& random) const {
    constexpr std::array kBad{-1, 40000, -32768, 32767};
    int64_t index = 0;
    for (int32_t& word : given_.buffer().span<int32_t>()) {
      auto id = static_cast<int32_t>(random.range(0, case_.config.experts - 1));
      if (case_.has_bad_ids && index++ % 3 == 1) id = kBad[static_cast<size_t>(index) % 4];
      const uint32_t weight = static_cast<uint32_t>(random.range(0, 0xFFFF));
      word = case_.input == RoutingInput::kPacked
                 ? static_cast<int32_t>(static_cast<uint32_t>(id) << 16 | weight)
                 : id;
    }
  }

  FrontCase case_;
  int64_t slots_;
  int32_t local_;
  PermutationLayout layout_;
  Matrix logits_;
  Vector bias_;
  Vector given_;
  Vector given_weights_;
  Matrix rows_;
  Vector ids_;
  Vector weights_;
  Vector replay_;
  Vector errors_;
  GuardedBuffer maps_;
  RowsTensor coded_;
};

// The three operations, one after the other.
void run_separately(const RoutePermuteArgs& args, Stream stream) {
  route(args.routing, args.config, args.outputs, stream);
  permute(args.outputs.ids, args.expert_offset, args.local_experts, args.permutation, stream);
  if (args.input.rows.is_absent()) return;
  QuantizeActivationsArgs code{.rows = args.input.rows, .format = args.input.format};
  code.multiplier = args.input.multiplier;
  code.output = args.input.output;
  quantize_activations(code, stream);
}

class RoutePermute : public OwnCodeTest {
 protected:
  // on_host: expect the CPU's bytes, else those of the GPU's separate kernels, and their errors.
  static void expect_the_same(const FrontCase& c, bool on_host = true) {
    SCOPED_TRACE(to_string(c));
    const Front expected(c);
    const DeviceCopies there(expected.buffers(), {.on_host = on_host});
    run_separately(expected.arguments(there), there.stream());
    EXPECT_TRUE(there.take_back());
    for (const bool programmatic_launch : {false, true}) {
      const Front actual(c);
      const DeviceCopies device(actual.buffers(), {.programmatic_launch = programmatic_launch});
      const RoutePermuteArgs args = actual.arguments(device);
      ASSERT_TRUE(joins_routing(route_permute_problem(args)));
      route_and_permute(args, device.stream());
      EXPECT_TRUE(device.take_back());
      const auto wanted = expected.outputs();
      const auto found = actual.outputs();
      constexpr std::array kNames{"ids", "weights", "replay", "maps", "rows"};
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(found[i], wanted[i]) << kNames[i];
      EXPECT_TRUE(on_host || actual.errors() == expected.errors());
    }
  }
};

constexpr std::array kTokenCounts{1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64};

RoutingConfig config_of(RoutingMethod method) {
  RoutingConfig config{.method = method, .experts = 60, .top_k = 5};
  if (method == RoutingMethod::kLlama4) config.top_k = 1;
  if (method == RoutingMethod::kDeepSeekV3) {
    config.experts = 64;
    config.n_group = 8;
    config.topk_group = 3;
    config.routed_scale = 2.5F;
  }
  return config;
}

TEST_F(RoutePermute, EveryMethodGivesTheCpusBytes) {
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    for (const int tokens : kTokenCounts) {
      expect_the_same({.config = config_of(info.id), .tokens = tokens, .seed = 3});
    }
  }
}

TEST_F(RoutePermute, KeysOfALaneAndSharedMemoryAreFilled) {
  for (const int32_t experts : {1, 31, 128, 129, 256, 257, 512}) {
    for (const int64_t tokens : {1, 6, 17}) {
      const int32_t top_k = std::min(experts, 22);
      expect_the_same({.config = {.experts = experts, .top_k = top_k},
                       .dtype = DType::kBF16,
                       .tokens = tokens,
                       .seed = 4});
    }
  }
}

// Blocks have as many warps as tokens need, even where few keys would do with less.
TEST_F(RoutePermute, FewExpertsOfManyTokens) {
  for (const int32_t experts : {1, 2, 8, 16}) {
    for (const int32_t top_k : {1, std::min(experts, 2)}) {
      for (const int32_t shared : {0, 1}) {
        for (const int tokens : kTokenCounts) {
          RoutingConfig config{.experts = experts, .top_k = top_k, .shared_experts = shared};
          expect_the_same({.config = config, .tokens = tokens, .seed = 8});
        }
      }
    }
  }
}

TEST_F(RoutePermute, ShardsAndSharedExperts) {
  for (const auto& [offset, local] :
       std::vector<std::pair<int32_t, int32_t>>{{0, 16}, {16, 32}, {63, 1}, {1, 63}, {0, 0}}) {
    for (const int tokens : kTokenCounts) {
      FrontCase c{.config = config_of(RoutingMethod::kDeepSeekV3), .tokens = tokens, .seed = 5};
      c.offset = offset;
      c.local = local;
      c.config.shared_experts = local == 0 ? 2 : 0;
      for (const int32_t tile : {1, 8, 128}) {
        c.tile = tile;
        expect_the_same(c);
      }
    }
  }
}

TEST_F(RoutePermute, PrecomputedRoutingsGiveTheCpusBytes) {
  for (const RoutingInput input : {RoutingInput::kPacked, RoutingInput::kUnpacked}) {
    for (const int tokens : kTokenCounts) {
      FrontCase c{.config = {.experts = 40, .top_k = 3, .shared_experts = 1},
                  .input = input,
                  .dtype = DType::kBF16,
                  .tokens = tokens,
                  .coded = RowFormat::kMxfp8,
                  .seed = 6};
      expect_the_same(c);
    }
  }
}

TEST_F(RoutePermute, IdsOutOfRangeAreReported) {
  for (const RoutingInput input : {RoutingInput::kPacked, RoutingInput::kUnpacked}) {
    for (const bool allows_empty : {false, true}) {
      for (const int64_t tokens : {1, 9, 64}) {
        FrontCase c{.config = {.experts = 40, .top_k = 3}, .input = input, .tokens = tokens};
        c.config.options.negative_one_is_empty = allows_empty;
        c.has_bad_ids = true;
        expect_the_same(c, false);
      }
    }
  }
}

TEST_F(RoutePermute, RowsOfEveryFormatAndType) {
  for (const RowFormat format :
       {RowFormat::kFp8Static, RowFormat::kFp8Group, RowFormat::kMxfp8, RowFormat::kNvfp4,
        RowFormat::kNvfp4PerToken, RowFormat::kFp8Token}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t cols : {32, 160, 2880}) {
        for (const int64_t tokens : {1, 2, 13, 64}) {
          expect_the_same({.config = config_of(RoutingMethod::kRenormalize),
                           .tokens = tokens,
                           .coded = format,
                           .rows = dtype,
                           .cols = cols,
                           .seed = 7});
        }
      }
    }
  }
}

TEST_F(RoutePermute, WhatDoesNotFitIsLeftToTheOthers) {
  const auto is_taken = [](const FrontCase& c) {
    const Front front(c);
    const DeviceCopies device(front.buffers());
    const auto before = front.outputs();
    const RoutePermuteArgs args = front.arguments(device);
    const bool joins = joins_routing(route_permute_problem(args));
    if (joins) route_and_permute(args, device.stream());
    EXPECT_TRUE(device.take_back());
    EXPECT_EQ(front.outputs() != before, joins);
    return joins;
  };
  const FrontCase fits{.config = config_of(RoutingMethod::kRenormalize), .tokens = 64};
  EXPECT_TRUE(is_taken(fits));
  const auto without = [&](auto change) {
    FrontCase c = fits;
    change(c);
    return is_taken(c);
  };
  EXPECT_FALSE(without([](FrontCase& c) { c.tokens = 0; }));
  EXPECT_FALSE(without([](FrontCase& c) { c.tokens = 65; }));
  EXPECT_FALSE(without([](FrontCase& c) { c.config.top_k = 9; })) << "576 slots";
  EXPECT_FALSE(without([](FrontCase& c) { c.config.experts = 513; }));
  const auto fills_shared_memory = [](FrontCase& c) {
    c.tokens = 22, c.config.experts = 512, c.config.top_k = 22;
  };
  EXPECT_FALSE(without(fills_shared_memory));
  EXPECT_FALSE(without([](FrontCase& c) { c.tokens = 10, c.config.top_k = 33; }));
  for (const char* pinned :
       {"route:sm90_warp", "permute:sm90_block", "quantize_activations:sm90_groups"}) {
    const std::string text = pinned;
    const size_t colon = text.find(':');
    const ForcedImplementation forced(text.substr(0, colon), text.substr(colon + 1));
    EXPECT_FALSE(is_taken(fits)) << pinned;
  }
  const ForcedImplementation forced("route_permute", "sm90_cluster");
  EXPECT_TRUE(is_taken(fits));
  EXPECT_THROW(without([](FrontCase& c) { c.tokens = 65; }), Error);
}

// Names of a layer's stages up to its first GEMM.
std::vector<std::string> first_stages(int64_t tokens) {
  MoeConfig config;
  config.hidden = config.inter = 256;
  config.routing = {.experts = 32, .top_k = 4};
  config.local_experts = 32;
  config.mode = MoeMode::kFp8Block;
  std::vector<std::string> names;
  for (const Explanation& stage : explain_moe(config, tokens, gpu())) {
    if (stage.op == "grouped_gemm") break;
    names.push_back(stage.op + ":" + stage.chosen);
  }
  return names;
}

TEST_F(RoutePermute, IsExplainedWithWhatItStandsFor) {
  const std::vector<std::string> joint{"route_permute:sm90_cluster"};
  EXPECT_EQ(first_stages(64), joint);
  const std::vector<std::string> separate{"route_permute:", "route:sm90_warp", "permute:sm90_block",
                                          "quantize_activations:sm90_groups"};
  EXPECT_EQ(first_stages(65), separate);
}

}  // namespace
}  // namespace narrowfloat::testing
