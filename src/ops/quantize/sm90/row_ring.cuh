// A ring of rows in shared memory, for a CTA that computes one row after another: while it
// computes, a copy of the next row arrives. So the bytes in flight take no registers. One row is in
// flight at a time: a second one makes 16384 rows of MXFP8 10 % slower, because memory then has too
// many requests at once.
//
// A row is runs of 16 elements of 16 bits, one per thread. Every warp copies and reads its own runs
// only, so no barrier of the CTA is needed. A copy instruction moves 512 adjacent bytes, lane l the
// 16-byte pieces l or l + 32 of the warp; a lane then reads pieces 2l and 2l + 1. Piece p is stored
// at place p ^ (p / 8 % 2), so that both are free of bank conflicts.
#pragma once

#include "device/elements.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/reduce.cuh"
#include "ops/quantize/sm90/row_runs.h"

namespace narrowfloat {

inline constexpr uint32_t kRowRunBytes = 2 * kRowRun;
// Alignment of the ring's memory: both pieces of a run lie in one part of this size, which is also
// a whole row of banks.
inline constexpr uint32_t kRingAlignment = 128;

// kInputs: the number of tensors side by side in a row of input, each with as many runs.
template <int kInputs>
class RowRing {
  static constexpr uint32_t kWarpBytes = kWarpSize * kRowRunBytes;  // Bytes of one input.
  static constexpr uint32_t kRowBytes = kInputs * kWarpBytes;
  static constexpr uint32_t kPieceBytes = 16;

 public:
  static constexpr uint32_t kBytes = 2 * kRowBytes;  // Bytes per warp.

  // memory: the ring of all warps, aligned. input: the first row of this CTA. step: bytes from one
  // of its rows to the next.
  __device__ RowRing(uint32_t memory, const uint8_t* input, int64_t step, uint32_t runs_per_row)
      : step_(step), input_bytes_(runs_per_row * kRowRunBytes) {
    const uint32_t warp = threadIdx.x / kWarpSize;
    const uint32_t lane = threadIdx.x % kWarpSize;
    const uint32_t ring = memory + warp * kBytes;
    target_ = ring + (lane ^ (lane / 8 % 2)) * kPieceBytes;
    place_ = ring + lane * kRowRunBytes + lane / 4 % 2 * kPieceBytes;
    const uint32_t offset = warp * kWarpBytes + lane * kPieceBytes;
    source_ = input + offset;
    has_first_ = offset < input_bytes_;
    has_second_ = offset + kWarpBytes / 2 < input_bytes_;
    clear_others();
  }

  // Starts the copy of the first row.
  __device__ void start() { copy(target_); }

  // Waits for the current row, and starts the copy of the next one if there is one.
  __device__ void advance(bool is_followed) {
    wait_for_async_copies();
    __syncwarp();
    row_ ^= kRowBytes;
    if (is_followed) copy(target_ + row_);
  }

  // This thread's run of one of the inputs; zeros beyond the end of the row.
  template <class Elements>
  __device__ Elements read(int input) const {
    const uint32_t place = place_ + (row_ ^ kRowBytes) + static_cast<uint32_t>(input) * kWarpBytes;
    const uint4 low = load_shared_16(place);
    const uint4 high = load_shared_16(place ^ kPieceBytes);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }

 private:
  __device__ void copy(uint32_t target) {
#pragma unroll
    for (uint32_t input = 0; input < kInputs; ++input) {
      const uint32_t piece = target + input * kWarpBytes;
      const uint8_t* source = source_ + input * input_bytes_;
      if (has_first_) copy_16(piece, source);
      if (has_second_) copy_16(piece + kWarpBytes / 2, source + kWarpBytes / 2);
    }
    source_ += step_;
  }
  __device__ void clear_others() const {
#pragma unroll 1
    for (uint32_t place = 0; place < kBytes; place += kWarpBytes) {
      if (!has_first_) clear_shared_16(target_ + place);
      if (!has_second_) clear_shared_16(target_ + place + kWarpBytes / 2);
    }
  }

  int64_t step_;
  uint32_t input_bytes_;
  uint32_t target_;  // Destination of this lane's copies.
  uint32_t place_;   // Address of this lane's reads.
  const uint8_t* source_;
  bool has_first_;
  bool has_second_;
  uint32_t row_ = 0;  // The slot, of two, of the row that is copied next.
};

}  // namespace narrowfloat
