// Expert parallelism by blocks that a collective moves, with all ranks on one GPU and copies in
// place of NCCL: the bytes of the ranks on the CPU, in graphs, and for more ranks than a host has.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "comm/expert_ranks.h"
#include "cuda/expert_groups.h"
#include "cuda/gpu_test.h"
#include "layers/expert_parallel/block_transport.h"
#include "layers/expert_parallel/cuda_expert_rank.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

class ExpertBlocksCuda : public OwnCodeTest {};

// The blocks that the ranks of a group send.
struct BlockGroup {
  ExpertTransport transport = ExpertTransport::kAllToAll;
  int ranks = 0;
  std::vector<const uint8_t*> sent;
  std::vector<int64_t> block_bytes;
};

// Copies in stream order what the other ranks have started to send: all of them start first.
class CopiedBlocks final : public BlockTransport {
 public:
  CopiedBlocks(std::shared_ptr<BlockGroup> group, int rank)
      : group_(std::move(group)),
        rank_(rank),
        ended_(allocate_device_memory(gpu(), sizeof(uint32_t))),
        progress_(allocate_mapped_memory(gpu(), sizeof(CallProgress))) {
    const uint32_t zero = 0;
    copy_to_device(ended_.get(), &zero, sizeof(zero), gpu(), {});
  }
  [[nodiscard]] ExpertTransport transport() const override { return group_->transport; }
  void connect(const uint8_t* /*sent*/, uint8_t* /*received*/, int64_t block_bytes) override {
    EXPECT_GT(block_bytes, 0);
    ++connections_;
  }
  void start(const uint8_t* sent, uint8_t* received, int64_t block_bytes,
             Stream /*stream*/) override {
    check();
    EXPECT_EQ(connections_, 2);  // Blocks of tokens, blocks of results.
    group_->sent[static_cast<size_t>(rank_)] = sent;
    group_->block_bytes[static_cast<size_t>(rank_)] = block_bytes;
    received_ = received;
  }
  EndOfExchange finish(Stream stream) override {
    for (int source = 0; source < group_->ranks; ++source) {
      const auto at = static_cast<size_t>(source);
      const int64_t block = group_->block_bytes[at];
      EXPECT_EQ(block, group_->block_bytes[static_cast<size_t>(rank_)]);
      if (group_->transport == ExpertTransport::kAllGather) {
        const int64_t all = group_->ranks * block;
        copy_on_device(received_ + source * all, group_->sent[at], all, gpu(), stream);
      } else if (source != rank_) {
        copy_on_device(received_ + source * block, group_->sent[at] + rank_ * block, block, gpu(),
                       stream);
      }
    }
    return {.ended = reinterpret_cast<uint32_t*>(ended_.get()), .progress = &progress()};
  }
  void check() override {
    if (!failure_.empty()) throw_error(ErrorKind::kDevice, "{}", failure_);
  }
  void abort(const std::string& reason) override { failure_ = reason; }

  [[nodiscard]] CallProgress& progress() const {
    return *reinterpret_cast<CallProgress*>(progress_.get());
  }

 private:
  std::shared_ptr<BlockGroup> group_;
  int rank_;
  std::shared_ptr<uint8_t> ended_;
  std::shared_ptr<uint8_t> progress_;
  std::string failure_;
  uint8_t* received_ = nullptr;
  int connections_ = 0;
};

struct LocalGroup {
  std::shared_ptr<BlockGroup> blocks = std::make_shared<BlockGroup>();
  std::vector<CopiedBlocks*> transports;  // Owned by the ranks.
  std::vector<ExpertParallel> ranks;
};

