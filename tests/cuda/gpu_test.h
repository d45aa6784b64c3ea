// The base of GPU tests: they skip, and say why, where no kernel of this build can run.
#pragma once

#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include "support/gpu.h"

namespace narrowfloat::testing {

template <class Base>
class OnGpu : public Base {
 protected:
  void SetUp() override {
    if (const std::string reason = gpu_missing(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

using GpuTest = OnGpu<::testing::Test>;
template <class Param>
using GpuTestWith = OnGpu<::testing::TestWithParam<Param>>;

// Skips also where the GPU runs portable code, which lacks what is tested.
template <class Base>
class OnGpuWithOwnCode : public OnGpu<Base> {
 protected:
  void SetUp() override {
    OnGpu<Base>::SetUp();
    if (!this->IsSkipped() && !gpu_has_own_code()) {
      GTEST_SKIP() << "skipped: the GPU runs the portable code of this build";
    }
  }
};

using OwnCodeTest = OnGpuWithOwnCode<::testing::Test>;
template <class Param>
using OwnCodeTestWith = OnGpuWithOwnCode<::testing::TestWithParam<Param>>;

// Whether tests may take minutes and many gigabytes.
inline bool is_large_run() { return std::getenv("NARROWFLOAT_LARGE") != nullptr; }

}  // namespace narrowfloat::testing
