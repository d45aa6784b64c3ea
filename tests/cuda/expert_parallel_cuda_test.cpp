// Expert parallelism on a GPU, with all ranks on one: what is received, and what comes back, has
// the bytes of the ranks on the CPU, for every payload, order, routing and type; also in graphs,
// and after a rank did not come.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "cuda/expert_groups.h"
#include "cuda/gpu_test.h"
#include "formats/float16.h"
#include "narrowfloat/expert_parallel.h"
#include "runtime/cuda/device_memory.h"
#include "support/device_buffer.h"
#include "support/expect_error.h"
#include "support/gpu_moe.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

class ExpertParallelCuda : public OwnCodeTest {};

TEST_F(ExpertParallelCuda, GivesTheBytesOfTheCpu) {
  for (const RowFormat payload : kPayloads) {
    for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
      Groups groups({.tokens = {17, 0, 40}, .payload = payload, .order = order});
      uint64_t seed = 1;
      for (const Ids pattern : kPatterns) {
        SCOPED_TRACE(
            fmt::format("{} {}, ids {}", name(payload), name(order), static_cast<int>(pattern)));
        groups.expect_same_bytes(pattern, ++seed);
        // The next call has other numbers of tokens.
        std::vector<int64_t>& tokens = groups.setup().tokens;
        std::rotate(tokens.begin(), tokens.begin() + 1, tokens.end());
      }
    }
  }
}

TEST_F(ExpertParallelCuda, TakesAnyNumberOfRanksAndTokens) {
  for (const int ranks : {1, 2, 8}) {
    std::vector<int64_t> tokens(static_cast<size_t>(ranks), 1);
    tokens.back() = 1500;
    for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
      Groups groups({.ranks = ranks,
                     .tokens = tokens,
                     .hidden = 16,
                     .experts = 16,
                     .top_k = 8,
                     .max_tokens = 1500,
                     .payload = RowFormat::kNvfp4PerToken,
                     .order = order});
      SCOPED_TRACE(ranks);
      groups.expect_same_bytes(Ids::kUniform, 3, true);
      std::fill(groups.setup().tokens.begin(), groups.setup().tokens.end(), 0);
      groups.expect_same_bytes(Ids::kUniform, 4, true);
    }
  }
}

TEST_F(ExpertParallelCuda, TakesAnyTypeOfResultsAndOutput) {
  for (const DType results : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType out : {DType::kBF16, DType::kF16, DType::kF32}) {
      SCOPED_TRACE(fmt::format("{} {}", name(results), name(out)));
      GroupSetup setup{.ranks = 2,
                       .tokens = {4, 7},
                       .hidden = 264,
                       .max_tokens = 8,
                       .result_dtype = results,
                       .out_dtype = out,
                       .out_cols = 256};
      Groups(setup).expect_same_bytes(Ids::kUniform, 5);
      if (results == DType::kF16) continue;
      setup.order = CombineOrder::kTopK;
      Groups(setup).expect_same_bytes(Ids::kUniform, 6);
    }
  }
}

TEST_F(ExpertParallelCuda, SendsTokensToCopiesOfExperts) {
  std::vector<int32_t> places{0, 1, 2, 3, 4, 5, 6, 7, 0, 1};
  Groups({.ranks = 2, .tokens = {9, 8}, .experts = 8, .max_tokens = 9, .places = places})
      .expect_same_bytes(Ids::kWithInvalid, 7);
}

