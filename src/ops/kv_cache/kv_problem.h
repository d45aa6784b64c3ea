// Operations of KV caches as data (see quantize_problem.h). Every quantization iterates three axes
// (i, j, k) and the blocks of a row:
//
//   rows      i = row                          target (i, 0, 0)
//   append    i = row, k = head                target (page, entry, head) by lookup
//   cache     i = page, j and k as in memory   target (i, j, k)
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/kv_cache.h"
#include "ops/kv_cache/kv_math.h"
#include "runtime/support.h"

namespace narrowfloat {

inline constexpr size_t kKvSides = 2;  // Keys and values.

// Distances of three axes, in bytes.
using KvSteps = std::array<int64_t, 3>;

// A place in the three dimensions of KvSteps.
using KvIndex = std::array<int64_t, 3>;
inline int64_t kv_offset(const KvSteps& steps, const KvIndex& at) {
  return at[0] * steps[0] + at[1] * steps[1] + at[2] * steps[2];
}

struct KvQuantizeProblem {
  DType input = DType::kBF16;
  MathMode math = MathMode::kExact;
  KvRule rule = KvRule::kQuantize;
  Device device;
  std::array<int64_t, 3> extents{};        // Extents of (i, j, k).
  std::array<int64_t, kKvSides> blocks{};  // Blocks per row; 0: no such side.
  bool looks_up = false;                   // Append.
  bool has_heads_first = false;            // Cache: j is the head and k the token.
};
std::string to_string(const KvQuantizeProblem& problem);

struct KvQuantizeSide {
  const uint8_t* input = nullptr;
  KvSteps input_steps{};
  uint8_t* values = nullptr;
  KvSteps value_steps{};  // Steps of (i, j, k); append: of page, entry, head.
  uint8_t* scales = nullptr;
  KvSteps scale_steps{};
  KvFactor factor;
  float* decode_scale = nullptr;  // Cache: receives 1 / factor in the end.
  bool reorders_scales = false;
};

struct KvQuantizeArgs {
  std::array<KvQuantizeSide, kKvSides> sides;
  KvTargets targets;
};

struct KvQuantizeImpl {
  std::string_view name;
  Support (*supports)(const KvQuantizeProblem& problem);
  void (*run)(const KvQuantizeProblem& problem, const KvQuantizeArgs& args, Stream stream);
};
std::span<const KvQuantizeImpl> kv_quantize_impls();
extern const KvQuantizeImpl kKvQuantizeCpuReference;
extern const KvQuantizeImpl kKvQuantizeCpuBaseline;
extern const KvQuantizeImpl kKvQuantizeSm90;  // Only in builds with CUDA, like the next.
extern const KvQuantizeImpl kKvQuantizeSm80;

// Dequantization iterates (sequence, token, head), or (row, 0, 0) without tables.
struct KvDequantizeProblem {
  DType output = DType::kBF16;
  Device device;
  std::array<int64_t, 3> extents{};
  std::array<int64_t, kKvSides> blocks{};
  bool looks_up = false;
};
std::string to_string(const KvDequantizeProblem& problem);

struct KvDequantizeSide {
  const uint8_t* values = nullptr;
  KvSteps value_steps{};  // Steps of page, entry, head; rows: of the row.
  const uint8_t* scales = nullptr;
  KvSteps scale_steps{};
  uint8_t* output = nullptr;
  KvSteps output_steps{};
  KvFactor factor;
};

struct KvDequantizeArgs {
  std::array<KvDequantizeSide, kKvSides> sides;
  KvTables tables;
};

struct KvDequantizeImpl {
  std::string_view name;
  Support (*supports)(const KvDequantizeProblem& problem);
  void (*run)(const KvDequantizeProblem& problem, const KvDequantizeArgs& args, Stream stream);
};
std::span<const KvDequantizeImpl> kv_dequantize_impls();
extern const KvDequantizeImpl kKvDequantizeCpuReference;
extern const KvDequantizeImpl kKvDequantizeCpuBaseline;
extern const KvDequantizeImpl kKvDequantizeSm90;  // Only in builds with CUDA, like the next.
extern const KvDequantizeImpl kKvDequantizeSm80;

// Moves the scales of V between the quantizer's order and that of attention kernels.
struct KvReorderProblem {
  Device device;
  int64_t pages = 0;
  int64_t heads = 0;
  int64_t tokens = 0;  // Tokens per page.
  int64_t blocks = 0;  // Blocks per head.
  bool is_inverse = false;
};
std::string to_string(const KvReorderProblem& problem);

struct KvReorderArgs {
  const uint8_t* input = nullptr;
  KvSteps input_steps{};  // Steps of page, token, head.
  uint8_t* output = nullptr;
  KvSteps output_steps{};
};

struct KvReorderImpl {
  std::string_view name;
  Support (*supports)(const KvReorderProblem& problem);
  void (*run)(const KvReorderProblem& problem, const KvReorderArgs& args, Stream stream);
};
std::span<const KvReorderImpl> kv_reorder_impls();
extern const KvReorderImpl kKvReorderCpuReference;
extern const KvReorderImpl kKvReorderCpuBaseline;
extern const KvReorderImpl kKvReorderSm90;  // Only in builds with CUDA, like the next.
extern const KvReorderImpl kKvReorderSm80;

}  // namespace narrowfloat
