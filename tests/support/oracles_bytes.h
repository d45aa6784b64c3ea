// Every implementation of an operation against cpu_reference, with several numbers of threads.
#pragma once

#include <string_view>

#include <gtest/gtest.h>

#include "support/environment.h"

namespace narrowfloat::testing {

// Expects what compute() returns with cpu_reference from all implementations on this CPU.
template <typename Impls, typename Compute>
void expect_oracles_bytes(std::string_view op, const Impls& impls, const Compute& compute) {
  const auto bytes_with = [&](std::string_view name) {
    const ForcedImplementation forced(op, name);
    return compute();
  };
  const auto expected = bytes_with("cpu_reference");
  for (const auto& impl : impls) {
    if (!impl.supports({}).ok()) continue;
    for (const int threads : {1, 2, 3}) {
      const ThreadLimit limit(threads);
      EXPECT_TRUE(bytes_with(impl.name) == expected) << impl.name << ", " << threads << " threads";
    }
  }
}

}  // namespace narrowfloat::testing
