// Launch shapes: the invariants of launch_shape.cpp over a sweep, and examples of them.
#include "comm/launch_shape.h"

#include <bit>

#include <gtest/gtest.h>

#include "comm/workspace_layout.h"

namespace narrowfloat {
namespace {

// Whether an SM has the registers, warps and shared memory for `ctas` CTAs; a warp's registers come
// in units of 256, and a CTA has 1 KB of shared memory more than it asks for.
bool fits_on_sm(int64_t ctas, const AllReduceShape& shape, const ShapeRequest& request) {
  const int64_t registers = allreduce_registers(request.ranks, request.element_bytes);
  const int64_t memory = row_memory_bytes(shape.steps, shape.warps, request.element_bytes) + 1024;
  return ctas * shape.warps * ((registers * 32 + 255) / 256 * 256) <= 65536 &&
         ctas * shape.warps <= 64 && ctas * memory <= 227 * 1024;
}

void expect_valid(const ShapeRequest& request, const LaunchLimits& limits) {
  const AllReduceShape shape = allreduce_shape(request, limits);
  const int64_t chunks = (request.hidden + 255) / 256;
  const int cluster_chunks = shape.cluster * shape.warps * shape.steps;
  ASSERT_GE(cluster_chunks, chunks);
  ASSERT_LE(cluster_chunks, kMostClusterChunks);
  ASSERT_TRUE(std::has_single_bit(static_cast<uint32_t>(shape.cluster)));
  ASSERT_LE(shape.cluster, limits.max_cluster);
  ASSERT_GE(shape.warps, 1);
  ASSERT_LE(shape.warps, limits.max_warps);
  ASSERT_LE(shape.cluster * shape.warps, kMostClusterWarps);
  ASSERT_GE(shape.clusters, 1);
  ASSERT_LE(shape.clusters, request.tokens);
  ASSERT_LE(shape.ctas(), kMostCtas);
  ASSERT_EQ(shape.ctas() % shape.cluster, 0);
  // All CTAs are resident at once.
  const int64_t ctas_per_sm = (shape.ctas() + limits.sms - 1) / limits.sms;
  ASSERT_TRUE(ctas_per_sm == 1 || fits_on_sm(ctas_per_sm, shape, request));
  ASSERT_EQ(shape, allreduce_shape(request, limits));
}

TEST(AllReduceShape, KeepsItsInvariants) {
  int cases = 0;
  for (int64_t hidden = 8; hidden <= 32768; hidden += hidden % 256 == 8 ? 8 : 24) {
    for (const int64_t tokens : {1, 2, 7, 16, 33, 64, 128, 132, 133, 200, 1024, 8192}) {
      for (const int ranks : {1, 2, 4, 8}) {
        for (const LaunchLimits& limits :
             {LaunchLimits{}, LaunchLimits{.sms = 16}, LaunchLimits{.sms = 78, .max_cluster = 4},
              LaunchLimits{.max_cluster = 1, .max_warps = 8}}) {
          const int element_bytes = hidden % 16 == 0 ? 2 : 4;
          expect_valid({tokens, hidden, ranks, element_bytes}, limits);
          if (HasFatalFailure()) FAIL() << hidden << " " << tokens << " " << ranks;
          ++cases;
        }
      }
    }
  }
  EXPECT_GT(cases, 200'000);
}

struct Example {
  int64_t tokens;
  int threads;
  int cluster;
  int steps;
};

// H = 7168 on 132 SMs, while there are no more tokens than SMs.
TEST(AllReduceShape, HasTheExamplesOfTheSpecification) {
  for (const Example& example :
       {Example{1, 224, 4, 1}, Example{16, 224, 4, 1}, Example{64, 448, 2, 1},
        Example{128, 448, 1, 2}, Example{132, 448, 1, 2}}) {
    const AllReduceShape shape =
        allreduce_shape({.tokens = example.tokens, .hidden = 7168, .ranks = 4}, {});
    EXPECT_EQ(shape.warps * 32, example.threads) << example.tokens;
    EXPECT_EQ(shape.cluster, example.cluster) << example.tokens;
    EXPECT_EQ(shape.steps, example.steps) << example.tokens;
  }
}

// Spec 8.1: the clamp of another project's rule left a part of these rows without threads.
TEST(AllReduceShape, CoversTheRowsThatAClampOfTheClusterLost) {
  for (const int64_t hidden : {14336, 16384, 20480, 24576, 32768}) {
    const AllReduceShape shape = allreduce_shape({.tokens = 1, .hidden = hidden}, {});
    EXPECT_GE(int64_t{shape.cluster} * shape.warps * shape.steps * 256, hidden);
  }
}

}  // namespace
}  // namespace narrowfloat
