// Which code of a build a GPU runs.
#include "runtime/cuda/device_code.h"

#include <string_view>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

constexpr std::string_view kWheel = "compute_80,80,86,89,90a,100,120";

std::string_view architecture(int major, int minor, bool forces_ptx = false) {
  return find_device_code(kWheel, major, minor, forces_ptx).architecture;
}

TEST(DeviceCode, IsTheOneForExactlyThisGpuWhereThereIsOne) {
  for (const std::string_view list :
       {"90a", "compute_80,90a", "90a,compute_80", "89,90a,compute_90"}) {
    const DeviceCode code = find_device_code(list, 9, 0, false);
    EXPECT_EQ(code.kind, DeviceCodeKind::kOwn) << list;
    EXPECT_EQ(code.architecture, "90a") << list;
  }
  EXPECT_EQ(find_device_code("90a", 9, 1, false).kind, DeviceCodeKind::kNone);
  EXPECT_EQ(find_device_code("90a", 10, 0, false).kind, DeviceCodeKind::kNone);
}

TEST(DeviceCode, IsMachineCodeOfTheSameMajorVersionBeforePtx) {
  EXPECT_EQ(architecture(8, 0), "80");
  EXPECT_EQ(architecture(8, 6), "86");
  EXPECT_EQ(architecture(8, 7), "86");
  EXPECT_EQ(architecture(8, 9), "89");
  EXPECT_EQ(architecture(10, 3), "100");
  EXPECT_EQ(architecture(12, 1), "120");
  EXPECT_EQ(find_device_code("90", 9, 0, false).kind, DeviceCodeKind::kPortable);
}

TEST(DeviceCode, IsPtxForLaterGpus) {
  EXPECT_EQ(architecture(11, 0), "compute_80");
  EXPECT_EQ(find_device_code("compute_80,90a", 8, 0, false).architecture, "compute_80");
  EXPECT_EQ(find_device_code("compute_80,compute_89", 12, 0, false).architecture, "compute_89");
  EXPECT_EQ(find_device_code("compute_80", 12, 0, false).kind, DeviceCodeKind::kPortable);
  EXPECT_TRUE(find_device_code("compute_89", 8, 6, false).architecture.empty());
}

TEST(DeviceCode, IsPtxWhereTheDriverIsToldSo) {
  EXPECT_EQ(architecture(9, 0, true), "compute_80");
  EXPECT_EQ(find_device_code("compute_80,90a", 9, 0, true).kind, DeviceCodeKind::kPortable);
  EXPECT_EQ(find_device_code("90a", 9, 0, true).kind, DeviceCodeKind::kNone);
}

TEST(DeviceCode, IsNoneForOlderGpus) {
  EXPECT_EQ(find_device_code(kWheel, 7, 5, false).kind, DeviceCodeKind::kNone);
  EXPECT_EQ(find_device_code("", 9, 0, false).kind, DeviceCodeKind::kNone);
}

}  // namespace
}  // namespace narrowfloat
