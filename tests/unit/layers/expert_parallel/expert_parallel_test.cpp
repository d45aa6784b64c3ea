// Expert parallelism on the CPU: every payload, order, transport and routing to the byte of the
// layer on one rank or of its shards. Ranks are threads.
#include <algorithm>
#include <array>
#include <barrier>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>

#include <gtest/gtest.h>

#include "layers/expert_parallel/dispatch_plan.h"
#include "narrowfloat/quantize.h"
#include "support/allreduce_ranks.h"
#include "support/expect_error.h"
#include "unit/layers/expert_parallel/expert_case.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

void expect_bytes_on_threads(const ExpertCase& c, std::vector<ExpertParallel>& group,
                             int calls = 1) {
  run_as_threads(c.setup().ranks, [&](int rank) {
    EXPECT_EQ(c.run(group[static_cast<size_t>(rank)], calls), c.expected(rank)) << "rank " << rank;
  });
}

void expect_bytes_on_threads(const ExpertSetup& setup, uint64_t seed) {
  const ExpertCase c(setup, seed);
  auto group = ExpertParallel::create_local(setup.ranks, c.config());
  expect_bytes_on_threads(c, group);
}

// --- Plan ----------------------------------------------------------------------------------------

TEST(ExpertShard, CoversAllExpertsInRanges) {
  for (const int32_t experts : {1, 2, 7, 8, 64, 128, 257}) {
    for (int ranks = 1; ranks <= std::min(experts, 64); ++ranks) {
      int32_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const ExpertShard shard = expert_shard(experts, ranks, rank);
        EXPECT_EQ(shard.offset, next);
        EXPECT_EQ(shard.count, experts / ranks + (rank < experts % ranks ? 1 : 0));
        for (int32_t id = next; id < next + shard.count; ++id) {
          ASSERT_EQ(rank_of_expert(experts, ranks, id), rank) << experts << " of " << ranks;
        }
        next += shard.count;
      }
      EXPECT_EQ(next, experts);
    }
  }
  expect_error(kInvalid, {"rank", "3 of 3"}, [] { expert_shard(8, 3, 3); });
  expect_error(kInvalid, {"ranks", "9", "8 experts"}, [] { expert_shard(8, 9, 0); });
}

TEST(DispatchPlan, SendsATokenOnceToEachRank) {
  // 8 experts on 3 ranks: 0 to 2, 3 to 5, 6 and 7.
  const std::array<int32_t, 12> ids{0, 2, 7, -1, 8, -9, 5, 5, 4, 1, 6, 3};
  const DispatchPlan plan =
      plan_dispatch(TensorView::contiguous(ids.data(), DType::kI32, {4, 3}), 8, 3);
  EXPECT_EQ(plan.places, (std::vector<int32_t>{0, -1, 0, -1, -1, -1, -1, 0, -1, 1, 1, 1}));
  EXPECT_EQ(plan.counts, (std::vector<int32_t>{2, 2, 2}));
}

// --- Results -------------------------------------------------------------------------------------

struct Payload {
  MoeMode mode;
  RowFormat format;
};
constexpr std::array kPayloads{Payload{MoeMode::kBf16, RowFormat::kBf16},
                               Payload{MoeMode::kNvfp4Bf16, RowFormat::kBf16},
                               Payload{MoeMode::kFp8Block, RowFormat::kBf16},
                               Payload{MoeMode::kFp8Block, RowFormat::kFp8Group},
                               Payload{MoeMode::kMxfp4Mxfp8, RowFormat::kMxfp8},
                               Payload{MoeMode::kNvfp4PerToken, RowFormat::kNvfp4PerToken}};

TEST(ExpertParallel, GivesTheBytesOfTheLayer) {
  uint64_t seed = 1;
  for (const Payload& payload : kPayloads) {
    for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
      SCOPED_TRACE(std::string(name(payload.mode)) + " " + std::string(name(payload.format)) + " " +
                   std::string(name(order)));
      expect_bytes_on_threads({.mode = payload.mode,
                               .ranks = 3,
                               .tokens = {5, 0, 8},
                               .experts = 8,
                               .top_k = 3,
                               .payload = payload.format,
                               .order = order},
                              ++seed);
    }
  }
}

