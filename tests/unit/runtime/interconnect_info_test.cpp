// The facts that doctor shows about NCCL and the links between GPUs.
#include <gtest/gtest.h>

#include "narrowfloat/allreduce.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

TEST(NcclInfo, SaysThatABuildWithoutCudaHasNone) {
  if (build_has_cuda()) GTEST_SKIP() << "this build has CUDA";
  const NcclInfo info = nccl_info();
  EXPECT_FALSE(info.found);
  EXPECT_EQ(info.reason, "this build has no CUDA");
  EXPECT_EQ(info.version + info.path, "");
}

TEST(GpuLinks, AreNoneInABuildWithoutCuda) {
  if (build_has_cuda()) GTEST_SKIP() << "this build has CUDA";
  EXPECT_TRUE(gpu_links().empty());
}

}  // namespace
}  // namespace narrowfloat::testing
