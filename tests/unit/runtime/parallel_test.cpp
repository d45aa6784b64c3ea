// Parallel loops: coverage, exceptions, thread counts.
#include "runtime/parallel.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

// All cores again at the end of a test.
class Threads : public ::testing::Test {
 protected:
  ~Threads() override { set_num_threads(0); }
};
using ParallelFor = Threads;
using ParallelMax = Threads;
using NumThreads = Threads;

TEST_F(ParallelFor, CoversEveryIndexOnceWithAnyGrainAndThreadCount) {
  for (const int threads : {0, 1, 2, 5}) {
    set_num_threads(threads);
    for (const int64_t count : {0, 1, 7, 1000, 4097}) {
      for (const int64_t grain : {1, 3, 1000, 5000}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
        parallel_for(count, grain, [&](int64_t begin, int64_t end) {
          EXPECT_LT(begin, end);
          for (int64_t i = begin; i < end; ++i) ++hits.at(static_cast<size_t>(i));
        });
        EXPECT_TRUE(std::all_of(hits.begin(), hits.end(), [](const auto& hit) { return hit == 1; }))
            << count << " by " << grain;
      }
    }
  }
}

TEST_F(ParallelFor, RunsSmallWorkInOnePiece) {
  int calls = 0;
  parallel_for(100, 100, [&](int64_t begin, int64_t end) {
    ++calls;
    EXPECT_EQ(begin, 0);
    EXPECT_EQ(end, 100);
  });
  EXPECT_EQ(calls, 1);
}

TEST_F(ParallelFor, PassesExceptionsToTheCaller) {
  for (const int64_t grain : {1, 1000}) {
    EXPECT_THROW(parallel_for(500, grain,
                              [](int64_t begin, int64_t end) {
                                if (begin <= 250 && 250 < end) throw std::out_of_range("250");
                              }),
                 std::out_of_range);
  }
  // And works again afterwards.
  std::atomic<int64_t> sum = 0;
  parallel_for(100, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  });
  EXPECT_EQ(sum, 4950);
}

TEST_F(ParallelMax, FindsTheLargestWhereverItIs) {
  std::vector<uint32_t> values(1000);
  std::iota(values.begin(), values.end(), 1U);
  for (const size_t position : {size_t{0}, size_t{499}, size_t{999}}) {
    std::vector<uint32_t> numbers = values;
    numbers[position] = 0x7F800000U;
    for (const int64_t grain : {1, 64, 5000}) {
      EXPECT_EQ(parallel_max(1000, grain,
                             [&](int64_t begin, int64_t end) {
                               return *std::max_element(numbers.begin() + begin,
                                                        numbers.begin() + end);
                             }),
                0x7F800000U);
    }
  }
}

TEST_F(ParallelMax, IsZeroForNothing) {
  EXPECT_EQ(parallel_max(0, 16, [](int64_t, int64_t) { return 7U; }), 0U);
}

TEST_F(NumThreads, CanBeLimitedAndReset) {
  const int all = num_threads();
  EXPECT_GE(all, 1);
  set_num_threads(1);
  EXPECT_EQ(num_threads(), 1);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), all);
}

TEST_F(NumThreads, NeverExceedTheCores) {
  const int all = num_threads();
  set_num_threads(100000);
  EXPECT_LE(num_threads(), all);
  EXPECT_GE(num_threads(), 1);
}

TEST_F(NumThreads, RefuseANegativeCountAndKeepTheOld) {
  set_num_threads(1);
  try {
    set_num_threads(-1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_STREQ(error.what(), "num_threads: expected >= 0 (0 means all cores), got -1");
  }
  EXPECT_EQ(num_threads(), 1);
}

TEST_F(NumThreads, BoundTheThreadsThatRun) {
  set_num_threads(1);
  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  parallel_for(200, 1, [&](int64_t, int64_t) {
    const int now = ++running;
    int seen = most;
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    --running;
  });
  EXPECT_EQ(most, 1);
}

}  // namespace
}  // namespace narrowfloat
