// The capabilities of this build and machine, and the implementation that an operation would use.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/export.h"
#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// "0.1.0".
NARROWFLOAT_API std::string_view version();

// Upper bound on worker threads of CPU operations; 0 means all cores. Results never depend on it.
// Throws kInvalidArgument for a negative count.
NARROWFLOAT_API void set_num_threads(int count);
NARROWFLOAT_API int num_threads();

struct BuildInfo {
  std::string version;
  std::string compiler;
  std::string build_type;
  bool cuda_enabled = false;
  // "90a": machine code for Hopper; "86": portable machine code; "compute_80": portable PTX.
  std::vector<std::string> cuda_architectures;
};
NARROWFLOAT_API BuildInfo build_info();

struct CpuInfo {
  std::string model;
  int logical_cores = 0;
  std::vector<std::string> features;  // SIMD levels: "avx2", "fma", "f16c", "avx512f", ...
};
NARROWFLOAT_API CpuInfo cpu_info();

// Memory that the system can give without swapping, within the limits of control groups
// (containers).
NARROWFLOAT_API uint64_t available_memory_bytes();

struct GpuInfo {
  std::string name;
  std::string compute_capability;  // "9.0"
  int64_t memory_bytes = 0;
  // The name in BuildInfo::cuda_architectures of the code that runs there; empty: none does.
  std::string architecture;
};
// Empty in a build without CUDA and on a machine without a GPU.
NARROWFLOAT_API std::vector<GpuInfo> gpu_info();

// NARROWFLOAT_* environment variables that are set, as NAME=value. None changes results but
// NARROWFLOAT_FORCE, which pins implementations.
NARROWFLOAT_API std::vector<std::string> environment_settings();

// One implementation of an operation and whether it takes a problem.
struct Candidate {
  std::string name;
  bool supported = false;
  std::string reason;  // Why not, or why it was passed over; empty for the chosen one.
};

struct Explanation {
  std::string op;
  std::string problem;                // The problem in words.
  std::vector<Candidate> candidates;  // In the order they are asked.
  std::string chosen;                 // Empty if none fits.
};

// Shapes and types of a call, without data.
struct ExplainRequest {
  FormatId format = FormatId::kNvfp4;
  std::optional<ScaleLayoutId> scale_layout;
  MathMode math = MathMode::kExact;
  DType dtype = DType::kBF16;  // Type of the unquantized side.
  int64_t batch = 1;
  int64_t rows = 1;
  int64_t cols = 128;
  Device device;
};

// Names of the operations explain() knows. Stages of a Mixture-of-Experts layer have explain_moe()
// (moe.h).
NARROWFLOAT_API std::vector<std::string_view> operations();
// Whether the operation has formats: for the others a request's format counts for nothing. Throws
// kInvalidArgument for an unknown operation.
NARROWFLOAT_API bool has_formats(std::string_view op);
// Throws kInvalidArgument for an unknown operation or an impossible shape.
NARROWFLOAT_API Explanation explain(std::string_view op, const ExplainRequest& request);

}  // namespace narrowfloat
