// Tests that use several GPUs keep NVLink multicast off (docs/allreduce.md, Protocols).
#pragma once

#include <array>
#include <cstdlib>
#include <string>
#include <utility>

namespace narrowfloat::testing {

// Call it before the first use of CUDA and NCCL; processes that are started later inherit the
// variables. Empty, or a sentence that names a variable which the environment sets to another
// value: such a test must not run.
inline std::string turn_multicast_off() {
  constexpr std::array<std::pair<const char*, const char*>, 3> kVariables{
      {{"NCCL_NVLS_ENABLE", "0"},
       {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"},
       {"NVSHMEM_DISABLE_NVLS", "1"}}};
  for (const auto& [variable, wanted] : kVariables) {
    setenv(variable, wanted, /*overwrite=*/0);
    const std::string value = std::getenv(variable);
    if (value != wanted) return std::string(variable) + " is " + value + ", expected " + wanted;
  }
  return {};
}

}  // namespace narrowfloat::testing