TEST(ExpertParallel, TakesAnyRouting) {
  uint64_t seed = 100;
  for (const IdsPattern ids : {IdsPattern::kZipf, IdsPattern::kOneRank, IdsPattern::kDuplicates,
                               IdsPattern::kWithInvalid}) {
    for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
      SCOPED_TRACE(static_cast<int>(ids));
      expect_bytes_on_threads({.ranks = 4,
                               .tokens = {8, 1, 0, 6},
                               .experts = 11,
                               .top_k = 4,
                               .ids = ids,
                               .order = order},
                              ++seed);
    }
  }
}

TEST(ExpertParallel, TakesAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 5, 8}) {
    SCOPED_TRACE(ranks);
    std::vector<int64_t> tokens(static_cast<size_t>(ranks), 3);
    tokens.back() = 8;
    expect_bytes_on_threads({.ranks = ranks, .tokens = tokens, .order = CombineOrder::kTopK}, 7);
    std::fill(tokens.begin(), tokens.end(), 0);
    expect_bytes_on_threads({.ranks = ranks, .tokens = tokens}, 8);
  }
}

TEST(ExpertParallel, TakesAnyTypeOfResultsAndOutput) {
  for (const DType results : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType out : {DType::kBF16, DType::kF16, DType::kF32}) {
      SCOPED_TRACE(std::string(name(results)) + " " + std::string(name(out)));
      ExpertSetup setup{.tokens = {4, 7}, .result_dtype = results, .out_dtype = out};
      expect_bytes_on_threads(setup, 20);
      if (results == DType::kF16) continue;
      setup.order = CombineOrder::kTopK;
      expect_bytes_on_threads(setup, 21);
    }
  }
}

// Calls overwrite what earlier ones left, and change nothing.
TEST(ExpertParallel, GivesTheSameBytesInEveryCall) {
  const ExpertCase c({.ranks = 3, .tokens = {8, 2, 5}, .order = CombineOrder::kTopK}, 30);
  auto group = ExpertParallel::create_local(3, c.config());
  expect_bytes_on_threads(c, group, 40);
}

// A call of a rank whose tokens go to all ranks, with NaN in every row, weight and result.
void exchange_nan(ExpertParallel& group) {
  const ExpertParallelConfig& config = group.config();
  const int64_t tokens = config.max_tokens;
  const std::vector<uint16_t> rows(static_cast<size_t>(tokens * config.hidden), 0x7FFF);
  const auto slots = static_cast<size_t>(tokens * config.top_k);
  const std::vector<float> weights(slots, std::numeric_limits<float>::quiet_NaN());
  std::vector<int32_t> ids;
  for (size_t slot = 0; slot < slots; ++slot) {
    const int rank = static_cast<int>(slot) % config.top_k % group.ranks();
    ids.push_back(expert_shard(config.experts, group.ranks(), rank).offset);
  }
  const ReceivedTokens received = group.dispatch(
      {.values = TensorView::contiguous(rows.data(), DType::kBF16, {tokens, config.hidden}),
       .scales = {},
       .row_scale = {}},
      TensorView::contiguous(ids.data(), DType::kI32, {tokens, config.top_k}),
      TensorView::contiguous(weights.data(), DType::kF32, {tokens, config.top_k}));
  const TensorView results = group.results();
  std::memset(results.data, 0xFF,
              static_cast<size_t>(results.num_elements() * bits(results.dtype) / 8));
  std::vector<uint16_t> out(rows.size());
  group.combine(received,
                TensorView::contiguous(out.data(), DType::kBF16, {tokens, config.hidden}));
  EXPECT_TRUE(std::ranges::all_of(out, [](uint16_t bits) { return (bits & 0x7FFF) > 0x7F80; }));
}

TEST(ExpertParallel, ReadsNothingOfRowsThatNobodySent) {
  for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
    const ExpertCase c({.mode = MoeMode::kFp8Block,
                        .ranks = 3,
                        .tokens = {5, 0, 2},
                        .top_k = 3,
                        .ids = IdsPattern::kWithInvalid,
                        .order = order},
                       45);
    auto group = ExpertParallel::create_local(3, c.config());
    run_as_threads(3, [&](int rank) { exchange_nan(group[static_cast<size_t>(rank)]); });
    expect_bytes_on_threads(c, group);
  }
}

