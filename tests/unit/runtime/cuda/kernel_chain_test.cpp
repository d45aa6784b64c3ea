// The reads that a kernel of a layer may do before its wait.
#include "runtime/cuda/kernel_chain.h"

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

constexpr uint32_t kTiles = 1;
constexpr uint32_t kRows = 2;

TEST(KernelChain, MemoryIsCompleteTwoKernelsAfterTheOneThatWroteIt) {
  KernelChain chain;
  EXPECT_FALSE(chain.is_complete(kTiles));
  chain.append(kTiles);
  EXPECT_FALSE(chain.is_complete(kTiles));
  chain.append(kRows);
  EXPECT_TRUE(chain.is_complete(kTiles));
  EXPECT_FALSE(chain.is_complete(kRows));
  EXPECT_FALSE(chain.is_complete(kTiles | kRows));
}

TEST(KernelChain, AKernelThatTriggersBeforeItsWaitCompletesNothing) {
  KernelChain chain;
  chain.append(kTiles);
  chain.append(kRows, KernelChain::Trigger::kBeforeWait);
  EXPECT_FALSE(chain.is_complete(kTiles));
  chain.append(0);
  EXPECT_TRUE(chain.is_complete(kTiles));
}

TEST(KernelChain, WhatIsCompleteStaysSoUntilItIsWrittenAgain) {
  KernelChain chain;
  chain.append(kTiles);
  chain.append(0);
  chain.append(0, KernelChain::Trigger::kBeforeWait);
  EXPECT_TRUE(chain.is_complete(kTiles));
  chain.append(kTiles);
  EXPECT_FALSE(chain.is_complete(kTiles));
}

}  // namespace
}  // namespace narrowfloat