LocalGroup make_group(const GroupSetup& setup, ExpertTransport transport) {
  LocalGroup group;
  group.blocks->transport = transport;
  group.blocks->ranks = setup.ranks;
  group.blocks->sent.resize(static_cast<size_t>(setup.ranks));
  group.blocks->block_bytes.resize(static_cast<size_t>(setup.ranks));
  const ExpertLayout layout = expert_layout(config_of(setup), setup.ranks);
  for (int rank = 0; rank < setup.ranks; ++rank) {
    auto copied = std::make_unique<CopiedBlocks>(group.blocks, rank);
    group.transports.push_back(copied.get());
    auto made = std::make_unique<CudaExpertRank>(
        config_of(setup), layout, rank, gpu(),
        make_cuda_block_exchange(layout, rank, gpu(), nullptr, std::move(copied)),
        milliseconds(20'000));
    made->connect();
    group.ranks.push_back(ExpertParallel::Impl::wrap(std::move(made)));
  }
  return group;
}

constexpr std::array kTransports{ExpertTransport::kAllToAll, ExpertTransport::kAllGather};

TEST_F(ExpertBlocksCuda, GiveTheBytesOfTheCpu) {
  uint64_t seed = 20;
  for (const RowFormat payload : kPayloads) {
    for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
      for (const ExpertTransport transport : kTransports) {
        SCOPED_TRACE(fmt::format("{} {} {}", name(payload), name(order), name(transport)));
        const GroupSetup setup{.tokens = {17, 0, 40}, .payload = payload, .order = order};
        LocalGroup group = make_group(setup, transport);
        EXPECT_EQ(group.ranks[0].transport(), transport);
        Groups groups(setup, std::move(group.ranks));
        ++seed;
        groups.expect_same_bytes(kPatterns[seed % kPatterns.size()], seed);
        groups.setup().tokens = {0, 40, 3};
        groups.expect_same_bytes(kPatterns[seed / 2 % kPatterns.size()], seed + 50);
        // Both exchanges of both calls were told of.
        for (const CopiedBlocks* blocks : group.transports) {
          EXPECT_EQ(blocks->progress().ended, 4U);
        }
      }
    }
  }
}

// Scales and ids whose rows are no multiples of 16 bytes.
TEST_F(ExpertBlocksCuda, TakeRowsOfAnyWidthAndCopiesOfExperts) {
  const std::vector<int32_t> places{0, 1, 2, 3, 4, 5, 6, 7, 0, 1};
  for (const ExpertTransport transport : kTransports) {
    const GroupSetup setup{.ranks = 2,
                           .tokens = {9, 5},
                           .hidden = 16,
                           .experts = 8,
                           .top_k = 1,
                           .max_tokens = 9,
                           .places = places,
                           .payload = RowFormat::kNvfp4PerToken,
                           .result_dtype = DType::kF32,
                           .out_dtype = DType::kF32};
    Groups(setup, make_group(setup, transport).ranks).expect_same_bytes(Ids::kWithInvalid, 31);
  }
}

// The result of a row is the row itself, so that the output is the token times its destinations.
void expect_copies(std::vector<ExpertParallel> group, const GroupSetup& setup, uint64_t seed) {
  const CudaStream stream;
  std::vector<std::unique_ptr<RankCall>> calls;
  for (int rank = 0; rank < setup.ranks; ++rank) {
    calls.push_back(std::make_unique<RankCall>(setup, rank, Ids::kUniform, seed));
    RankCall& call = *calls.back();
    group[static_cast<size_t>(rank)].start_dispatch(
        {.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}}, call.ids.on_gpu(),
        call.weights.on_gpu(), stream.get());
  }
  std::vector<ReceivedTokens> received;
  for (ExpertParallel& rank : group) received.push_back(rank.finish_dispatch(stream.get()));
  for (size_t rank = 0; rank < group.size(); ++rank) {
    copy_on_device(group[rank].results().data, received[rank].rows.values.data,
                   bytes_of(group[rank].results()), gpu(), stream.get());
    group[rank].start_combine(received[rank], stream.get());
  }
  for (size_t rank = 0; rank < group.size(); ++rank) {
    group[rank].finish_combine(calls[rank]->out.on_gpu(), stream.get());
  }
  stream.synchronize();
  for (size_t rank = 0; rank < group.size(); ++rank) {
    group[rank].check_error();
    RankCall& call = *calls[rank];
    const std::vector<uint8_t> bytes = call.out.from_gpu();
    for (int64_t token = 0; token < call.tokens; ++token) {
      uint64_t ranks = 0;
      for (int64_t slot = token * setup.top_k; slot < (token + 1) * setup.top_k; ++slot) {
        ranks |= uint64_t{1} << rank_of_expert(setup.experts, setup.ranks,
                                               call.ids.data<int32_t>()[slot]);
      }
      const auto copies = static_cast<float>(std::popcount(ranks));
      for (int64_t i = token * setup.hidden; i < (token + 1) * setup.hidden; ++i) {
        float got = 0;
        std::memcpy(&got, bytes.data() + i * 4, sizeof(got));
        ASSERT_EQ(got, copies * bf16_to_float(call.rows.data<uint16_t>()[i]))
            << "rank " << rank << ", token " << token;
      }
    }
  }
}