TEST(ExpertParallel, GivesZeroToTokensWithoutExperts) {
  for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
    const ExpertCase c({.ranks = 1, .tokens = {3}, .order = order}, 46);
    auto group = ExpertParallel::create_local(1, c.config());
    const std::vector<int32_t> ids{-1, 8, 9, -7, 8, 1 << 30};
    std::vector<uint16_t> out(3 * 128, 0xFFFF);
    const ReceivedTokens received = group[0].dispatch(
        c.rows(0), TensorView::contiguous(ids.data(), DType::kI32, {3, 2}), c.weights(0));
    EXPECT_EQ(static_cast<const int32_t*>(received.counts.data)[0], 0);
    group[0].combine(received, TensorView::contiguous(out.data(), DType::kBF16, {3, 128}));
    EXPECT_EQ(out, std::vector<uint16_t>(out.size(), 0));
  }
}

// Quantized rows travel as they are, whatever the strides of their scales.
TEST(ExpertParallel, SendsQuantizedRowsOfTheCaller) {
  const ExpertCase c(
      {.mode = MoeMode::kFp8Block, .tokens = {6, 3}, .payload = RowFormat::kFp8Group}, 40);
  auto group = ExpertParallel::create_local(2, c.config());
  run_as_threads(2, [&](int rank) {
    ExpertParallel& own = group[static_cast<size_t>(rank)];
    const ReceivedTokens first = own.dispatch(c.rows(rank), c.ids(rank), c.weights(rank));
    const auto rows = static_cast<size_t>(own.max_rows());
    std::vector<uint8_t> codes(rows * 128);
    std::memcpy(codes.data(), first.rows.values.data, codes.size());
    std::vector<float> scales(rows);
    std::memcpy(scales.data(), first.rows.scales.data, rows * sizeof(float));
    std::vector<uint16_t> out(8 * 128);
    const auto result = [&](int64_t tokens) {
      return TensorView::contiguous(out.data(), DType::kBF16, {tokens, 128});
    };
    own.combine(first, result(c.tokens(rank)));
    // The rows of rank 0 are sent once more, with scales that are two columns apart.
    std::vector<float> wide(16);
    for (size_t i = 0; i < 8; ++i) wide[2 * i] = scales[i];
    CodedRows again{.values = TensorView::contiguous(codes.data(), DType::kF8E4M3, {8, 128}),
                    .scales = TensorView::contiguous(wide.data(), DType::kF32, {8, 1}),
                    .row_scale = {}};
    again.scales.strides[0] = 2;
    const std::vector<int32_t> ids(16, rank == 0 ? 0 : 7);
    const std::vector<float> weights(16, 1.0F);
    const ReceivedTokens second =
        own.dispatch(again, TensorView::contiguous(ids.data(), DType::kI32, {8, 2}),
                     TensorView::contiguous(weights.data(), DType::kF32, {8, 2}));
    const size_t own_block = static_cast<size_t>(rank) * 8;
    EXPECT_EQ(std::memcmp(static_cast<const uint8_t*>(second.rows.values.data) + own_block * 128,
                          codes.data(), 8 * 128),
              0);
    EXPECT_TRUE(std::equal(scales.begin(), scales.begin() + 8,
                           static_cast<const float*>(second.rows.scales.data) + own_block));
    EXPECT_EQ(static_cast<const int32_t*>(second.counts.data)[rank], 8);
    EXPECT_EQ(static_cast<const int32_t*>(second.counts.data)[1 - rank], 0);
    own.combine(second, result(8));
  });
}

