// The emulator finds the faults it is for: kernels that are right and the same with one of them.
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/float_ops.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/packed.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_e4m3.cuh"
#include "device/ring.cuh"
#include "narrowfloat/error.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

enum class Fault {
  kNone,
  kNoWaitForFull,
  kNoWaitForEmpty,
  kNoArrival,
  kTwoArrivals,
  kBeyondShared,
  kNoWaitForProducts,
  kEarlyRelease,
};

constexpr int kStages = 2;
constexpr int kRounds = 12;
constexpr int kRows = 64;
constexpr int kStageBytes = kRows * 128;

struct Storage {
  uint8_t rows[kStages][kStageBytes];
  RingBarriers<kStages> barriers;
};

// Sums of 8 columns of each stage's first rows times themselves. A producer warp, four of
// consumers.
template <Fault kFault>
__global__ void ring_kernel(const uint8_t* input, float* output) {
  NF_DYNAMIC_SHARED(uint8_t, shared_bytes, 1024);
  auto& shared = *reinterpret_cast<Storage*>(shared_bytes);
  const Ring<kStages> ring(shared.barriers);
  if (threadIdx.x == 0) ring.init(1, kFault == Fault::kTwoArrivals ? 2 : 4);
  __syncthreads();
  RingPosition<kStages> at;
  if (threadIdx.x == 128) {
    for (int round = 0; round < kRounds; ++round, at.advance()) {
      if (kFault != Fault::kNoWaitForEmpty) ring.wait_empty(at);
      if (kFault == Fault::kNoArrival && round == 3) continue;
      const uint32_t beyond = kFault == Fault::kBeyondShared ? sizeof(Storage) : 0;
      arrive_and_expect(ring.full(at), kStageBytes);
      copy_bulk(shared_address(shared.rows[at.stage]) + beyond, input + round * kStageBytes,
                kStageBytes, ring.full(at));
    }
  }
  if (threadIdx.x >= 128) return;
  for (int round = 0; round < kRounds; ++round, at.advance()) {
    if (kFault != Fault::kNoWaitForFull) ring.wait_full(at);
    const uint64_t rows = swizzled_descriptor(shared_address(shared.rows[at.stage]));
    float sums[4];
    wgmma_fence();
    wgmma_e4m3(sums, rows, rows, 0);
    wgmma_commit();
    if (kFault == Fault::kEarlyRelease) ring.release_warp(at, threadIdx.x % 32);
    if (kFault != Fault::kNoWaitForProducts) wgmma_wait();
    if (kFault != Fault::kEarlyRelease) ring.release_warp(at, threadIdx.x % 32);
    for (int i = 0; i < 4; ++i) output[(round * 128 + threadIdx.x) * 4 + i] = sums[i];
  }
}

// The values that each CTA's neighbour in a cluster of two has sent. One warp has arrived when it
// ends.
template <bool kArrives>
__global__ void cluster_kernel(uint32_t* output) {
  NF_DYNAMIC_SHARED(uint32_t, shared, 16);
  arrive_at_cluster();
  if (threadIdx.x >= 32) return;
  wait_for_cluster();
  store_in_block(shared_address(shared + threadIdx.x), cluster_rank() ^ 1U, blockIdx.x);
  if (kArrives) arrive_at_cluster();
  wait_for_cluster();
  output[blockIdx.x * 32 + threadIdx.x] = shared[threadIdx.x];
}

// Two multiplications on the same sums, of which the second is not waited for.
__global__ void two_products_kernel(const uint8_t* input, float* output) {
  NF_DYNAMIC_SHARED(uint8_t, shared, 1024);
  for (int i = threadIdx.x; i < kStageBytes; i += 128) shared[i] = input[i];
  __syncthreads();
  const uint64_t rows = swizzled_descriptor(shared_address(shared));
  float sums[4];
  for (int i = 0; i < 2; ++i) {
    wgmma_e4m3(sums, rows, rows, i);
    wgmma_commit();
  }
  wgmma_wait_but_one();
  for (int i = 0; i < 4; ++i) output[threadIdx.x * 4 + i] = sums[i];
}

// How a kernel takes part in programmatic dependent launch.
enum class Chain {
  kWaitsThenTriggers,
  kTriggersThenWaits,
  kSaysThatItTriggersFirst,
  kSaysThatItTriggersFirstAndNeverWaits,
  kNeverWaits,
};

