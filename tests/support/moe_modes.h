// Tests over all modes of the Mixture-of-Experts layer take the modes and the names of their cases
// from here.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/moe_types.h"

namespace narrowfloat::testing {

inline std::vector<MoeMode> every_moe_mode() {
  std::vector<MoeMode> modes;
  for (const MoeModeInfo& info : all_moe_modes()) modes.push_back(info.id);
  return modes;
}

inline std::vector<MoeMode> every_gpu_moe_mode() {
  std::vector<MoeMode> modes;
  for (const MoeModeInfo& info : all_moe_modes()) {
    if (!info.is_on_cpu_alone) modes.push_back(info.id);
  }
  return modes;
}

inline bool has_int8_rows(MoeMode mode) {
  return mode == MoeMode::kMxfp4Int8 || mode == MoeMode::kNvfp4Int8;
}

inline std::string mode_test_name(const ::testing::TestParamInfo<MoeMode>& test) {
  return std::string(name(test.param));
}

}  // namespace narrowfloat::testing