// One thread starts all ranks, then finishes them.
TEST(ExpertParallel, HalvesOfACallWaitForNobodyBetweenThem) {
  const ExpertCase c({.ranks = 3, .tokens = {5, 0, 8}, .order = CombineOrder::kTopK}, 47);
  auto group = ExpertParallel::create_local(3, c.config());
  const auto each = [&](auto&& step) {
    for (int rank = 0; rank < 3; ++rank) step(group[static_cast<size_t>(rank)], rank);
  };
  std::vector<ReceivedTokens> received(3);
  std::vector<std::vector<uint16_t>> out(3);
  expect_error(kInvalid, {"finish_dispatch", "no dispatch() came before"},
               [&] { group[0].finish_dispatch(); });
  each([&](ExpertParallel& own, int rank) {
    own.start_dispatch(c.rows(rank), c.ids(rank), c.weights(rank));
  });
  expect_error(kInvalid, {"results", "waits for finish_dispatch()"},
               [&] { static_cast<void>(group[0].results()); });
  each([&](ExpertParallel& own, int rank) {
    received[static_cast<size_t>(rank)] = own.finish_dispatch();
  });
  each([&](ExpertParallel& own, int rank) {
    const MoeLayer layer = c.layer(rank);
    const AlignedBytes workspace(own.required_workspace(layer));
    own.run_experts(layer, received[static_cast<size_t>(rank)], workspace.view());
    own.start_combine(received[static_cast<size_t>(rank)]);
  });
  expect_error(kInvalid, {"dispatch", "wait for combine()"},
               [&] { group[0].start_dispatch(c.rows(0), c.ids(0), c.weights(0)); });
  each([&](ExpertParallel& own, int rank) {
    auto& mine = out[static_cast<size_t>(rank)];
    mine.resize(static_cast<size_t>(c.tokens(rank) * 128));
    own.finish_combine(TensorView::contiguous(mine.data(), DType::kBF16, {c.tokens(rank), 128}));
    const auto* const bytes = reinterpret_cast<const uint8_t*>(mine.data());
    EXPECT_EQ(std::vector<uint8_t>(bytes, bytes + mine.size() * 2), c.expected(rank));
    own.check_error();
  });
}

// --- Transports ----------------------------------------------------------------------------------

// An all-to-all of threads.
class ThreadExchange {
 public:
  explicit ThreadExchange(int ranks) : sent_(static_cast<size_t>(ranks)), barrier_(ranks) {}

  AllToAllFunction of(int rank) {
    return [this, rank](std::span<const std::byte> send, std::span<std::byte> receive) {
      sent_[static_cast<size_t>(rank)] = send;
      barrier_.arrive_and_wait();
      const size_t block = send.size() / sent_.size();
      for (size_t source = 0; source < sent_.size(); ++source) {
        std::memcpy(receive.data() + source * block,
                    sent_[source].data() + static_cast<size_t>(rank) * block, block);
      }
      barrier_.arrive_and_wait();
    };
  }

 private:
  std::vector<std::span<const std::byte>> sent_;
  std::barrier<> barrier_;
};

void expect_bytes_by(ExpertTransport transport, const ExpertSetup& setup, uint64_t seed) {
  const ExpertCase c(setup, seed);
  SharedRendezvous rendezvous(setup.ranks);
  ThreadExchange exchange(setup.ranks);
  run_as_threads(setup.ranks, [&](int rank) {
    ExpertParallelOptions options{.device = {}, .transport = transport, .all_to_all = {}};
    if (transport == ExpertTransport::kAllToAll) options.all_to_all = exchange.of(rank);
    ExpertParallel group = ExpertParallel::create(rendezvous.bootstrap(rank), c.config(), options);
    EXPECT_EQ(group.transport(), transport);
    EXPECT_EQ(c.run(group, 2), c.expected(rank)) << "rank " << rank;
    group.destroy();
  });
}

TEST(ExpertParallel, GivesTheSameBytesByEveryTransport) {
  for (const auto transport :
       {ExpertTransport::kPeerMemory, ExpertTransport::kAllToAll, ExpertTransport::kAllGather}) {
    SCOPED_TRACE(name(transport));
    for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
      expect_bytes_by(transport,
                      {.mode = MoeMode::kNvfp4PerToken,
                       .ranks = 3,
                       .tokens = {8, 0, 4},
                       .payload = RowFormat::kNvfp4PerToken,
                       .order = order},
                      50);
    }
  }
}

