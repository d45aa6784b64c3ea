// Every bootstrap: messages of all sizes, faults of ranks, and the collectives of the base class.
#include "narrowfloat/bootstrap.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"
#include "support/expect_error.h"
#include "support/random.h"
#include "unit/runtime/comm/rank_processes.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kShort{200};

std::vector<std::byte> message_of(int rank, uint64_t seed, size_t bytes) {
  Random random(seed * 64 + static_cast<uint64_t>(rank));
  std::vector<std::byte> message(bytes);
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t bits = random.bits();
    std::memcpy(&message[i], &bits, std::min<size_t>(8, bytes - i));
  }
  return message;
}

// "" or what was wrong.
std::string gather_and_check(Bootstrap& bootstrap, uint64_t seed, size_t bytes) {
  const std::vector<std::byte> mine = message_of(bootstrap.rank(), seed, bytes);
  std::vector<std::byte> all(bytes * static_cast<size_t>(bootstrap.size()), std::byte{0xCC});
  bootstrap.all_gather(mine, all);
  std::vector<std::byte> expected;
  for (int rank = 0; rank < bootstrap.size(); ++rank) {
    const std::vector<std::byte> message = message_of(rank, seed, bytes);
    expected.insert(expected.end(), message.begin(), message.end());
  }
  return all == expected ? "" : "wrong bytes in a message of " + std::to_string(bytes);
}

std::string random_collective(Bootstrap& bootstrap, uint64_t seed) {
  Random random(seed);
  const int root = static_cast<int>(random.range(0, bootstrap.size() - 1));
  switch (random.range(0, 4)) {
    case 0:
      bootstrap.barrier();
      return {};
    case 1: {
      std::vector<std::byte> data = message_of(bootstrap.rank(), seed, 100);
      bootstrap.broadcast(data, root);
      return data == message_of(root, seed, 100) ? "" : "wrong broadcast";
    }
    case 2: {
      const auto text = [&](int rank) {
        return std::string(static_cast<size_t>(rank) * (seed % 50), static_cast<char>('a' + rank));
      };
      const std::vector<std::string> texts = bootstrap.gather_texts(text(bootstrap.rank()));
      for (int rank = 0; rank < bootstrap.size(); ++rank) {
        if (texts.at(static_cast<size_t>(rank)) != text(rank)) return "wrong text";
      }
      return {};
    }
    default:
      return gather_and_check(bootstrap, seed, static_cast<size_t>(random.range(0, 9000)));
  }
}

void expect_all(const std::vector<std::string>& results, const std::string& expected) {
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank], expected) << "rank " << rank;
  }
}

class EveryBootstrap : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryBootstrap, GathersMessagesOfAllSizes) {
  for (const int ranks : {1, 2, 3, 8}) {
    const auto meeting = make_meeting(GetParam(), ranks);
    expect_all(meeting->run(ranks,
                            [&](int rank) {
                              const auto bootstrap = meeting->bootstrap(rank, kLongDeadline);
                              std::string wrong;
                              for (const size_t bytes : {0, 1, 4095, 4096, 4097, 1'000'000, 0, 3}) {
                                wrong += gather_and_check(*bootstrap, bytes, bytes);
                              }
                              return wrong;
                            }),
               "");
  }
}

TEST_P(EveryBootstrap, MakesManyCollectivesInSequence) {
  const auto meeting = make_meeting(GetParam(), 3);
  expect_all(meeting->run(3,
                          [&](int rank) {
                            const auto bootstrap = meeting->bootstrap(rank, kLongDeadline);
                            std::string wrong;
                            for (uint64_t seed = 0; seed < 200; ++seed) {
                              wrong += random_collective(*bootstrap, seed);
                            }
                            return wrong;
                          }),
             "");
}

