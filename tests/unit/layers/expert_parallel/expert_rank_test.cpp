// One rank's part in expert parallelism: what happens on it, and on the others, when a step of a
// call fails.
#include "layers/expert_parallel/expert_rank.h"

#include <array>
#include <stdexcept>

#include <gtest/gtest.h>

#include "layers/expert_parallel/expert_exchange.h"
#include "support/allreduce_ranks.h"
#include "support/expect_error.h"
#include "unit/layers/expert_parallel/expert_case.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

// A layer with static scales, but none for its input, refuses the rows that have arrived.
TEST(ExpertParallel, ALayerThatThrowsEndsTheCallOfAll) {
  const ExpertCase c({.mode = MoeMode::kNvfp4, .tokens = {4, 4}}, 84);
  MoeCase broken(MoeMode::kNvfp4, {.tokens = 4, .hidden = 128, .inter = 128},
                 {.kind = ActivationKind::kSwiglu}, 85);
  broken.weights().input_multiplier.reset();
  const MoeConfig config = c.layer(0).config();
  const MoeLayer layer =
      MoeLayer::prepare(broken.shard(config.expert_offset, config.local_experts), config);
  auto groups = ExpertParallel::create_local(2, c.config(), milliseconds(0));
  run_as_threads(2, [&](int rank) {
    ExpertParallel& group = groups[static_cast<size_t>(rank)];
    if (rank == 1) {
      expect_error(ErrorKind::kDevice, {"a rank gave up"},
                   [&] { static_cast<void>(c.run(group)); });
      return;
    }
    const AlignedBytes workspace(group.required_workspace(layer));
    std::vector<uint16_t> out(4 * 128);
    expect_error(kInvalid, {"input_multiplier"}, [&] {
      group.run(layer, c.rows(0), c.ids(0), c.weights(0),
                TensorView::contiguous(out.data(), DType::kBF16, {4, 128}), workspace.view());
    });
  });
}

// The others need not wait for the deadline where one rank gives up.
TEST(ExpertParallel, ARankThatGivesUpEndsTheCallOfAll) {
  const ExpertCase c({.tokens = {4, 4}}, 99);
  auto groups = ExpertParallel::create_local(2, c.config(), milliseconds(0));
  run_as_threads(2, [&](int rank) {
    ExpertParallel& group = groups[static_cast<size_t>(rank)];
    const ReceivedTokens received = group.dispatch(c.rows(rank), c.ids(rank), c.weights(rank));
    if (rank == 0) {
      group.give_up();
      expect_error(ErrorKind::kDevice, {"gave up"}, [&] { static_cast<void>(c.run(group)); });
      return;
    }
    std::vector<uint16_t> out(4 * 128);
    expect_error(ErrorKind::kDevice, {"a rank gave up"}, [&] {
      group.combine(received, TensorView::contiguous(out.data(), DType::kBF16, {4, 128}));
    });
  });
}

// A step that fails on one rank alone, here by a count that no rank sends.
TEST(ExpertParallel, AStepThatThrowsEndsTheCallOfAll) {
  const ExpertCase c({.tokens = {4, 4}}, 100);
  auto groups = ExpertParallel::create_local(2, c.config(), milliseconds(0));
  std::array<ReceivedTokens, 2> received;
  run_as_threads(2, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    received[at] = groups[at].dispatch(c.rows(rank), c.ids(rank), c.weights(rank));
    std::vector<uint16_t> out(4 * 128);
    groups[at].combine(received[at], TensorView::contiguous(out.data(), DType::kBF16, {4, 128}));
  });
  for (int rank = 0; rank < 2; ++rank) {
    groups[static_cast<size_t>(rank)].start_dispatch(c.rows(rank), c.ids(rank), c.weights(rank));
  }
  static_cast<int32_t*>(received[0].counts.data)[1] = 99;
  expect_error(ErrorKind::kDevice, {"rank 1 sent a count of 99 tokens, of at most 8"},
               [&] { static_cast<void>(groups[0].finish_dispatch()); });
  expect_error(ErrorKind::kDevice, {"a rank gave up"},
               [&] { static_cast<void>(groups[1].finish_dispatch()); });
  expect_error(ErrorKind::kDevice, {"gave up"}, [&] { groups[0].check_error(); });
}

// A rank that cannot send.
class SilentRank final : public ExpertParallel::Impl {
 public:
  explicit SilentRank(const ExpertParallelConfig& config)
      : Impl(config, expert_layout(config, 1), 0, Device{}) {}
  [[nodiscard]] ExpertTransport transport() const override { return ExpertTransport::kAuto; }
  [[nodiscard]] int64_t memory_bytes() const override { return 0; }
  void disconnect() override {}
  uint64_t given_up = 0;  // The call.

 private:
  void check_exchange() const override {}
  void tell_peers_to_give_up(Stream /*stream*/) override { given_up = call(); }
  void send_tokens(const CodedRows& /*rows*/, const TensorView& /*ids*/,
                   const TensorView& /*weights*/, Stream /*stream*/) override {
    throw std::runtime_error("no memory");
  }
  void receive_tokens(Stream /*stream*/) override {}
  void send_results(Stream /*stream*/) override {}
  void sum_results(const TensorView& /*out*/, Stream /*stream*/) override {}
  void store_slots(const std::byte* /*rows*/, const int32_t* /*slot_to_row*/, int64_t /*slots*/,
                   Stream /*stream*/) const override {}
  [[nodiscard]] std::byte* received(ExpertPart /*part*/) const override { return nullptr; }
  [[nodiscard]] std::byte* own_results() const override { return nullptr; }
};

TEST(ExpertRank, ASendThatFailsNamesItsCall) {
  const ExpertCase c({.ranks = 1, .tokens = {4}}, 101);
  SilentRank rank(c.config());
  EXPECT_THROW(rank.start_dispatch(c.rows(0), c.ids(0), c.weights(0), {}), std::runtime_error);
  EXPECT_EQ(rank.given_up, 1U);
  expect_error(ErrorKind::kDevice, {"call 1 failed", "this rank gave up"}, [&] { rank.check(); });
}

TEST(PeerExchange, GivesUpTheCallThatItIsTold) {
  const ExpertLayout layout =
      expert_layout({.hidden = 128, .experts = 8, .top_k = 2, .max_tokens = 4}, 2);
  auto memory = make_local_memory(2, Device{}, layout.size_bytes);
  const auto exchange = make_peer_exchange(layout, nullptr, std::move(memory[0]), milliseconds(0));
  exchange->check();
  exchange->give_up(3);
  expect_error(ErrorKind::kDevice, {"call 3 failed", "a rank gave up"}, [&] { exchange->check(); });
}

}  // namespace
}  // namespace narrowfloat::testing