TEST(ExpertParallel, Takes64Ranks) {
  std::vector<int64_t> tokens;
  for (int64_t rank = 0; rank < 64; ++rank) tokens.push_back(rank % 3);
  for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
    const ExpertCase c(
        {.ranks = 64, .tokens = tokens, .experts = 70, .top_k = 6, .max_tokens = 2, .order = order},
        60);
    SharedRendezvous rendezvous(64);
    ThreadExchange exchange(64);
    std::vector<std::vector<uint8_t>> results(64);
    run_as_threads(64, [&](int rank) {
      ExpertParallel group = ExpertParallel::create(
          rendezvous.bootstrap(rank), c.config(),
          {.device = {}, .transport = ExpertTransport::kAuto, .all_to_all = exchange.of(rank)});
      EXPECT_EQ(group.transport(), ExpertTransport::kAllToAll);
      results[static_cast<size_t>(rank)] = c.run(group);
    });
    for (const int rank : {0, 1, 2, 31, 62, 63}) {
      EXPECT_EQ(results[static_cast<size_t>(rank)], c.expected(rank)) << "rank " << rank;
    }
  }
}

TEST(ExpertParallel, RefusesTransportsThatItCannotHave) {
  const ExpertParallelConfig config{.hidden = 128, .experts = 8, .top_k = 2, .max_tokens = 4};
  const auto refuse = [&](const ExpertParallelOptions& options,
                          const std::vector<std::string>& fragments) {
    SharedRendezvous rendezvous(1);
    expect_error(ErrorKind::kUnsupported, fragments,
                 [&] { ExpertParallel::create(rendezvous.bootstrap(0), config, options); });
  };
  refuse({.device = {}, .transport = ExpertTransport::kAllToAll, .all_to_all = {}},
         {"no all_to_all function was given", "transport all_to_all was asked for"});
}

TEST(ExpertParallel, CountsItsBuffers) {
  const ExpertCase c({.ranks = 1, .tokens = {4}}, 61);
  std::array<int64_t, 3> bytes{};
  for (const auto transport :
       {ExpertTransport::kPeerMemory, ExpertTransport::kAllToAll, ExpertTransport::kAllGather}) {
    SharedRendezvous rendezvous(1);
    ThreadExchange exchange(1);
    const ExpertParallelOptions options{
        .device = {}, .transport = transport, .all_to_all = exchange.of(0)};
    bytes[static_cast<size_t>(transport) - 1] =
        ExpertParallel::create(rendezvous.bootstrap(0), c.config(), options).memory_bytes();
  }
  // Rows of 8 tokens in and out, and two ids and weights; what combine() gathers.
  constexpr int64_t kRows = 8 * 128 * 2;
  EXPECT_GE(bytes[0], 3 * kRows + 8 * 2 * 8);
  EXPECT_GE(bytes[1], bytes[0] + 2 * kRows + 8 * 2 * 8);
  EXPECT_EQ(bytes[2], bytes[1] + kRows);
}

TEST(ExpertParallel, ExplainsItsTransport) {
  const ExpertParallelConfig config{.hidden = 128, .experts = 64, .top_k = 2, .max_tokens = 4};
  ExpertParallelConfig wide = config;
  wide.experts = 65;
  EXPECT_EQ(explain_expert_parallel({.ranks = 8, .config = config}).chosen, "peer_memory");
  const Explanation many = explain_expert_parallel({.ranks = 9, .config = config});
  EXPECT_EQ(many.chosen, "all_gather");
  EXPECT_EQ(many.candidates[0].reason, "at most 8 ranks, got 9");
  EXPECT_EQ(many.candidates[1].reason, "no all_to_all function was given");
  EXPECT_EQ(explain_expert_parallel(
                {.ranks = 2, .config = config, .is_one_host = false, .has_all_to_all = true})
                .chosen,
            "all_to_all");
  // NCCL takes no more ranks on GPUs than its kernels.
  const Device gpu{.type = DeviceType::kCuda, .index = 0};
  const Explanation on_gpus =
      explain_expert_parallel({.ranks = 65, .config = wide, .device = gpu, .is_one_host = false});
  EXPECT_EQ(on_gpus.chosen, "");
  for (const auto& candidate : on_gpus.candidates) EXPECT_NE(candidate.reason, "");
}

// --- Errors --------------------------------------------------------------------------------------