TEST_P(EveryBootstrap, RefusesMessagesOfDifferentSizesOnAllRanks) {
  const auto meeting = make_meeting(GetParam(), 3);
  const std::vector<std::string> results = meeting->run(3, [&](int rank) {
    const auto bootstrap = meeting->bootstrap(rank, kLongDeadline);
    const std::vector<std::byte> mine(rank == 1 ? 200'000 : 8);
    std::vector<std::byte> all(mine.size() * 3);
    const std::string first = error_of([&] { bootstrap->all_gather(mine, all); });
    return first + "\n" + error_of([&] { bootstrap->barrier(); });
  });
  for (const std::string& result : results) {
    expect_contains(result, {"invalid argument: bootstrap", "all_gather number 1",
                             "8 bytes from ranks 0, 2, 200000 bytes from rank 1",
                             "\ndevice error: bootstrap", "an earlier call failed"});
  }
}

TEST_P(EveryBootstrap, AgreesOnOneErrorOrNone) {
  const auto meeting = make_meeting(GetParam(), 4);
  const std::vector<std::string> results = meeting->run(4, [&](int rank) {
    const auto bootstrap = meeting->bootstrap(rank, kLongDeadline);
    const Error io(ErrorKind::kIo, "disk full");
    const Error unsupported(ErrorKind::kUnsupported, "no peer access");
    std::string result = error_of([&] { bootstrap->agree("allocate", nullptr); });
    result += error_of([&] { bootstrap->agree("export", rank == 2 ? &io : nullptr); }) + "\n";
    const Error* const mine = rank == 0 ? nullptr : rank == 2 ? &io : &unsupported;
    result += error_of([&] { bootstrap->agree("map", mine); }) + "\n";
    // And goes on.
    result += error_of([&] { bootstrap->barrier(); });
    return result;
  });
  expect_all(results,
             "I/O error: export: 1 of 4 ranks failed:\n  rank 2: disk full\n"
             "unsupported: map: 3 of 4 ranks failed:\n  ranks 1, 3: no peer access\n"
             "  rank 2: disk full\n");
}

TEST_P(EveryBootstrap, RequiresEqualTexts) {
  const auto meeting = make_meeting(GetParam(), 4);
  const std::vector<std::string> results = meeting->run(4, [&](int rank) {
    const auto bootstrap = meeting->bootstrap(rank, kLongDeadline);
    std::string result = error_of([&] { bootstrap->require_equal("version", "0.1.0"); });
    result += error_of([&] { bootstrap->require_equal("nothing", ""); });
    result += error_of(
        [&] { bootstrap->require_equal("options", rank == 1 ? "deadline 1" : "deadline 30"); });
    return result + error_of([&] { bootstrap->barrier(); });
  });
  expect_all(results,
             "invalid argument: options: expected the same on all 4 ranks, got:\n"
             "  ranks 0, 2, 3: deadline 30\n  rank 1: deadline 1");
}

INSTANTIATE_TEST_SUITE_P(Kinds, EveryBootstrap,
                         ::testing::Values("file", "tcp", "shared", "callback", "threads",
                                           "tcp_threads"),
                         [](const auto& test) { return test.param; });

class FaultyRanks : public ::testing::TestWithParam<std::string> {};
class KilledRanks : public FaultyRanks {};

struct GroupResult {
  int faulty;
  std::vector<std::string> results;
};

// Runs a body in two groups of three ranks at the same time, after two calls: in one rank 0 is the
// faulty one, over TCP the only peer of rank 2, in the other rank 2.
std::vector<GroupResult> run_two_groups(const std::string& kind,
                                        const std::function<std::string(Bootstrap&, int)>& body) {
  const auto first = make_meeting(kind, 3);
  const auto second = make_meeting(kind, 3);
  const std::vector<std::string> results = first->run(6, [&](int process) {
    const auto bootstrap = (process < 3 ? first : second)->bootstrap(process % 3, kShort);
    bootstrap->barrier();
    bootstrap->barrier();
    return body(*bootstrap, process < 3 ? 0 : 2);
  });
  return {{0, {results.begin(), results.begin() + 3}}, {2, {results.begin() + 3, results.end()}}};
}

TEST_P(FaultyRanks, AreNamedWhereTheyNeverCame) {
  const auto meeting = make_meeting(GetParam(), 4);
  const std::vector<std::string> results = meeting->run(4, [&](int rank) -> std::string {
    if (rank == 2) return "absent";
    meeting->bootstrap(rank, kShort)->barrier();
    return "no error";
  });
  for (const size_t rank : {size_t{0}, size_t{1}, size_t{3}}) {
    expect_contains(results[rank], {"device error: bootstrap", "rank 2"});
  }
}

TEST_P(FaultyRanks, AreNamedWhereTheyAreLate) {
  const auto groups = run_two_groups(GetParam(), [&](Bootstrap& bootstrap, int late) {
    if (bootstrap.rank() == late) std::this_thread::sleep_for(2 * kShort);
    return error_of([&] { bootstrap.barrier(); });
  });
  for (const auto& [late, results] : groups) {
    for (const std::string& error : results) {
      expect_contains(error, {"device error: bootstrap", "all_gather number 3", "waited 200 ms",
                              "rank " + std::to_string(late)});
    }
  }
}

TEST_P(FaultyRanks, AreNamedWhereTheyHaveLeft) {
  const auto groups =
      run_two_groups(GetParam(), [&](Bootstrap& bootstrap, int left) -> std::string {
        if (bootstrap.rank() == left) return "left";
        return error_of([&] { bootstrap.barrier(); });
      });
  for (const auto& [left, results] : groups) {
    for (size_t rank = 0; rank < 3; ++rank) {
      if (rank == static_cast<size_t>(left)) continue;
      expect_contains(results[rank], {"device error: bootstrap", "all_gather number 3",
                                      "rank " + std::to_string(left)});
    }
  }
}

TEST_P(KilledRanks, AreNamed) {
  const auto groups = run_two_groups(GetParam(), [&](Bootstrap& bootstrap, int killed) {
    if (bootstrap.rank() == killed) std::raise(SIGKILL);
    return error_of([&] { bootstrap.barrier(); });
  });
  for (const auto& [killed, results] : groups) {
    for (size_t rank = 0; rank < 3; ++rank) {
      if (rank == static_cast<size_t>(killed)) {
        EXPECT_EQ(results[rank], "signal 9");
      } else {
        expect_contains(results[rank], {"device error: bootstrap", "all_gather number 3",
                                        "rank " + std::to_string(killed)});
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, KilledRanks, ::testing::Values("file", "tcp", "shared"),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Kinds, FaultyRanks, ::testing::Values("file", "tcp", "shared", "threads"),
                         [](const auto& test) { return test.param; });

TEST(Bootstrap, AgreeKeepsItsOwnErrorIfOthersAreLost) {
  SharedRendezvous rendezvous(2);
  const auto bootstrap = rendezvous.bootstrap(0, milliseconds(20));
  const Error own(ErrorKind::kUnsupported, "no peer access");
  expect_error(ErrorKind::kUnsupported,
               {"map: rank 0 failed: no peer access", "could not be told", "rank 1"},
               [&] { bootstrap->agree("map", &own); });
}

TEST(Bootstrap, RefusesPlacesThatCannotBe) {
  const auto make = [](RankInfo info, milliseconds deadline) {
    return [=] { static_cast<void>(make_tcp_bootstrap("localhost", 1, info, deadline)); };
  };
  expect_error(kInvalid, {"size", ">= 1", "got 0"}, make({.rank = 0, .size = 0}, kLongDeadline));
  expect_error(kInvalid, {"rank", "0 to 1", "got 2"}, make({.rank = 2, .size = 2}, kLongDeadline));
  expect_error(kInvalid, {"rank", "0 to 1", "got -1"},
               make({.rank = -1, .size = 2}, kLongDeadline));
  expect_error(kInvalid, {"local_rank", "got -3"}, make({.local_rank = -3}, kLongDeadline));
  expect_error(kInvalid, {"deadline", "got 0 ms"}, make({}, milliseconds(0)));
}

TEST(Bootstrap, RefusesBuffersAndRootsThatDoNotFit) {
  const auto bootstrap = make_callback_bootstrap({}, [](auto, auto) { FAIL(); });
  std::vector<std::byte> data(8);
  std::vector<std::byte> all(9);
  expect_error(kInvalid, {"all: expected 8 bytes for each of 1 ranks, got 9"},
               [&] { bootstrap->all_gather(data, all); });
  expect_error(kInvalid, {"root: expected 0 to 0", "got 1"},
               [&] { bootstrap->broadcast(data, 1); });
}

TEST(CallbackBootstrap, PassesOnWhatTheFunctionThrows) {
  expect_error(kInvalid, {"gather: expected a function"},
               [] { static_cast<void>(make_callback_bootstrap({}, nullptr)); });
  const auto bootstrap = make_callback_bootstrap(
      {.rank = 0, .size = 2}, [](auto, auto) { throw std::out_of_range("the group is gone"); });
  EXPECT_THROW(bootstrap->barrier(), std::out_of_range);
  expect_error(ErrorKind::kDevice, {"an earlier call failed", "the group is gone"},
               [&] { bootstrap->barrier(); });
}

TEST(SharedRendezvous, GivesEachRankOneBootstrapOfOneJob) {
  SharedRendezvous rendezvous(2);
  expect_error(kInvalid, {"rank", "got 2"}, [&] { static_cast<void>(rendezvous.bootstrap(2)); });
  expect_error(kInvalid, {"deadline"},
               [&] { static_cast<void>(rendezvous.bootstrap(0, milliseconds(-1))); });
  const auto first = rendezvous.bootstrap(0);
  expect_error(kInvalid, {"rank 0 has its bootstrap already"},
               [&] { static_cast<void>(rendezvous.bootstrap(0)); });
  EXPECT_EQ(first->info().job_id, rendezvous.bootstrap(1)->info().job_id);
  EXPECT_NE(first->info().job_id, SharedRendezvous(1).bootstrap(0)->info().job_id);
  for (const int size : {0, -1, 1'000'000}) {
    expect_error(kInvalid, {"size", std::to_string(size)}, [&] { SharedRendezvous wrong(size); });
  }
}

}  // namespace
}  // namespace narrowfloat::testing
