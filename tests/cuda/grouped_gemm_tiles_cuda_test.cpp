// The output tiles of a grouped GEMM of FP8 weights on Hopper: pairs of CTAs that share weights,
// the TMA kernel, ragged remainders. Its bits are the same however an output is cut into tiles.
#include <cstring>
#include <optional>

#include <gtest/gtest.h>

#include "base/int_math.h"
#include "cuda/gpu_test.h"
#include "support/gemm_device_run.h"

namespace narrowfloat::testing {
namespace {

class GroupedGemmTilesCuda : public OwnCodeTest {};

// Each pair of CTAs that shares weights computes more tiles than its ring of tile numbers holds.
void compute_many_tiles(GemmCaseSpec spec, uint32_t tiles, DType dtype = DType::kBF16) {
  spec.mode = MoeMode::kFp8Block;
  spec.expert_rows = {2560, 2560};
  spec.token_tile = 128;
  const GemmCase gemm(spec);
  GemmOnDevice device(gemm, dtype);
  const std::vector<uint8_t> static_output = device.run();
  const DeviceBuffer counter(sizeof(uint32_t));
  counter.fill(0);
  device.layer.next_tile = reinterpret_cast<uint32_t*>(counter.data());
  EXPECT_TRUE(device.run() == static_output);
  uint32_t taken = 0;
  std::memcpy(&taken, counter.copy().data(), sizeof(taken));
  EXPECT_EQ(taken, tiles);
  device.layer.next_tile = nullptr;
  divide_tiles(gemm, 64, device);
  EXPECT_TRUE(device.run() == static_output);
}

TEST_F(GroupedGemmTilesCuda, PairsOfCtasComputeManyTiles) {
  // Pairs of 40 tiles, times tiles of 256 weight rows, of 192 where no rows are gathered.
  compute_many_tiles({.weight_rows = 5120, .gathers = true}, 20 * 20);
  compute_many_tiles({.weight_rows = 5120}, 20 * 27);
  // 21 tiles of 192 weight rows, and the 64 remaining rows last. With seven k tiles the number of
  // the next output tile arrives while this one is copied, and a stage of the last round stays
  // empty. With eight, rounds are whole, and so are the copies of a token's scales.
  for (const int64_t cols : {128, 896, 1024}) {
    compute_many_tiles({.weight_rows = 4096, .cols = cols}, 20 * 22);
    compute_many_tiles({.weight_rows = 4096, .cols = cols}, 20 * 22, DType::kF32);
  }
}

// Rows that are not gathered run in the TMA kernel with tiles of 128 tokens: weight rows that do
// not fill its three sub-tiles, tokens that do not fill a warp's 16, and outputs of which rows, or
// those of u and g, are no multiples of 16 bytes.
TEST_F(GroupedGemmTilesCuda, TmaTilesOfFp8HaveTheBitsOfSmallTiles) {
  int index = 0;
  for (const int64_t weight_rows : {64, 128, 192, 256, 320, 384, 80, 144, 48, 512, 240}) {
    GemmCaseSpec spec{.mode = index % 3 == 0 ? MoeMode::kFp8Tensor : MoeMode::kFp8Block,
                      .weight_rows = weight_rows,
                      .cols = 384,
                      .expert_rows = {129, 0, 64, 16, 77},
                      .token_tile = 128};
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      spec.has_slot_weights = index % 3 == 1;
      spec.gate_order.reset();
      if (index % 4 > 1) spec.gate_order = GateOrder::kUpGate;
      if (index % 8 == 7) spec.gate_order = GateOrder::kInterleaved;
      const bool has_halves = weight_rows % (2 * moe_mode_info(spec.mode).multiple) == 0;
      spec.knows_halves = spec.gate_order && has_halves;
      spec.seed = 31 + static_cast<uint64_t>(index++);
      SCOPED_TRACE(to_string(spec) + " -> " + std::string(name(dtype)));
      const GemmCase gemm(spec);
      GemmOnDevice device(gemm, dtype);
      const std::vector<uint8_t> output = device.run(true);
      expect_near(gemm, dtype, output);
      expect_padding_untouched(gemm, dtype, output);
      divide_tiles(gemm, 64, device);
      EXPECT_TRUE(device.run() == output);
    }
  }
}

// With weights in E4M3 the ragged remainder of an expert, up to 16 token rows after 64 or 128, is
// computed in the output tile of the rows before it. The cases have remainders after 64 and after
// 128 rows, of the largest size and of a row more, and experts without any. The counter identifies
// the kernel: it counts one output tile for each token tile and 256 weight rows, while pairs of
// tiles, or tiles of 192 weight rows, would give other counts.
void compute_ragged_remainders(const GemmCaseSpec& spec, DType dtype) {
  const GemmCase gemm(spec);
  GemmOnDevice device(gemm, dtype);
  const DeviceBuffer counter(sizeof(uint32_t));
  counter.fill(0);
  device.layer.next_tile = reinterpret_cast<uint32_t*>(counter.data());
  const std::vector<uint8_t> output = device.run(true);
  expect_near(gemm, dtype, output);
  expect_padding_untouched(gemm, dtype, output);
  uint32_t taken = 0;
  std::memcpy(&taken, counter.copy().data(), sizeof(taken));
  const int64_t tiles = gemm.max_rows() / spec.token_tile - 1;
  EXPECT_EQ(taken, tiles * ceil_div(spec.weight_rows, int64_t{256}));
  device.layer.next_tile = nullptr;
  EXPECT_TRUE(device.run() == output)
      << "static schedule, in TMA tiles where rows are not gathered";
  divide_tiles(gemm, 32, device);
  EXPECT_TRUE(device.run() == output);
}

const std::vector<int64_t> kRaggedRows = {144, 129, 145, 128, 0, 80, 65, 81, 17, 1, 273, 150};

TEST_F(GroupedGemmTilesCuda, RaggedRemaindersOfFp8HaveTheBitsOfSmallTiles) {
  struct Weights {
    MoeMode mode;
    int64_t rows;
    std::optional<GateOrder> gate_order;
  };
  int index = 0;
  for (const Weights& weights : {Weights{MoeMode::kFp8Block, 528, {}},
                                 {MoeMode::kFp8Tensor, 512, GateOrder::kInterleaved},
                                 {MoeMode::kFp8Tensor, 544, GateOrder::kUpGate},
                                 {MoeMode::kFp8Tensor, 64, {}},
                                 {MoeMode::kFp8Block, 1040, {}}}) {
    GemmCaseSpec spec{.mode = weights.mode,
                      .weight_rows = weights.rows,
                      .cols = 640,
                      .expert_rows = kRaggedRows,
                      .token_tile = 128,
                      .gate_order = weights.gate_order,
                      .knows_halves = weights.gate_order.has_value()};
    for (const bool gathers : {true, false}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        spec.gathers = gathers;
        spec.has_slot_weights = index % 3 == 1;
        spec.bias = index % 3 == 2 ? std::optional(dtype) : std::nullopt;
        spec.has_scale = index % 3 == 2;
        spec.seed = 61 + static_cast<uint64_t>(index++);
        SCOPED_TRACE(to_string(spec) + " -> " + std::string(name(dtype)));
        compute_ragged_remainders(spec, dtype);
      }
    }
  }
}

// Each CTA computes more output tiles than its ring of tile numbers holds.
TEST_F(GroupedGemmTilesCuda, CtasComputeManyRaggedRemainders) {
  GemmCaseSpec spec{.weight_rows = 4096, .expert_rows = {}, .token_tile = 128, .gathers = true};
  spec.wide_scales = false;
  for (int i = 0; i < 4; ++i) {
    spec.expert_rows.insert(spec.expert_rows.end(), kRaggedRows.begin(), kRaggedRows.end());
  }
  for (const MoeMode mode : {MoeMode::kFp8Block, MoeMode::kMxfp4Fp8, MoeMode::kNvfp4Fp8Rounded}) {
    SCOPED_TRACE(name(mode));
    spec.mode = mode;
    compute_ragged_remainders(spec, DType::kBF16);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