template <Chain kChain>
__global__ void chain_kernel(uint32_t* output) {
  if (kChain == Chain::kTriggersThenWaits) trigger_dependent_launch();
  constexpr bool kNeverWaits =
      kChain == Chain::kNeverWaits || kChain == Chain::kSaysThatItTriggersFirstAndNeverWaits;
  if (kChain == Chain::kSaysThatItTriggersFirst ||
      kChain == Chain::kSaysThatItTriggersFirstAndNeverWaits) {
    trigger_dependent_launch_before_wait();
  }
  if (!kNeverWaits && threadIdx.x == 0) wait_for_previous_grids();
  __syncthreads();
  if (kChain == Chain::kWaitsThenTriggers && threadIdx.x == 1) trigger_dependent_launch();
  output[threadIdx.x] = threadIdx.x;
}

class Emulator : public ::testing::Test {
 protected:
  Emulator() : input_(kRounds * kStageBytes) {
    std::mt19937 random(1);
    for (uint8_t& code : input_) code = static_cast<uint8_t>(0x38 + random() % 8);  // 1 to 1.875.
  }
  ~Emulator() override {
    unsetenv("NARROWFLOAT_EMULATOR_SEED");
    cudaDeviceReset();
  }

  template <Fault kFault>
  std::vector<float> run(int seed) {
    setenv("NARROWFLOAT_EMULATOR_SEED", std::to_string(seed).c_str(), 1);
    std::vector<float> output(kRounds * 128 * 4);
    launch(ring_kernel<kFault>, {dim3(1), dim3(160), sizeof(Storage)}, {}, input_.data(),
           output.data());
    return output;
  }

  // Seeds of twenty that fail, or give other sums than the right kernel in order.
  template <Fault kFault>
  int wrong_seeds() {
    const std::vector<float> expected = run<Fault::kNone>(0);
    int wrong = 0;
    for (int seed = 1; seed <= 20; ++seed) {
      try {
        wrong += run<kFault>(seed) == expected ? 0 : 1;
      } catch (const Error&) {  // More arrivals than a barrier expects, for one.
        ++wrong;
        cudaDeviceReset();
      }
    }
    return wrong;
  }

  template <Chain kChain>
  static bool runs_in_chain(bool is_programmatic) {
    std::vector<uint32_t> output(32);
    Stream stream;
    stream.programmatic_launch = is_programmatic;
    try {
      launch(chain_kernel<kChain>, {dim3(2), dim3(32)}, stream, output.data());
    } catch (const Error&) {
      cudaDeviceReset();
      return false;
    }
    return output[31] == 31;
  }

  template <Fault kFault>
  void expect_failure(int seed) {
    EXPECT_THROW(run<kFault>(seed), Error);
    cudaDeviceReset();
  }

 private:
  std::vector<uint8_t> input_;
};

TEST_F(Emulator, GivesARightKernelTheSameResultsInEveryOrder) {
  EXPECT_EQ(wrong_seeds<Fault::kNone>(), 0);
  const std::vector<float> sums = run<Fault::kNone>(0);
  EXPECT_GE(sums.front(), 32.0F);  // 32 products of at least 1.
}

TEST_F(Emulator, FindsWaitsThatLack) {
  EXPECT_GT(wrong_seeds<Fault::kNoWaitForFull>(), 0);
  EXPECT_GT(wrong_seeds<Fault::kNoWaitForEmpty>(), 0);
  EXPECT_GT(wrong_seeds<Fault::kNoWaitForProducts>(), 0);
}

TEST_F(Emulator, FindsAStageThatIsReleasedUnderAProduct) {
  EXPECT_GT(wrong_seeds<Fault::kEarlyRelease>(), 0);
}

TEST_F(Emulator, EndsAKernelThatCannotGoOn) {
  for (const int seed : {0, 1}) {
    expect_failure<Fault::kNoArrival>(seed);
    expect_failure<Fault::kTwoArrivals>(seed);
    expect_failure<Fault::kBeyondShared>(seed);
  }
}

TEST_F(Emulator, FailsAKernelThatTriggersTheNextLaunchBeforeItWaits) {
  EXPECT_TRUE(runs_in_chain<Chain::kWaitsThenTriggers>(true));
  EXPECT_TRUE(runs_in_chain<Chain::kSaysThatItTriggersFirst>(true));
  EXPECT_FALSE(runs_in_chain<Chain::kTriggersThenWaits>(true));
  EXPECT_FALSE(runs_in_chain<Chain::kTriggersThenWaits>(false));
}