// Quantized rows travel as they are, whatever the strides of their scales.
TEST_F(ExpertParallelCuda, SendsQuantizedRowsOfTheCaller) {
  const GroupSetup setup{
      .ranks = 1, .tokens = {6}, .experts = 4, .max_tokens = 6, .payload = RowFormat::kFp8Group};
  auto group = ExpertParallel::create_local(1, config_of(setup), milliseconds(20'000), gpu());
  RankCall call(setup, 0, Ids::kUniform, 8);
  Mirrored codes(DType::kF8E4M3, {6, 256});
  Mirrored scales(DType::kF32, {6, 6});
  std::iota(codes.bytes().begin(), codes.bytes().end(), uint8_t{0});
  for (int i = 0; i < 36; ++i) scales.data<float>()[i] = static_cast<float>(i);
  codes.send();
  scales.send();
  CodedRows rows{.values = codes.on_gpu(), .scales = scales.on_gpu(), .row_scale = {}};
  rows.scales.shape[1] = 2;
  rows.scales.strides[1] = 3;
  const ReceivedTokens received =
      group[0].dispatch(rows, call.ids.on_gpu(), call.weights.on_gpu(), {});
  synchronize_device();
  EXPECT_EQ(bytes_on_gpu(received.rows.values), codes.bytes());
  const std::vector<uint8_t> bytes = bytes_on_gpu(received.rows.scales);
  std::array<float, 12> got{};
  std::memcpy(got.data(), bytes.data(), sizeof(got));
  EXPECT_EQ(got, (std::array<float, 12>{0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33}));
}

// The number of the call lives on the device.
TEST_F(ExpertParallelCuda, ReplaysOfAGraphGoOnWithTheCalls) {
  const GroupSetup setup{
      .ranks = 2, .tokens = {5, 8}, .max_tokens = 8, .order = CombineOrder::kTopK};
  auto group = ExpertParallel::create_local(2, config_of(setup), milliseconds(20'000), gpu());
  std::array<std::unique_ptr<RankCall>, 2> calls;
  for (int rank = 0; rank < 2; ++rank) {
    calls[static_cast<size_t>(rank)] = std::make_unique<RankCall>(setup, rank, Ids::kZipf, 9);
  }
  const CudaStream stream;
  std::array<ReceivedTokens, 2> received;
  const CapturedGraph graph(stream, [&] {
    for (size_t rank = 0; rank < 2; ++rank) {
      RankCall& call = *calls[rank];
      group[rank].start_dispatch({.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}},
                                 call.ids.on_gpu(), call.weights.on_gpu(), stream.get());
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      received[rank] = group[rank].finish_dispatch(stream.get());
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      // The result of a slot is the token's row.
      const TensorView results = group[rank].results();
      for (int64_t row = 0; row < group[rank].max_rows(); ++row) {
        for (int64_t slot = 0; slot < setup.top_k; ++slot) {
          const int64_t bytes = setup.hidden * 2;
          copy_on_device(static_cast<uint8_t*>(results.data) + (row * setup.top_k + slot) * bytes,
                         static_cast<const uint8_t*>(received[rank].rows.values.data) + row * bytes,
                         bytes, gpu(), stream.get());
        }
      }
      group[rank].start_combine(received[rank], stream.get());
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      group[rank].finish_combine(calls[rank]->out.on_gpu(), stream.get());
    }
  });
  for (uint64_t replay = 0; replay < 6; ++replay) {
    for (int rank = 0; rank < 2; ++rank) {
      RankCall& call = *calls[static_cast<size_t>(rank)];
      RankCall other(setup, rank, Ids::kUniform, 20 + replay);
      call.rows.bytes() = other.rows.bytes();
      call.ids.bytes() = other.ids.bytes();
      call.weights.bytes() = other.weights.bytes();
      for (const Mirrored* part : {&call.rows, &call.ids, &call.weights}) part->send();
    }
    graph.replay(2);
    for (size_t rank = 0; rank < 2; ++rank) {
      group[rank].check_error();
      RankCall& call = *calls[rank];
      for (int64_t i = 0; i < call.tokens * setup.hidden; ++i) {
        const float x = bf16_to_float(call.rows.data<uint16_t>()[i]);
        float sum = 0.0F;
        for (int64_t slot = 0; slot < setup.top_k; ++slot) {
          sum = std::fma(call.weights.data<float>()[i / setup.hidden * setup.top_k + slot], x, sum);
        }
        call.out.data<uint16_t>()[i] = float_to_bf16(sum);
      }
      EXPECT_EQ(call.out.from_gpu(), call.out.bytes()) << "replay " << replay;
    }
  }
}

TEST_F(ExpertParallelCuda, ARankThatDoesNotComeIsAnErrorOnAll) {
  const GroupSetup setup{.ranks = 2, .tokens = {5, 8}, .max_tokens = 8};
  auto group = ExpertParallel::create_local(2, config_of(setup), milliseconds(50), gpu());
  RankCall call(setup, 0, Ids::kUniform, 10);
  const ReceivedTokens received =
      group[0].dispatch({.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}},
                        call.ids.on_gpu(), call.weights.on_gpu(), {});
  synchronize_device();
  // No row of that rank was received.
  const std::vector<uint8_t> ids = bytes_on_gpu(received.ids);
  EXPECT_TRUE(std::all_of(ids.begin() + static_cast<std::ptrdiff_t>(ids.size() / 2), ids.end(),
                          [](uint8_t byte) { return byte == 0xFF; }));
  expect_error(ErrorKind::kDevice, {"call 1", "rank 0 of 2", "rank 1 sent no tokens", "50 ms"},
               [&] { group[0].check_error(); });
  expect_error(ErrorKind::kDevice, {"rank 1 sent no tokens"},
               [&] { group[0].combine(received, call.out.on_gpu(), {}); });
  // The other rank hears of it in its next call.
  RankCall late(setup, 1, Ids::kUniform, 11);
  group[1].dispatch({.values = late.rows.on_gpu(), .scales = {}, .row_scale = {}},
                    late.ids.on_gpu(), late.weights.on_gpu(), {});
  synchronize_device();
  expect_error(ErrorKind::kDevice, {"rank 1 of 2", "a rank gave up"},
               [&] { group[1].check_error(); });
}

TEST_F(ExpertParallelCuda, ARankThatGivesUpIsAnErrorOnAll) {
  const GroupSetup setup{.ranks = 2, .tokens = {5, 8}, .max_tokens = 8};
  auto group = ExpertParallel::create_local(2, config_of(setup), milliseconds(20'000), gpu());
  group[1].give_up();
  // At once, and not when the GPU comes to it.
  expect_error(ErrorKind::kDevice, {"gave up"}, [&] { group[1].check_error(); });
  RankCall call(setup, 0, Ids::kUniform, 12);
  group[0].dispatch({.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}},
                    call.ids.on_gpu(), call.weights.on_gpu(), {});
  synchronize_device();
  for (ExpertParallel& rank : group) {
    expect_error(ErrorKind::kDevice, {"a rank gave up"}, [&] { rank.check_error(); });
  }
}

TEST_F(ExpertParallelCuda, RefusesWhatItsKernelsDoNotTake) {
  GroupSetup setup{.ranks = 1, .tokens = {5}, .hidden = 100, .max_tokens = 8};
  expect_error(kInvalid, {"hidden", "multiple of 8", "100"}, [&] {
    ExpertParallel::create_local(1, config_of(setup), milliseconds(1'000), gpu());
  });
  setup.hidden = 256;
  auto group = ExpertParallel::create_local(1, config_of(setup), milliseconds(1'000), gpu());
  RankCall call(setup, 0, Ids::kUniform, 13);
  const CodedRows rows{.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}};
  expect_error(kInvalid, {"ids", "cpu"},
               [&] { group[0].dispatch(rows, call.ids.on_host(), call.weights.on_gpu(), {}); });
  const ReceivedTokens received =
      group[0].dispatch(rows, call.ids.on_gpu(), call.weights.on_gpu(), {});
  TensorView out = call.out.on_gpu();
  out.data = static_cast<uint8_t*>(out.data) + 2;
  expect_error(kInvalid, {"out", "16 bytes"}, [&] { group[0].combine(received, out, {}); });
  group[0].combine(received, call.out.on_gpu(), {});
  synchronize_device();
}

// --- Layers --------------------------------------------------------------------------------------

struct LayerMode {
  MoeMode mode;
  RowFormat payload;
};

// With order topk the bytes of the layer on one rank.
void expect_bytes_of_the_layer(const LayerMode& layer_mode) {
  constexpr int kRanks = 2;
  constexpr int64_t kTokens = 6;  // Every rank has so many.
  const MoeShape shape{
      .tokens = kRanks * kTokens, .hidden = 128, .inter = 128, .experts = 4, .top_k = 2};
  MoeCase whole(layer_mode.mode, shape, {.kind = ActivationKind::kSwiglu}, 77);
  GroupSetup setup{.ranks = kRanks,
                   .tokens = {kTokens, kTokens},
                   .hidden = 128,
                   .experts = 4,
                   .top_k = 2,
                   .max_tokens = 8,
                   .payload = layer_mode.payload,
                   .order = CombineOrder::kTopK};
  std::array<std::unique_ptr<RankCall>, kRanks> calls;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (int rank = 0; rank < kRanks; ++rank) {
    auto& call = calls[static_cast<size_t>(rank)];
    call = std::make_unique<RankCall>(setup, rank, Ids::kUniform, 14);
    std::memcpy(call->rows.bytes().data(), whole.x().data() + rank * kTokens * 128,
                call->rows.bytes().size());
    call->rows.send();
    ids.insert(ids.end(), call->ids.data<int32_t>(), call->ids.data<int32_t>() + kTokens * 2);
    weights.insert(weights.end(), call->weights.data<float>(),
                   call->weights.data<float>() + kTokens * 2);
  }
  MoeConfig& config = whole.config();
  config.routing.options.negative_one_is_empty = true;
  config.slot_dtype = DType::kBF16;
  whole.routing() = {};
  whole.routing().ids = TensorView::contiguous(ids.data(), DType::kI32, {kRanks * kTokens, 2});
  whole.routing().weights =
      TensorView::contiguous(weights.data(), DType::kF32, {kRanks * kTokens, 2});
  const MoeResult expected = run_on_gpu(prepare_on_gpu(whole), whole);

  auto group = ExpertParallel::create_local(kRanks, config_of(setup), milliseconds(20'000), gpu());
  const CudaStream stream;
  std::array<ReceivedTokens, kRanks> received;
  std::vector<MoeLayer> layers;
  std::vector<DeviceBuffer> workspaces;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    const ExpertShard shard = group[rank].shard();
    MoeConfig own = config;
    own.expert_offset = shard.offset;
    own.local_experts = shard.count;
    layers.push_back(prepare_on_gpu(whole.shard(shard.offset, shard.count), own));
    workspaces.emplace_back(group[rank].required_workspace(layers[rank]));
    group[rank].start_dispatch(
        {.values = calls[rank]->rows.on_gpu(), .scales = {}, .row_scale = {}},
        calls[rank]->ids.on_gpu(), calls[rank]->weights.on_gpu(), stream.get());
  }
  for (size_t rank = 0; rank < kRanks; ++rank) {
    received[rank] = group[rank].finish_dispatch(stream.get());
    group[rank].run_experts(layers[rank], received[rank],
                            TensorView::contiguous(workspaces[rank].data(), DType::kU8,
                                                   {workspaces[rank].size()}, gpu()),
                            stream.get());
    group[rank].start_combine(received[rank], stream.get());
  }
  for (size_t rank = 0; rank < kRanks; ++rank) {
    group[rank].finish_combine(calls[rank]->out.on_gpu(), stream.get());
  }
  stream.synchronize();
  std::vector<uint8_t> actual;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    group[rank].check_error();
    const std::vector<uint8_t> out = calls[rank]->out.from_gpu();
    actual.insert(actual.end(), out.begin(), out.end());
  }
  EXPECT_EQ(actual, expected.out);
}

TEST_F(ExpertParallelCuda, GivesTheBytesOfTheLayer) {
  for (const LayerMode& mode : {LayerMode{MoeMode::kBf16, RowFormat::kBf16},
                                LayerMode{MoeMode::kFp8Block, RowFormat::kBf16},
                                LayerMode{MoeMode::kFp8Block, RowFormat::kFp8Group},
                                LayerMode{MoeMode::kMxfp4Mxfp8, RowFormat::kMxfp8},
                                LayerMode{MoeMode::kNvfp4PerToken, RowFormat::kNvfp4PerToken}}) {
    SCOPED_TRACE(fmt::format("{} {}", name(mode.mode), name(mode.payload)));
    expect_bytes_of_the_layer(mode);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
