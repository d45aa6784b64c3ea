// NCCL without a GPU: it is found and loaded, or the message says why not; a communicator fails on
// all ranks.
#include "runtime/cuda/nccl.h"

#include <algorithm>
#include <cstdlib>

#include <gtest/gtest.h>

#include "narrowfloat/runtime.h"
#include "runtime/cuda/nccl_library.h"
#include "support/expect_error.h"
#include "support/forked_ranks.h"

namespace narrowfloat::testing {
namespace {

constexpr const char* kVariable = "NARROWFLOAT_NCCL";

void expect_not_found(const std::string& path, const std::string& fragment) {
  setenv(kVariable, path.c_str(), 1);
  const NcclInfo info = nccl_info();
  EXPECT_FALSE(info.found);
  for (const std::string& part : {path, fragment}) {
    EXPECT_NE(info.reason.find(part), std::string::npos) << info.reason;
  }
  // All ranks say so, even where one alone has the bad path.
  expect_error_on_all(2, ErrorKind::kUnsupported, {"loading NCCL", path, fragment},
                      [&](Bootstrap& bootstrap) {
                        if (bootstrap.rank() == 1) unsetenv(kVariable);
                        NcclCommunicator::create(bootstrap, {DeviceType::kCuda, 0},
                                                 std::chrono::milliseconds(1000));
                      });
  unsetenv(kVariable);
}

TEST(Nccl, SaysWhichFileIsMissing) {
  expect_not_found("/missing/libnccl.so.2", std::string(kVariable) + "=");
}

TEST(Nccl, SaysWhichFunctionALibraryLacks) {
  setenv(kVariable, "libm.so.6", 1);
  EXPECT_NE(nccl_info().reason.find("ncclGetVersion"), std::string::npos) << nccl_info().reason;
  unsetenv(kVariable);
}

TEST(Nccl, IsLoadedWithMulticastOffAndMakesAnId) {
  if (const NcclInfo info = nccl_info(); !info.found) GTEST_SKIP() << info.reason;
  // In a process of its own, since NCCL starts a thread.
  expect_success_on_all(1, [](Bootstrap& /*bootstrap*/) {
    unsetenv("NCCL_NVLS_ENABLE");
    const NcclLibrary& library = nccl_library();
    require(library.version == nccl_info().version, "version " + library.version);
    require(library.path.find("libnccl") != std::string::npos, "path " + library.path);
    require(std::string(std::getenv("NCCL_NVLS_ENABLE")) == "0", "NCCL_NVLS_ENABLE");
    nccl::UniqueId id{};
    const nccl::Result result = library.functions.GetUniqueId(&id);
    require(result == nccl::kSuccess, library.functions.GetErrorString(result));
    require(std::ranges::any_of(id.internal, [](char c) { return c != 0; }), "the id is empty");
  });
}

TEST(Nccl, KeepsTheEnvironmentsValueForMulticast) {
  if (const NcclInfo info = nccl_info(); !info.found) GTEST_SKIP() << info.reason;
  expect_success_on_all(1, [](Bootstrap& /*bootstrap*/) {
    setenv("NCCL_NVLS_ENABLE", "00", 1);
    nccl_library();
    require(std::string(std::getenv("NCCL_NVLS_ENABLE")) == "00", "NCCL_NVLS_ENABLE");
  });
}

TEST(Nccl, FailsOnAllRanksWithoutAGpu) {
  if (const NcclInfo info = nccl_info(); !info.found) GTEST_SKIP() << info.reason;
  const std::vector<std::string> reports = run_forked_ranks(2, [](Bootstrap& bootstrap) {
    if (!gpu_info().empty()) return;  // A machine with a GPU.
    NcclCommunicator::create(bootstrap, {DeviceType::kCuda, 0}, std::chrono::milliseconds(5000));
    require(false, "a communicator was made");
  });
  if (reports.front().empty()) GTEST_SKIP() << "there is a GPU";
  for (const std::string& report : reports) {
    EXPECT_TRUE(report.starts_with("device error: ")) << report;
    EXPECT_NE(report.find("there are no CUDA devices"), std::string::npos) << report;
    EXPECT_EQ(report, reports.front());
  }
}

// The struct reaches NCCL: it takes the configuration of 2.18 and then misses the GPU.
TEST(Nccl, AcceptsTheConfiguration) {
  if (const NcclInfo info = nccl_info(); !info.found) GTEST_SKIP() << info.reason;
  const std::vector<std::string> reports = run_forked_ranks(1, [](Bootstrap& /*bootstrap*/) {
    if (!gpu_info().empty()) return;
    const nccl::Functions& functions = nccl_library().functions;
    nccl::UniqueId id{};
    functions.GetUniqueId(&id);
    nccl::Comm comm = nullptr;
    nccl::Config config;
    const nccl::Result result = functions.CommInitRankConfig(&comm, 1, id, 0, &config);
    require(false, functions.GetErrorString(result));
  });
  if (reports.front().empty()) GTEST_SKIP() << "there is a GPU";
  EXPECT_NE(reports.front().find("unhandled cuda error"), std::string::npos) << reports.front();
}

}  // namespace
}  // namespace narrowfloat::testing
