// Changes that must not matter, or matter in a known way, to a layer on a GPU (moe spec 13.4):
// shards, the places of tokens, experts and rows, other tokens in the batch, the form of a routing;
// factors of two. To the bit, with a pinned tile where places in tiles change.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "formats/float16.h"
#include "moe_shared/quantize_activations.h"
#include "support/gpu_moe.h"
#include "support/moe_batch.h"
#include "support/moe_routings.h"
#include "support/moved_weights.h"
#include "support/rows_tensor.h"

namespace narrowfloat::testing {
namespace {

constexpr MoeShape kMetamorphicShape{
    .tokens = 70, .hidden = 256, .inter = 384, .experts = 8, .top_k = 3, .shared_experts = 0};

struct ModeAndTile {
  MoeMode mode;
  int32_t token_tile;
};

class MoeMetamorphic : public GpuTestWith<ModeAndTile> {
 protected:
  void SetUp() override {
    GpuTestWith<ModeAndTile>::SetUp();
    case_ = std::make_unique<MoeCase>(mode(), kMetamorphicShape,
                                      Activation::swiglu_oai(1.702F, 1.0F, 2.0F), 61);
    case_->add_biases();
    case_->config().token_tile = GetParam().token_tile;
  }
  static MoeMode mode() { return GetParam().mode; }
  MoeCase& layer_case() { return *case_; }
  MoeResult run() { return run_on_gpu(prepare_on_gpu(*case_), *case_); }
  MoeResult run(MovedWeights& moved) {
    return run_on_gpu(prepare_on_gpu(moved.weights(), case_->config()), *case_);
  }

