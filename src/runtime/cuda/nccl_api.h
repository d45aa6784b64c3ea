// The part of NCCL's interface that is used here, declared without nccl.h, which machines with NCCL
// need not have. Values, signatures and the struct are those of NVIDIA's nccl.h; a test compares
// them with that header where the build has it (tests/unit/runtime/cuda/nccl_api_test.cpp).
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <driver_types.h>

namespace narrowfloat::nccl {

// The oldest version that is accepted: ncclConfig_t has the fields below since then.
inline constexpr int kOldestVersion = 21800;  // Major * 10000 + minor * 100 + patch.

using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kInProgress = 7;

using DataType = int;
inline constexpr DataType kUint8 = 1;
inline constexpr DataType kFloat16 = 6;
inline constexpr DataType kFloat32 = 7;
inline constexpr DataType kBfloat16 = 9;

using ReduceOp = int;
inline constexpr ReduceOp kSum = 0;

struct Opaque;
using Comm = Opaque*;

// Passed by value.
struct UniqueId {
  std::array<char, 128> internal;
};

inline constexpr int kUndefined = INT_MIN;

// ncclConfig_t of NCCL 2.18. NCCL reads `size` bytes of it, and takes its own defaults for fields
// that `version` did not have; so a newer NCCL accepts it.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeefU;
  unsigned version = kOldestVersion;
  int blocking = 0;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;  // Padding until 2.25.
};

// The functions, under the names of NCCL without their prefix.
struct Functions {
  Result (*GetVersion)(int* version);
  Result (*GetUniqueId)(UniqueId* id);
  Result (*CommInitRankConfig)(Comm* comm, int ranks, UniqueId id, int rank, Config* config);
  Result (*CommFinalize)(Comm comm);
  Result (*CommDestroy)(Comm comm);
  Result (*CommAbort)(Comm comm);
  Result (*CommGetAsyncError)(Comm comm, Result* state);
  const char* (*GetErrorString)(Result result);
  const char* (*GetLastError)(Comm comm);
  Result (*GroupStart)();
  Result (*GroupEnd)();
  Result (*AllReduce)(const void* input, void* output, size_t count, DataType type, ReduceOp op,
                      Comm comm, cudaStream_t stream);
  Result (*AllGather)(const void* input, void* output, size_t count, DataType type, Comm comm,
                      cudaStream_t stream);
  Result (*Send)(const void* input, size_t count, DataType type, int peer, Comm comm,
                 cudaStream_t stream);
  Result (*Recv)(void* output, size_t count, DataType type, int peer, Comm comm,
                 cudaStream_t stream);
};

}  // namespace narrowfloat::nccl