TEST(ExpertParallel, RefusesConfigurationsWithoutAMeaning) {
  const ExpertParallelConfig good{.hidden = 128, .experts = 8, .top_k = 2, .max_tokens = 4};
  const auto refuse = [&](auto&& change, const std::vector<std::string>& fragments) {
    ExpertParallelConfig config = good;
    change(config);
    expect_error(kInvalid, fragments, [&] { ExpertParallel::create_local(2, config); });
  };
  refuse([](auto& c) { c.experts = 1; }, {"experts", "2 ranks", "got 1"});
  refuse([](auto& c) { c.top_k = 9; }, {"top_k", "1 to 8", "got 9"});
  refuse([](auto& c) { c.top_k = 0; }, {"top_k", "got 0"});
  refuse([](auto& c) { c.max_tokens = 0; }, {"max_tokens", "got 0"});
  refuse([](auto& c) { c.max_tokens = int64_t{1} << 31; }, {"max_tokens", "rows"});
  refuse([](auto& c) { c.hidden = 0; }, {"hidden", "got 0"});
  refuse([](auto& c) { c.hidden = int64_t{1} << 61; }, {"max_tokens, hidden, top_k", "2^62"});
  refuse([](auto& c) { c.hidden = std::numeric_limits<int64_t>::max(); }, {"hidden", "2^62"});
  refuse(
      [](auto& c) {
        c.order = CombineOrder::kTopK;
        c.max_tokens = (int64_t{1} << 30) - 1;
      },
      {"max_tokens, top_k", "2 slots", "2^31 - 1"});
  refuse(
      [](auto& c) {
        c.hidden = 100;
        c.payload = RowFormat::kNvfp4PerToken;
      },
      {"hidden", "multiple of 16", "got 100"});
  refuse([](auto& c) { c.payload = RowFormat::kNvfp4; }, {"payload", "nvfp4"});
  refuse([](auto& c) { c.result_dtype = DType::kU8; }, {"result_dtype", "U8"});
  refuse(
      [](auto& c) {
        c.order = CombineOrder::kTopK;
        c.result_dtype = DType::kF16;
      },
      {"result_dtype", "topk", "F16"});
  expect_error(kInvalid, {"ranks", "9"}, [&] { ExpertParallel::create_local(9, good); });
  expect_error(kInvalid, {"order", "rank, topk", "\"slot\""}, [] { parse_combine_order("slot"); });
}

TEST(ExpertParallel, RefusesArgumentsBeforeAnythingIsSent) {
  const ExpertCase c({.ranks = 1, .tokens = {4}}, 70);
  auto groups = ExpertParallel::create_local(1, c.config());
  ExpertParallel& group = groups[0];
  const CodedRows rows = c.rows(0);
  std::vector<uint16_t> out(4 * 128);
  const TensorView result = TensorView::contiguous(out.data(), DType::kBF16, {4, 128});
  TensorView ids = c.ids(0);
  ids.dtype = DType::kI64;
  expect_error(kInvalid, {"ids", "I32", "I64"}, [&] { group.dispatch(rows, ids, c.weights(0)); });
  TensorView few = c.weights(0);
  few.shape[0] = 3;
  expect_error(kInvalid, {"weights"}, [&] { group.dispatch(rows, c.ids(0), few); });
  const std::vector<uint16_t> nine(9 * 128);
  expect_error(kInvalid, {"rows", "max_tokens = 8", "got 9"}, [&] {
    group.dispatch({.values = TensorView::contiguous(nine.data(), DType::kBF16, {9, 128}),
                    .scales = {},
                    .row_scale = {}},
                   c.ids(0), c.weights(0));
  });
  expect_error(kInvalid, {"received", "no dispatch() came before"},
               [&] { group.combine({}, result); });
  expect_error(kInvalid, {"results", "no dispatch() came before"},
               [&] { static_cast<void>(group.results()); });
  const ReceivedTokens received = group.dispatch(rows, c.ids(0), c.weights(0));
  expect_error(kInvalid, {"dispatch", "combine()"},
               [&] { group.dispatch(rows, c.ids(0), c.weights(0)); });
  TensorView short_out = result;
  short_out.shape[0] = 3;
  expect_error(kInvalid, {"out", "[4, N]"}, [&] { group.combine(received, short_out); });
  ReceivedTokens other = received;
  other.call = 7;
  expect_error(kInvalid, {"received", "call 1", "got call 7"},
               [&] { group.combine(other, result); });
  group.combine(received, result);
  expect_error(kInvalid, {"received", "combined already"},
               [&] { group.combine(received, result); });
  expect_error(kInvalid, {"results", "combined already"},
               [&] { static_cast<void>(group.results()); });
  group.destroy();
  expect_error(kInvalid, {"destroyed"}, [&] { static_cast<void>(group.rank()); });
}

