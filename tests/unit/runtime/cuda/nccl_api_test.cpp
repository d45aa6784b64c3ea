// The declarations of NCCL's interface against nccl.h, where the build has it.
#include "runtime/cuda/nccl_api.h"

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>
#endif

#include <gtest/gtest.h>

namespace narrowfloat::nccl {
namespace {

#if defined(NCCL_MAJOR) && NCCL_VERSION_CODE >= 22800
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(offsetof(Config, traffic_class) == offsetof(ncclConfig_t, trafficClass));
static_assert(sizeof(Config) == offsetof(ncclConfig_t, commName));
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));
static_assert(kUndefined == NCCL_CONFIG_UNDEF_INT);

TEST(NcclApi, HasTheValuesOfNcclsHeader) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  EXPECT_EQ(Config().magic, theirs.magic);
  EXPECT_EQ(kOldestVersion, NCCL_VERSION(2, 18, 0));
  EXPECT_EQ(kSuccess, static_cast<int>(ncclSuccess));
  EXPECT_EQ(kInProgress, static_cast<int>(ncclInProgress));
  EXPECT_EQ(kUint8, static_cast<int>(ncclUint8));
  EXPECT_EQ(kFloat16, static_cast<int>(ncclFloat16));
  EXPECT_EQ(kFloat32, static_cast<int>(ncclFloat32));
  EXPECT_EQ(kBfloat16, static_cast<int>(ncclBfloat16));
  EXPECT_EQ(kSum, static_cast<int>(ncclSum));
}
#endif

TEST(NcclApi, HasTheConfigurationOfNccl218) {
  EXPECT_EQ(sizeof(Config), 48U);
  EXPECT_EQ(Config().size, sizeof(Config));
  EXPECT_EQ(Config().blocking, 0);
}

}  // namespace
}  // namespace narrowfloat::nccl
