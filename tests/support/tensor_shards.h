// Checks what a rank of tensor parallelism holds of a layer, and counts what a process has read.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "narrowfloat/moe_checkpoint.h"

namespace narrowfloat::testing {

// Bytes that the process has read so far, from files of any kind; 0 where the kernel does not tell.
inline uint64_t bytes_read() {
  std::ifstream counters("/proc/self/io");
  std::string key;
  uint64_t count = 0;
  while (counters >> key >> count) {
    if (key == "rchar:") return count;
  }
  return 0;
}

// Rows of bytes, matrix after matrix.
struct ByteRows {
  const void* data = nullptr;
  int64_t rows = 0;  // Rows of one matrix.
  int64_t row_bytes = 0;

  [[nodiscard]] const uint8_t* at(int64_t matrix, int64_t row) const {
    return static_cast<const uint8_t*>(data) + (matrix * rows + row) * row_bytes;
  }
};
inline ByteRows byte_rows(const TensorView& view) {
  const int64_t elements = view.rank == 3 ? view.shape[2] : 1;
  return {view.data, view.shape[1], elements * bits(view.dtype) / 8};
}
inline ByteRows byte_rows(const ScaleView& view) {
  return {view.data, view.rows, view.blocks * (view.type == ScaleType::kF32 ? 4 : 1)};
}

// Part `rank` of `ranks` of the rows of gate and up.
inline void expect_rows_of(const ByteRows& whole, const ByteRows& part, GateOrder order, int rank,
                           int ranks, int64_t experts) {
  ASSERT_EQ(part.rows * ranks, whole.rows);
  ASSERT_EQ(part.row_bytes, whole.row_bytes);
  const int64_t half = part.rows / 2;
  for (int64_t expert = 0; expert < experts; ++expert) {
    for (int64_t row = 0; row < part.rows; ++row) {
      int64_t from = rank * part.rows + row;
      if (order != GateOrder::kInterleaved) {
        from = row / half * (whole.rows / 2) + rank * half + row % half;
      }
      ASSERT_EQ(std::memcmp(part.at(expert, row), whole.at(expert, from),
                            static_cast<size_t>(part.row_bytes)),
                0)
          << "expert " << expert << ", row " << row;
    }
  }
}

// Part `rank` of `ranks` of the columns.
inline void expect_cols_of(const ByteRows& whole, const ByteRows& part, int rank, int ranks,
                           int64_t experts) {
  ASSERT_EQ(part.rows, whole.rows);
  ASSERT_EQ(part.row_bytes * ranks, whole.row_bytes);
  for (int64_t expert = 0; expert < experts; ++expert) {
    for (int64_t row = 0; row < part.rows; ++row) {
      ASSERT_EQ(std::memcmp(part.at(expert, row), whole.at(expert, row) + rank * part.row_bytes,
                            static_cast<size_t>(part.row_bytes)),
                0)
          << "expert " << expert << ", row " << row;
    }
  }
}

// Expects that `part` is the shard of a tensor rank of `whole` to the bit, global scales excepted.
inline void expect_tensor_shard(const LoadedMoe& whole, const LoadedMoe& part, int rank,
                                int ranks) {
  const MoeConfig& config = part.config();
  const int64_t experts = config.local_experts;
  ASSERT_EQ(config.inter * ranks, whole.config().inter);
  EXPECT_EQ(config.add_fc2_bias, rank == 0);
  const MoeWeights& all = whole.weights();
  const MoeWeights& own = part.weights();
  const GateOrder order = config.gate_order;
  expect_rows_of(byte_rows(all.w1.values), byte_rows(own.w1.values), order, rank, ranks, experts);
  expect_cols_of(byte_rows(all.w2.values), byte_rows(own.w2.values), rank, ranks, experts);
  if (all.w1.scales.data != nullptr) {
    expect_rows_of(byte_rows(all.w1.scales), byte_rows(own.w1.scales), order, rank, ranks, experts);
    expect_cols_of(byte_rows(all.w2.scales), byte_rows(own.w2.scales), rank, ranks, experts);
  }
  EXPECT_EQ(own.bias1.is_absent(), all.bias1.is_absent());
  EXPECT_EQ(own.bias2.is_absent(), all.bias2.is_absent() || rank > 0);
  if (all.bias1.is_absent()) return;
  expect_rows_of(byte_rows(all.bias1), byte_rows(own.bias1), order, rank, ranks, experts);
}

}  // namespace narrowfloat::testing