TEST_F(ExpertBlocksCuda, TakeMoreRanksThanAHostHas) {
  constexpr int kRanks = 34;  // More than a word has bits.
  GroupSetup setup{.ranks = kRanks,
                   .tokens = std::vector<int64_t>(kRanks, 1),
                   .hidden = 16,
                   .experts = 70,
                   .top_k = 4,
                   .max_tokens = 2,
                   .out_dtype = DType::kF32};
  setup.tokens.front() = 0;
  setup.tokens.back() = 2;
  expect_copies(make_group(setup, ExpertTransport::kAllToAll).ranks, setup, 32);
}

TEST_F(ExpertBlocksCuda, ACountThatCannotBeIsAnError) {
  const GroupSetup setup{.ranks = 2, .tokens = {5, 8}, .max_tokens = 8};
  LocalGroup group = make_group(setup, ExpertTransport::kAllToAll);
  std::array<std::unique_ptr<RankCall>, 2> calls;
  for (int rank = 0; rank < 2; ++rank) {
    const auto at = static_cast<size_t>(rank);
    calls[at] = std::make_unique<RankCall>(setup, rank, Ids::kUniform, 34);
    group.ranks[at].start_dispatch(
        {.values = calls[at]->rows.on_gpu(), .scales = {}, .row_scale = {}},
        calls[at]->ids.on_gpu(), calls[at]->weights.on_gpu(), {});
  }
  // The count leads the block of rank 0.
  const int32_t count = 9;
  copy_to_device(const_cast<uint8_t*>(group.blocks->sent[1]), &count, sizeof(count), gpu(), {});
  const ReceivedTokens received = group.ranks[0].finish_dispatch({});
  synchronize_device();
  const std::vector<uint8_t> ids = bytes_on_gpu(received.ids);
  EXPECT_TRUE(std::all_of(ids.begin() + static_cast<std::ptrdiff_t>(ids.size() / 2), ids.end(),
                          [](uint8_t byte) { return byte == 0xFF; }));
  expect_error(ErrorKind::kDevice,
               {"call 1", "rank 0 of 2", "rank 1 sent a count of 9", "at most 8"},
               [&] { group.ranks[0].check_error(); });
}

TEST_F(ExpertBlocksCuda, ARankThatGivesUpEndsItsExchanges) {
  const GroupSetup setup{.ranks = 1, .tokens = {5}, .max_tokens = 8};
  std::vector<ExpertParallel> group = make_group(setup, ExpertTransport::kAllGather).ranks;
  group[0].give_up();
  expect_error(ErrorKind::kDevice, {"this rank gave up"}, [&] { group[0].check_error(); });
  group[0].destroy();
}

// NCCL's operations can be captured; copies can, too.
TEST_F(ExpertBlocksCuda, CanBeCaptured) {
  const GroupSetup setup{.ranks = 1, .tokens = {6}, .max_tokens = 8};
  LocalGroup group = make_group(setup, ExpertTransport::kAllGather);
  RankCall call(setup, 0, Ids::kUniform, 36);
  const CudaStream stream;
  const CapturedGraph graph(stream, [&] {
    const ReceivedTokens received =
        group.ranks[0].dispatch({.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}},
                                call.ids.on_gpu(), call.weights.on_gpu(), stream.get());
    group.ranks[0].combine(received, call.out.on_gpu(), stream.get());
  });
  EXPECT_EQ(graph.num_other_nodes(), 2);  // The copies that stand for NCCL.
  graph.replay(3);
  group.ranks[0].check_error();
  EXPECT_EQ(group.transports[0]->progress().ended, 6U);
}

}  // namespace
}  // namespace narrowfloat::testing
