// The common part of the CUDA implementations of the activation: the rows that a call names, and
// the places of their 1x128 scales.
//
// The maps and the number of rows are in device memory and are not validated beforehand: a row is
// valid only if it lies in the buffers and, with a number of rows, in the scales.
#pragma once

#include "base/int_math.h"
#include "device/ptx/prefetch.cuh"
#include "device/vector_io.cuh"
#include "moe_shared/encode_row.cuh"
#include "ops/activation/activation_problem.h"

namespace narrowfloat {

inline constexpr int kGroupCols = kRowGroupCols;

struct NamedRows {
  const int32_t* map;       // slot_to_row, or row_to_slot where rows are visited in order.
  const int32_t* num_rows;  // On the device, or null.
  int32_t count;            // Entries of the map.
  int32_t rows;             // Rows of the buffers.
  bool in_order;            // The map is row_to_slot.
};

inline NamedRows named_rows(const ActivationProblem& problem, const ActivationArgs& args,
                            bool in_order) {
  return {.map = in_order ? args.row_to_slot : args.slot_to_row,
          .num_rows = args.num_rows,
          .count = static_cast<int32_t>(in_order ? problem.rows : problem.slots),
          .rows = static_cast<int32_t>(problem.rows),
          .in_order = in_order};
}

// Kernels count groups of columns over all rows and slots, in whole bundles of up to 8, and the
// bytes of a row in 32 bits.
inline Support fits_flat_index(const ActivationProblem& problem) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  const int64_t entries = (problem.slots > problem.rows ? problem.slots : problem.rows) + 1024;
  const bool fits =
      problem.inter < kLimit / 16 && entries < kLimit / ceil_div(problem.inter + 1, kGroupCols);
  return fits ? Support::yes() : Support::no("needs fewer than 2^31 groups of 128 columns");
}

// Rows at or above this limit are invalid; an impossible number of rows gives 0.
__device__ inline uint32_t row_limit(const NamedRows& named) {
  const auto rows = static_cast<uint32_t>(named.rows);
  if (named.num_rows == nullptr) return rows;
  const auto given = load_readonly<uint32_t>(named.num_rows);
  return given > rows ? 0 : given;
}

inline constexpr uint32_t kNoRow = 0xFFFFFFFFU;

// The rows of kCount neighbouring entries of the map.
template <int kCount>
struct RowSet {
  uint32_t row[kCount];  // Or kNoRow.
  uint32_t limit;        // Limit of all rows.
};

// Prefetches before the wait on the preceding grid: the map starts a chain of two memory latencies.
__device__ inline void prefetch_rows(const NamedRows& named, uint32_t first) {
  if (first < static_cast<uint32_t>(named.count)) prefetch_to_l2(named.map + first);
}

template <int kCount>
__device__ inline RowSet<kCount> find_rows(const NamedRows& named, uint32_t first) {
  RowSet<kCount> set;
  // All loads are issued before the first use. Negative entries are above every limit.
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t entry = first + i;
    const bool exists = entry < static_cast<uint32_t>(named.count);
    set.row[i] = exists ? load_readonly<uint32_t>(named.map + entry) : kNoRow;
  }
  set.limit = row_limit(named);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool is_negative = static_cast<int32_t>(set.row[i]) < 0;
    if (named.in_order) set.row[i] = is_negative ? kNoRow : first + i;
    if (set.row[i] >= set.limit) set.row[i] = kNoRow;
  }
  return set;
}

// 1x128 scales of rows; element (row, block) lies at row * row_stride + block * block_stride.
template <typename Scale, typename Stride>
struct ScaleMatrix {
  Scale* data;
  Stride row_stride;
  Stride block_stride;

  // The scales [blocks, P] whose P is known on the device only.
  __device__ ScaleMatrix of_rows(const NamedRows& named, uint32_t limit) const {
    const bool is_known = named.num_rows == nullptr;
    return {data, is_known ? row_stride : 1, is_known ? block_stride : limit};
  }
  [[nodiscard]] __device__ Scale* place(uint32_t row, uint32_t block) const {
    return data +
           (static_cast<uint64_t>(row) * row_stride + static_cast<uint64_t>(block) * block_stride);
  }
};

template <typename Scale, typename Stride>
ScaleMatrix<Scale, Stride> scale_matrix(const TensorView& scales) {
  return {static_cast<Scale*>(scales.data), static_cast<Stride>(scales.strides[0]),
          static_cast<Stride>(scales.strides[1])};
}

}  // namespace narrowfloat