TEST(ExpertParallel, RefusesLayersThatDoNotFit) {
  const ExpertCase c({.tokens = {4, 4}}, 80);
  const auto refuse = [&](const MoeLayer& layer, ExpertParallel& group,
                          const std::vector<std::string>& fragments) {
    std::vector<uint16_t> out(4 * 128);
    expect_error(kInvalid, fragments, [&] {
      group.run(layer, c.rows(0), c.ids(0), c.weights(0),
                TensorView::contiguous(out.data(), DType::kBF16, {4, 128}), {});
    });
  };
  auto groups = ExpertParallel::create_local(2, c.config());
  refuse(c.layer(1), groups[0], {"layer", "expert_offset 0", "got 4"});
  refuse(c.layer(0), groups[0], {"workspace"});
  refuse(MoeLayer(), groups[0], {"layer", "empty"});
  ExpertParallelConfig other = c.config();
  other.payload = RowFormat::kMxfp8;
  auto quantized = ExpertParallel::create_local(2, other);
  refuse(c.layer(0), quantized[0], {"layer", "mode bf16 reads rows in bf16", "mxfp8"});
  const ExpertCase slots({.tokens = {4, 4}, .order = CombineOrder::kTopK}, 81);
  ExpertParallelConfig wide = slots.config();
  wide.result_dtype = DType::kF32;
  auto wide_slots = ExpertParallel::create_local(2, wide);
  refuse(slots.layer(0), wide_slots[0], {"layer", "slot_dtype F32", "BF16"});
}

TEST(ExpertParallel, AFunctionThatThrowsEndsTheObject) {
  const ExpertCase c({.ranks = 1, .tokens = {4}}, 82);
  SharedRendezvous rendezvous(1);
  ThreadExchange exchange(1);
  int calls = 0;
  const auto throws_later = [&, works = exchange.of(0)](std::span<const std::byte> send,
                                                        std::span<std::byte> receive) {
    if (++calls > 2) throw std::runtime_error("no network");
    works(send, receive);
  };
  ExpertParallel group = ExpertParallel::create(
      rendezvous.bootstrap(0), c.config(),
      {.device = {}, .transport = ExpertTransport::kAllToAll, .all_to_all = throws_later});
  EXPECT_THROW(static_cast<void>(c.run(group)), std::runtime_error);
  expect_error(ErrorKind::kDevice, {"an earlier call failed"},
               [&] { static_cast<void>(c.run(group)); });
  expect_error(ErrorKind::kDevice, {"an earlier call failed"},
               [&] { static_cast<void>(group.results()); });
  EXPECT_EQ(calls, 3);
}

// The workspace may have any shape.
TEST(ExpertParallel, TakesAWorkspaceOfTwoAxes) {
  const ExpertCase c({.ranks = 1, .tokens = {4}, .order = CombineOrder::kTopK}, 83);
  auto group = ExpertParallel::create_local(1, c.config());
  const MoeLayer layer = c.layer(0);
  const int64_t rows = group[0].required_workspace(layer) / 256 + 1;
  const AlignedBytes workspace(rows * 256);
  std::vector<uint8_t> out(4 * 128 * 2);
  group[0].run(layer, c.rows(0), c.ids(0), c.weights(0),
               TensorView::contiguous(out.data(), DType::kBF16, {4, 128}),
               TensorView::contiguous(workspace.view().data, DType::kU8, {rows, 256}));
  EXPECT_EQ(out, c.expected(0));
}

}  // namespace
}  // namespace narrowfloat::testing
