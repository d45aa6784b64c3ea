// NCCL, found and loaded at run time: the file that NARROWFLOAT_NCCL names; without that variable
// the copy that the process has loaded already (torch's), else libnccl.so.2 on the loader's path
// (docs/allreduce.md, Launchers).
#pragma once

#include <string>

#include "narrowfloat/allreduce.h"
#include "runtime/cuda/nccl_api.h"

namespace narrowfloat {

struct NcclLibrary {
  nccl::Functions functions{};
  std::string version;  // "2.28.9"
  std::string path;
};

// Loads NCCL once for the process, for good. NVLink multicast stays off: NCCL_NVLS_ENABLE is set to
// 0 where the environment has no value (docs/allreduce.md). NCCL reads it when the process makes
// its first communicator; if torch has made one before, torch's value holds. Throws kUnsupported
// that says what was tried.
const NcclLibrary& nccl_library();

// Looks for NCCL and closes it again, so that a process which only asks is not bound to that copy.
NcclInfo find_nccl();

}  // namespace narrowfloat