 private:
  std::unique_ptr<MoeCase> case_;
};

// Every mode with a tile that does the activation, and fp8_block with one that leaves it to a
// kernel of its own.
std::vector<ModeAndTile> modes_and_tiles() {
  std::vector<ModeAndTile> all;
  for (const MoeMode mode : every_gpu_moe_mode()) all.push_back({mode, 16});
  all.push_back({MoeMode::kFp8Block, 128});
  return all;
}

std::string mode_and_tile_name(const ::testing::TestParamInfo<ModeAndTile>& test) {
  const std::string tile = std::to_string(test.param.token_tile);
  return std::string(name(test.param.mode)) + (tile == "16" ? "" : "_tiles_of_" + tile);
}
INSTANTIATE_TEST_SUITE_P(Moe, MoeMetamorphic, ::testing::ValuesIn(modes_and_tiles()),
                         mode_and_tile_name);

// Every way to cut 8 experts in two, and three parts.
TEST_P(MoeMetamorphic, RowsOfAllShardsCombineToTheOutput) {
  const MoeResult whole = run();
  const auto part_of = [&](int32_t offset, int32_t count) {
    MoeConfig config = layer_case().config();
    config.expert_offset = offset;
    config.local_experts = count;
    return run_on_gpu(prepare_on_gpu(layer_case().shard(offset, count), config), layer_case());
  };
  for (const std::vector<int32_t>& cuts :
       {std::vector<int32_t>{0, 1, 8}, {0, 4, 8}, {0, 7, 8}, {0, 3, 5, 8}}) {
    MoeResult merged = whole;
    std::ranges::fill(merged.slot_rows, uint8_t{0});
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const MoeResult part = part_of(cuts[i], cuts[i + 1] - cuts[i]);
      expect_rows_of_shard(part, whole, cuts[i], cuts[i + 1] - cuts[i]);
      // Slots of other shards are zero.
      for (size_t at = 0; at < merged.slot_rows.size(); ++at) {
        merged.slot_rows[at] |= part.slot_rows[at];
      }
    }
    EXPECT_EQ(combined_slots(merged, layer_case().config()), whole.out);
  }
}

TEST_P(MoeMetamorphic, PermutingTokensPermutesTheOutputs) {
  const MoeLayer layer = prepare_on_gpu(layer_case());
  const MoeResult before = run_on_gpu(layer, layer_case());
  // Token `t` moves to 69 - t.
  const auto reverse = [](auto& values) {
    const size_t width = values.size() / kMetamorphicShape.tokens;
    const auto copy = values;
    for (size_t token = 0; token < kMetamorphicShape.tokens; ++token) {
      std::copy_n(&copy[token * width], width,
                  &values[(kMetamorphicShape.tokens - 1 - token) * width]);
    }
  };
  reverse(layer_case().x());
  reverse(layer_case().logits());
  MoeResult after = run_on_gpu(layer, layer_case());
  for (std::vector<uint8_t>* bytes :
       {&after.out, &after.slot_rows, &after.expert_weights, &after.topk_ids}) {
    reverse(*bytes);
  }
  after.slot_to_row = before.slot_to_row;
  EXPECT_TRUE(after == before);
}

TEST_P(MoeMetamorphic, RenamingExpertsChangesNothing) {
  const MoeResult before = run();
  const std::vector<int32_t> experts{5, 2, 7, 0, 1, 6, 3, 4};
  MovedWeights moved(layer_case().weights());
  moved.rename_experts(experts);
  const std::vector<float> logits = layer_case().logits();
  for (size_t i = 0; i < logits.size(); ++i) {
    layer_case().logits()[i] = logits[i / 8 * 8 + static_cast<size_t>(experts[i % 8])];
  }
  const MoeResult after = run(moved);
  EXPECT_EQ(after.expert_weights, before.expert_weights);
  EXPECT_EQ(after.slot_rows, before.slot_rows);
  EXPECT_EQ(after.out, before.out);
  const auto* const ids = reinterpret_cast<const int32_t*>(after.topk_ids.data());
  const auto* const old_ids = reinterpret_cast<const int32_t*>(before.topk_ids.data());
  for (size_t slot = 0; slot < after.topk_ids.size() / 4; ++slot) {
    ASSERT_EQ(experts[static_cast<size_t>(ids[slot])], old_ids[slot]);
  }
}

// A kernel that quantizes unquantized rows stores them as bf16, too, where the tensor cores read
// that; rows that come quantized are dequantized separately. Small batches run the fused prologue,
// others the separate operations.
TEST_P(MoeMetamorphic, RowsCodedByTheCallerGiveTheSame) {
  const RowFormat format = moe_mode_info(mode()).input;
  if (format == RowFormat::kBf16) GTEST_SKIP() << "bf16 rows are not coded";
  for (const int64_t tokens : {5, 40, 70}) {
    MoeShape shape = kMetamorphicShape;
    shape.tokens = tokens;
    MoeCase plain(mode(), shape, Activation::swiglu(), 62);
    // Below the least scales that bf16 has with E4M3 codes: a row, and two blocks of 16 or 32.
    for (size_t col = 0; col < 256; ++col) {
      const auto tiny = static_cast<uint16_t>(0x0180 + col * 37 % 0x280);
      plain.x()[3 * 256 + col] = tiny;
      if (col >= 32 && col < 96) plain.x()[4 * 256 + col] = tiny;
    }
    const MoeLayer layer = prepare_on_gpu(plain);
    const MoeResult expected = run_on_gpu(layer, plain);
    const RowsTensor rows(format, tokens, shape.hidden);
    QuantizeActivationsArgs code{
        .rows = plain.inputs().values, .format = format, .output = rows.view};
    if (plain.weights().input_multiplier) code.multiplier = *plain.weights().input_multiplier;
    quantize_activations(code, {});
    plain.inputs() = rows.view;
    EXPECT_TRUE(run_on_gpu(layer, plain) == expected) << tokens;
  }
}

TEST_P(MoeMetamorphic, TwiceTheDownScaleIsTwiceTheOutput) {
  MoeConfig& config = layer_case().config();
  config.slot_dtype = config.out_dtype = DType::kF32;
  layer_case().weights().bias2 = {};
  const std::vector<float> once = as_floats(run().out, DType::kF32);
  PerExpert& down = layer_case().weights().down_scale;
  std::vector<float> doubled(8, 2 * down.value);
  if (!down.values.is_absent()) {
    std::transform(static_cast<const float*>(down.values.data),
                   static_cast<const float*>(down.values.data) + 8, doubled.begin(),
                   [](float value) { return 2 * value; });
  }
  down = PerExpert(TensorView::contiguous(doubled.data(), DType::kF32, {8}));
  const std::vector<float> twice = as_floats(run().out, DType::kF32);
  for (size_t i = 0; i < once.size(); ++i) ASSERT_EQ(2 * once[i], twice[i]) << i;
}

// Rows of w2 are columns of the output. Blocks of 128 rows have scales of their own in one mode.
TEST_P(MoeMetamorphic, PermutingRowsOfTheSecondWeightsPermutesColumns) {
  const MoeResult before = run();
  const int64_t block = mode() == MoeMode::kFp8Block ? 128 : 1;
  const auto source = [&](int64_t row) {
    const int64_t count = kMetamorphicShape.hidden / block;
    // 5 and the number of blocks have no common divisor.
    return (row / block * 5 + 3) % count * block + row % block;
  };
  MovedWeights moved(layer_case().weights());
  moved.move_second([&](WeightRow at) { return WeightRow{at.expert, source(at.row)}; });
  const MoeResult after = run(moved);
  const auto* const old_out = reinterpret_cast<const uint16_t*>(before.out.data());
  const auto* const out = reinterpret_cast<const uint16_t*>(after.out.data());
  for (int64_t token = 0; token < kMetamorphicShape.tokens; ++token) {
    for (int64_t col = 0; col < kMetamorphicShape.hidden; ++col) {
      ASSERT_EQ(out[token * kMetamorphicShape.hidden + col],
                old_out[token * kMetamorphicShape.hidden + source(col)])
          << "token " << token << " column " << col;
    }
  }
}

TEST_P(MoeMetamorphic, GateOrdersOfTheSameWeightsGiveEqualBits) {
  const MoeResult expected = run();
  // The activation of portable code that makes rows of 1x128 reads gates that are apart.
  const bool has_one_activation =
      gpu_has_own_code() || moe_mode_info(mode()).intermediate != RowFormat::kFp8Group;
  for (const GateOrder order : {GateOrder::kGateUp, GateOrder::kInterleaved}) {
    if (!has_one_activation && order == GateOrder::kInterleaved) continue;
    // 128x128 blocks can change places as a whole; interleaved, they would hold rows of both.
    if (mode() == MoeMode::kFp8Block && order == GateOrder::kInterleaved) continue;
    MovedWeights moved(layer_case().weights());
    moved.reorder_gate(order);
    layer_case().config().gate_order = order;
    EXPECT_TRUE(run(moved) == expected) << name(order);
  }
}

TEST_P(MoeMetamorphic, LogitsPackedAndUnpackedRoutingsAgree) {
  layer_case().config().routing.options.weights_bf16 = true;
  const MoeLayer layer = prepare_on_gpu(layer_case());
  const MoeResult from_logits = run_on_gpu(layer, layer_case());
  const auto* const ids = reinterpret_cast<const int32_t*>(from_logits.topk_ids.data());
  const auto* const weights = reinterpret_cast<const float*>(from_logits.expert_weights.data());
  const size_t slots = from_logits.topk_ids.size() / 4;
  std::vector<int32_t> packed;
  for (size_t slot = 0; slot < slots; ++slot) {
    const auto id = static_cast<uint32_t>(ids[slot]);
    packed.push_back(static_cast<int32_t>(id << 16 | float_to_bf16(weights[slot])));
  }
  layer_case().routing() = {};
  layer_case().routing().packed = TensorView::contiguous(
      packed.data(), DType::kI32, {kMetamorphicShape.tokens, kMetamorphicShape.top_k});
  EXPECT_TRUE(run_on_gpu(layer, layer_case()) == from_logits);
  layer_case().routing() = {};
  layer_case().routing().ids =
      TensorView::contiguous(ids, DType::kI32, {kMetamorphicShape.tokens, kMetamorphicShape.top_k});
  layer_case().routing().weights = TensorView::contiguous(
      weights, DType::kF32, {kMetamorphicShape.tokens, kMetamorphicShape.top_k});
  EXPECT_TRUE(run_on_gpu(layer, layer_case()) == from_logits);
}

// A row alone is the row of every batch, wherever it is there.
TEST_P(MoeMetamorphic, ARowDoesNotDependOnItsBatch) {
  const MoeLayer layer = prepare_on_gpu(layer_case());
  const MoeResult whole = run_on_gpu(layer, layer_case());
  const MoeInputs inputs = layer_case().inputs();
  const Routing routing = layer_case().routing();
  for (const auto& [first, count] : {std::pair{0, 1}, {69, 1}, {17, 1}, {3, 8}, {30, 40}}) {
    layer_case().inputs().values.data = layer_case().x().data() + first * kMetamorphicShape.hidden;
    layer_case().routing().logits.data =
        layer_case().logits().data() + first * kMetamorphicShape.experts;
    layer_case().inputs().values.shape[0] = layer_case().routing().logits.shape[0] = count;
    const MoeResult part = run_on_gpu(layer, layer_case());
    const auto expect_part = [&, begin = first](const std::vector<uint8_t>& bytes,
                                                const std::vector<uint8_t>& all) {
      const size_t at = all.size() / kMetamorphicShape.tokens * static_cast<size_t>(begin);
      EXPECT_EQ(std::memcmp(bytes.data(), &all[at], bytes.size()), 0)
          << "tokens " << begin << " + " << bytes.size() / (all.size() / kMetamorphicShape.tokens);
    };
    expect_part(part.out, whole.out);
    expect_part(part.slot_rows, whole.slot_rows);
    layer_case().inputs() = inputs;
    layer_case().routing() = routing;
  }
}

// Tiles of up to 64 tokens give equal bits; FP8 weights exchange wgmma's operands at 64, and larger
// tiles may do SwiGLU apart, with another exponential.
TEST_P(MoeMetamorphic, TilesDecideAboutPlacesAlone) {
  const bool has_fp8_weights = mode() == MoeMode::kFp8Tensor || mode() == MoeMode::kFp8Block;
  std::optional<MoeResult> first;
  for (const int32_t tile : {8, 16, 32, 64, 128}) {
    SCOPED_TRACE(tile);
    layer_case().config().token_tile = tile;
    MoeResult result = run();
    if (!first) first = result;
    result.slot_to_row = first->slot_to_row;  // Rows of `slot_rows` are in the order of slots.
    if (tile < 64 || (tile == 64 && !has_fp8_weights)) {
      EXPECT_TRUE(result == *first);
    } else {
      expect_close(layer_case(), layer_case().config(), *first, result);
    }
  }
}

constexpr uint16_t kGarbage[] = {0x7FC0, 0xFFFF, 0x7F80, 0xFF80, 0x7149};  // NaN, Inf, 1e30.

// There are tokens after the last one: a graph's buffers are larger than the batch.
TEST_P(MoeMetamorphic, GarbageAfterTheLastTokenIsNotRead) {
  constexpr int64_t kTokens = 41;
  const MoeLayer layer = prepare_on_gpu(layer_case());
  const MoeResult clean = run_on_gpu(layer, layer_case());
  for (size_t i = kTokens * kMetamorphicShape.hidden; i < layer_case().x().size(); ++i) {
    layer_case().x()[i] = kGarbage[i % std::size(kGarbage)];
  }
  for (size_t i = kTokens * kMetamorphicShape.experts; i < layer_case().logits().size(); ++i) {
    layer_case().logits()[i] = i % 2 == 0 ? std::numeric_limits<float>::quiet_NaN()
                                          : std::numeric_limits<float>::infinity();
  }
  const GpuMoeRun run(layer, layer_case());
  run.poison(0xFF);
  const CudaStream stream;
  run.queue_first_tokens(kTokens, stream.get());
  stream.synchronize();
  const MoeResult result = run.take();
  const size_t valid = kTokens * kMetamorphicShape.hidden * 2;
  EXPECT_EQ(std::memcmp(result.out.data(), clean.out.data(), valid), 0);
  EXPECT_TRUE(std::all_of(result.out.begin() + valid, result.out.end(),
                          [](uint8_t byte) { return byte == 0xFF; }));
}

// Tokens without experts, as a graph pads its batch with, and experts without tokens.
TEST_P(MoeMetamorphic, GarbageThatNoSlotNamesIsNotSeen) {
  layer_case().config().routing.options.negative_one_is_empty = true;
  GivenRouting routing = same_experts("", kMetamorphicShape.tokens, {1, 4, 6});
  for (size_t slot = 50 * 3; slot < routing.ids.size(); ++slot) routing.ids[slot] = -1;
  layer_case().routing() = routing.view();
  const MoeResult clean = run();
  for (size_t i = 50 * kMetamorphicShape.hidden; i < layer_case().x().size(); ++i) {
    layer_case().x()[i] = kGarbage[i % std::size(kGarbage)];
  }
  MovedWeights moved(layer_case().weights());
  std::vector<int32_t> same(8);
  std::iota(same.begin(), same.end(), 0);
  moved.rename_experts(same);  // A copy.
  // Scales that do not fit FP8 cores choose other ones for the whole layer.
  const bool chooses_by_scales =
      mode() == MoeMode::kMxfp4Fp8 || mode() == MoeMode::kNvfp4Fp8Rounded ||
      mode() == MoeMode::kMxfp4Fp8Token || mode() == MoeMode::kNvfp4Fp8Token;
  for (const WeightView* weight : {&moved.weights().w1, &moved.weights().w2}) {
    const ScaleView& scales = weight->scales;
    const int64_t value_bytes = weight->values.num_elements() / 8 * bits(weight->values.dtype) / 8;
    const int64_t scale_bytes = scales.capacity / 8 * bytes(scales.type);
    for (const int expert : {0, 3, 7}) {
      std::memset(static_cast<uint8_t*>(weight->values.data) + expert * value_bytes, 0xFF,
                  static_cast<size_t>(value_bytes));
      if (scales.data == nullptr || chooses_by_scales) continue;
      std::memset(static_cast<uint8_t*>(scales.data) + expert * scale_bytes, 0xFF,
                  static_cast<size_t>(scale_bytes));
    }
  }
  EXPECT_TRUE(run(moved) == clean);
}

}  // namespace
}  // namespace narrowfloat::testing
