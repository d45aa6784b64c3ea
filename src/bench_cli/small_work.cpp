// Operations without a format: 8-bit groups, rows and slots of KV caches, shuffled rows, packed
// bits.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "bench_cli/work.h"
#include "narrowfloat/group_quantize.h"
#include "narrowfloat/kv_cache.h"
#include "narrowfloat/pack_bits.h"
#include "narrowfloat/shuffle.h"

namespace narrowfloat::cli {
namespace {

using enum WorkBuffer::Role;

constexpr int64_t kCodeGroup = 128;  // Columns of 8-bit groups with one scale.
constexpr int64_t kKvBlock = 16;
constexpr int64_t kHeadDim = 128;
constexpr int64_t kPageSize = 16;
constexpr int64_t kShuffleTile = 128;  // epilogue_tile_m: groups of 32 rows.

uint64_t size_of(int64_t elements, DType dtype) {
  return static_cast<uint64_t>(elements * bits(dtype) / 8);
}

Work make(std::string_view operation, int64_t elements) {
  Work work;
  work.operation = operation;
  work.elements = elements;
  return work;
}

// Random numbers that the call reads once.
void add_random(Work& work, std::string_view name, int64_t count, DType dtype) {
  work.buffers.push_back({std::string(name), kInput, size_of(count, dtype), {}, dtype});
  work.read_bytes += size_of(count, dtype);
}

void add_bytes(Work& work, std::string_view name, Bytes content) {
  const uint64_t size = content.size();
  work.buffers.push_back({std::string(name), kInput, size, std::move(content)});
  work.read_bytes += size;
}

// The call writes `used` bytes of it.
void add_output(Work& work, std::string_view name, uint64_t size, uint64_t used) {
  work.buffers.push_back({std::string(name), kOutput, size, {}});
  work.write_bytes += used;
}

Bytes random_bytes(int64_t count, uint32_t first, uint32_t last) {
  std::mt19937 random(5);
  Bytes bytes(static_cast<size_t>(count));
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(first + random() % (last - first + 1));
  }
  return bytes;
}

// Any codes, and E4M3 scales around 1.
void add_kv_codes(Work& work, int64_t rows, int64_t cols) {
  add_bytes(work, "values", random_bytes(rows * cols / 2, 0, 255));
  add_bytes(work, "scales", random_bytes(rows * cols / kKvBlock, 0x30, 0x3F));
}

KvCodes kv_codes(std::byte* values, std::byte* scales, int64_t rows, int64_t cols, Device where) {
  return {TensorView::contiguous(values, DType::kU8, {rows, cols / 2}, where),
          TensorView::contiguous(scales, DType::kU8, {rows, cols / kKvBlock}, where)};
}

Work make_group_quantize(const SweepCase& what) {
  const int64_t rows = what.rows;
  const int64_t cols = what.cols;
  Work work = make("group_quantize", rows * cols);
  const uint64_t scales = size_of(rows * cols / kCodeGroup, DType::kF32);
  add_output(work, "values", static_cast<uint64_t>(rows * cols),
             static_cast<uint64_t>(rows * cols));
  add_output(work, "scales", scales, scales);
  add_random(work, "input", rows * cols, what.dtype);
  work.call = [what, rows, cols](Addresses at, Device where, Stream stream) {
    quantize_group_8bit(
        TensorView::contiguous(at[2], what.dtype, {rows, cols}, where),
        TensorView::contiguous(at[0], DType::kF8E4M3, {rows, cols}, where),
        TensorView::contiguous(at[1], DType::kF32, {rows, cols / kCodeGroup}, where), {}, stream);
  };
  return work;
}

Work make_kv_quantize(const SweepCase& what) {
  const int64_t rows = what.rows;
  const int64_t cols = what.cols;
  Work work = make("kv_quantize", rows * cols);
  const auto values = static_cast<uint64_t>(rows * cols / 2);
  const auto scales = static_cast<uint64_t>(rows * cols / kKvBlock);
  add_output(work, "values", values, values);
  add_output(work, "scales", scales, scales);
  add_random(work, "input", rows * cols, what.dtype);
  work.call = [what, rows, cols](Addresses at, Device where, Stream stream) {
    kv_quantize(TensorView::contiguous(at[2], what.dtype, {rows, cols}, where),
                kv_codes(at[0], at[1], rows, cols, where), {}, what.math, stream);
  };
  return work;
}

Work make_kv_dequantize(const SweepCase& what) {
  const int64_t rows = what.rows;
  const int64_t cols = what.cols;
  Work work = make("kv_dequantize", rows * cols);
  const uint64_t output = size_of(rows * cols, what.dtype);
  add_output(work, "output", output, output);
  add_kv_codes(work, rows, cols);
  work.call = [what, rows, cols](Addresses at, Device where, Stream stream) {
    kv_dequantize(kv_codes(at[1], at[2], rows, cols, where),
                  TensorView::contiguous(at[0], what.dtype, {rows, cols}, where), {}, stream);
  };
  return work;
}

// Keys and values of `rows` tokens, `cols` wide, into slots of a cache of twice as many.
Work make_kv_append(const SweepCase& what) {
  const int64_t rows = what.rows;
  const int64_t heads = what.cols / kHeadDim;
  const int64_t pages = (2 * rows + kPageSize - 1) / kPageSize;
  Work work = make("kv_quantize", 2 * rows * what.cols);
  const auto used = static_cast<uint64_t>(rows * what.cols);
  const auto cache = static_cast<uint64_t>(pages * kPageSize * what.cols);
  for (const std::string_view side : {"key", "value"}) {
    add_output(work, std::string(side) + " cache", cache / 2, used / 2);
    add_output(work, std::string(side) + " scales", cache / kKvBlock, used / kKvBlock);
  }
  for (const std::string_view side : {"key", "value"}) {
    add_random(work, side, rows * what.cols, what.dtype);
  }
  std::vector<int64_t> slots(static_cast<size_t>(pages * kPageSize));
  std::iota(slots.begin(), slots.end(), int64_t{0});
  std::shuffle(slots.begin(), slots.end(), std::mt19937(6));
  Bytes chosen(static_cast<size_t>(rows) * sizeof(int64_t));
  std::memcpy(chosen.data(), slots.data(), chosen.size());
  add_bytes(work, "slots", std::move(chosen));
  work.call = [what, rows, heads, pages](Addresses at, Device where, Stream stream) {
    const auto codes = [&](size_t first) {
      return KvCodes{TensorView::contiguous(at[first], DType::kU8,
                                            {pages, kPageSize, heads, kHeadDim / 2}, where),
                     TensorView::contiguous(at[first + 1], DType::kU8,
                                            {pages, kPageSize, heads, kHeadDim / kKvBlock}, where)};
    };
    const auto side = [&](size_t index) {
      return TensorView::contiguous(at[index], what.dtype, {rows, heads, kHeadDim}, where);
    };
    kv_append_slots(side(4), side(5), TensorView::contiguous(at[6], DType::kI64, {rows}, where),
                    {.k = codes(0), .v = codes(2)}, what.math, stream);
  };
  return work;
}

Work make_shuffle(const SweepCase& what) {
  const int64_t rows = what.rows;
  const int64_t cols = what.cols;
  Work work = make("shuffle", rows * cols);
  const uint64_t size = size_of(rows * cols, what.dtype);
  add_output(work, "output", size, size);
  add_random(work, "input", rows * cols, what.dtype);
  work.call = [what, rows, cols](Addresses at, Device where, Stream stream) {
    shuffle_rows(TensorView::contiguous(at[1], what.dtype, {rows, cols}, where),
                 TensorView::contiguous(at[0], what.dtype, {rows, cols}, where), kShuffleTile,
                 stream);
  };
  return work;
}

Work make_pack_bits(const SweepCase& what) {
  const int64_t count = what.rows * what.cols;
  Work work = make("pack_bits", count);
  const auto size = static_cast<uint64_t>((count + 7) / 8);
  add_output(work, "output", size, size);
  add_bytes(work, "input", random_bytes(count, 0, 1));
  work.call = [count](Addresses at, Device where, Stream stream) {
    pack_bits(TensorView::contiguous(at[1], DType::kU8, {count}, where),
              TensorView::contiguous(at[0], DType::kU8, {(count + 7) / 8}, where), BitOrder::kBig,
              stream);
  };
  return work;
}

}  // namespace

Work make_small_work(const SweepCase& what) {
  switch (what.op) {
    case BenchOp::kGroupQuantize:
      return make_group_quantize(what);
    case BenchOp::kKvQuantize:
      return make_kv_quantize(what);
    case BenchOp::kKvDequantize:
      return make_kv_dequantize(what);
    case BenchOp::kKvAppend:
      return make_kv_append(what);
    case BenchOp::kShuffle:
      return make_shuffle(what);
    default:
      return make_pack_bits(what);
  }
}

bool is_small_case_possible(const SweepCase& what) {
  const bool is_16_bit = what.dtype != DType::kF32;
  switch (what.op) {
    case BenchOp::kGroupQuantize:
      return what.cols % kCodeGroup == 0;
    case BenchOp::kKvQuantize:
      return is_16_bit && what.cols % kKvBlock == 0;
    case BenchOp::kKvDequantize:
      return what.cols % kKvBlock == 0;
    case BenchOp::kKvAppend:
      return is_16_bit && what.cols % kHeadDim == 0;
    case BenchOp::kShuffle:
      return what.rows % shuffle_group_rows(kShuffleTile) == 0;
    default:
      return true;
  }
}

}  // namespace narrowfloat::cli