TEST_F(Emulator, FailsAKernelOfAChainThatEndsBeforeItWaits) {
  EXPECT_FALSE(runs_in_chain<Chain::kNeverWaits>(true));
  EXPECT_FALSE(runs_in_chain<Chain::kSaysThatItTriggersFirstAndNeverWaits>(true));
  EXPECT_TRUE(runs_in_chain<Chain::kNeverWaits>(false));
}

TEST_F(Emulator, LetsCtasOfAClusterWaitForEachOther) {
  for (int seed = 0; seed < 20; ++seed) {
    setenv("NARROWFLOAT_EMULATOR_SEED", std::to_string(seed).c_str(), 1);
    std::vector<uint32_t> output(4 * 32);
    launch(cluster_kernel<true>, {dim3(4), dim3(64), 128, 2}, {}, output.data());
    for (uint32_t i = 0; i < 4 * 32; ++i) ASSERT_EQ(output[i], i / 32 ^ 1U) << "seed " << seed;
  }
}

TEST_F(Emulator, EndsAKernelThatWaitsForAClusterAtWhichItHasNotArrived) {
  std::vector<uint32_t> output(2 * 32);
  EXPECT_THROW(launch(cluster_kernel<false>, {dim3(2), dim3(64), 128, 2}, {}, output.data()),
               Error);
}

TEST_F(Emulator, RefusesWhatNoGpuLaunches) {
  std::vector<uint32_t> output(4 * 32);
  for (const LaunchShape& shape :
       {LaunchShape{dim3(3), dim3(64), 128, 2}, LaunchShape{dim3(2), dim3(1056), 128, 2},
        LaunchShape{dim3(2), dim3(64), 49 * 1024, 2},
        LaunchShape{dim3(2), dim3(64), 228 * 1024, 2}}) {
    EXPECT_THROW(launch(cluster_kernel<true>, shape, {}, output.data()), Error);
  }
}

TEST_F(Emulator, HidesSumsWithAnotherProductInFlight) {
  setenv("NARROWFLOAT_EMULATOR_SEED", "1", 1);
  const std::vector<uint8_t> input(kStageBytes, 0x38);
  std::vector<float> output(128 * 4);
  launch(two_products_kernel, {dim3(1), dim3(128), kStageBytes}, {}, input.data(), output.data());
  for (const float sum : output) ASSERT_NE(sum, sum);
}

// In processes of their own, since devices are looked at once.
TEST_F(Emulator, AGpuThatTheBuildHasNoCodeForIsRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("NARROWFLOAT_EMULATED_MAJOR", "7", 1);
  const auto ask = [] {
    const Support support = runs_on_cuda({DeviceType::kCuda, 0});
    std::cerr << support.reason();
    std::exit(support.ok() ? 1 : 0);
  };
  EXPECT_EXIT(ask(), testing::ExitedWithCode(0),
              "cuda:0 has compute capability 7.0, the build has code for compute_80,90a");
  unsetenv("NARROWFLOAT_EMULATED_MAJOR");
  EXPECT_TRUE(runs_on_cuda({DeviceType::kCuda, 0}).ok());
}

TEST_F(Emulator, AGpuWithoutCodeOfItsOwnRunsThePortableCode) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto ask = [] {
    const Device device{DeviceType::kCuda, 0};
    std::cerr << runs_own_code(device).reason();
    std::exit(runs_portable_code(device).ok() && !current_device_has_own_code() ? 0 : 1);
  };
  setenv("NARROWFLOAT_EMULATED_MAJOR", "12", 1);
  EXPECT_EXIT(ask(), testing::ExitedWithCode(0), "needs code for exactly this GPU");
  unsetenv("NARROWFLOAT_EMULATED_MAJOR");
  EXPECT_TRUE(runs_own_code({DeviceType::kCuda, 0}).ok());
  EXPECT_FALSE(runs_portable_code({DeviceType::kCuda, 0}).ok());
}

TEST_F(Emulator, RoundsAndFlushesAsAGpu) {
  // Tiny after rounding to 24 bits, 2^-126 as a rounded denormal.
  EXPECT_EQ(mul_ftz(0x1.fffffep-1F, 0x1p-126F), 0.0F);
  EXPECT_EQ(mul_ftz(0x1p-63F, 0x1p-63F), 0x1p-126F);
  EXPECT_EQ(max_bf16x2(0x00008000U, 0x80000000U), 0U);
  EXPECT_EQ(max_f16x2(0x80007E00U, 0x80003C00U), 0x80003C00U);
}

}  // namespace
}  // namespace narrowfloat
