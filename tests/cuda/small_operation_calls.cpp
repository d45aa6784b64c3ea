// Calls of operations without a format, for operation_calls.h.
#include "cuda/small_operation_calls.h"

#include <memory>

#include <fmt/format.h>

#include "narrowfloat/group_quantize.h"
#include "narrowfloat/kv_cache.h"
#include "narrowfloat/pack_bits.h"
#include "narrowfloat/quantize.h"
#include "narrowfloat/shuffle.h"
#include "support/fills.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kKvBlock = 16;

// One input of random contents, two outputs.
struct SmallBuffers {
  Matrix input;
  GuardedBuffer first;
  GuardedBuffer second;
};

std::shared_ptr<SmallBuffers> make_small(Matrix input, int64_t first_bytes, int64_t second_bytes) {
  return std::make_shared<SmallBuffers>(SmallBuffers{
      std::move(input), GuardedBuffer(first_bytes, {}), GuardedBuffer(second_bytes, {})});
}

OperationCall group_quantize_call(DType output, Random& random) {
  const int64_t rows = random.range(1, 150);
  const int64_t cols = 128 * random.range(1, 9);
  const auto b = make_small(Matrix::filled({.dtype = DType::kBF16, .rows = rows, .cols = cols},
                                           Fill::kNormalRows, random.bits()),
                            rows * cols, rows * cols / 128 * 4);
  return {.name = fmt::format("group_quantize {}x{} -> {}", rows, cols, name(output)),
          .inputs = {&b->input.buffer()},
          .outputs = {&b->first, &b->second},
          .queue = [b, output, rows, cols](const DeviceCopies& device, Stream stream) {
            quantize_group_8bit(
                device.view(b->input.view()), device.view(as_matrix(b->first, output, rows, cols)),
                device.view(as_matrix(b->second, DType::kF32, rows, cols / 128)), {}, stream);
          }};
}

OperationCall kv_quantize_call(DType input, MathMode math, Random& random) {
  const int64_t rows = random.range(1, 150);
  const int64_t cols = kKvBlock * random.range(1, 70);
  const auto b = make_small(Matrix::filled({.dtype = input, .rows = rows, .cols = cols},
                                           Fill::kNormalRows, random.bits()),
                            rows * cols / 2, rows * cols / kKvBlock);
  return {.name = fmt::format("kv_quantize {} {}x{} {}", name(input), rows, cols, name(math)),
          .inputs = {&b->input.buffer()},
          .outputs = {&b->first, &b->second},
          .queue = [b, math, rows, cols](const DeviceCopies& device, Stream stream) {
            kv_quantize(device.view(b->input.view()),
                        {device.view(as_matrix(b->first, DType::kU8, rows, cols / 2)),
                         device.view(as_matrix(b->second, DType::kU8, rows, cols / kKvBlock))},
                        {}, math, stream);
          }};
}

// Codes and scales are halves of one matrix of random bytes.
OperationCall kv_dequantize_call(DType output, Random& random) {
  const int64_t rows = random.range(1, 150);
  const int64_t cols = 128 * random.range(1, 9);
  const int64_t code_bytes = rows * cols / 2;
  const auto b = make_small(Matrix::filled({.dtype = DType::kBF16, .rows = rows, .cols = cols},
                                           Fill::kRandomBits, random.bits()),
                            rows * cols * bits(output) / 8, 0);
  return {.name = fmt::format("kv_dequantize {}x{} -> {}", rows, cols, name(output)),
          .inputs = {&b->input.buffer()},
          .outputs = {&b->first},
          .queue = [b, output, rows, cols, code_bytes](const DeviceCopies& device, Stream stream) {
            const TensorView all = device.view(b->input.view());
            auto* const bytes = static_cast<uint8_t*>(all.data);
            const auto part = [&](int64_t at, int64_t width) {
              return TensorView::contiguous(bytes + at, DType::kU8, {rows, width}, all.device);
            };
            kv_dequantize({part(0, cols / 2), part(code_bytes, cols / kKvBlock)},
                          device.view(as_matrix(b->first, output, rows, cols)), {}, stream);
          }};
}

OperationCall shuffle_call(int64_t tile, bool is_inverse, Random& random) {
  const int64_t rows = shuffle_group_rows(tile) * random.range(1, 9);
  const int64_t cols = random.range(1, 500);
  const auto b = make_small(Matrix::filled({.dtype = DType::kBF16, .rows = rows, .cols = cols},
                                           Fill::kRandomBits, random.bits()),
                            rows * cols * 2, 0);
  return {.name = fmt::format("{}shuffle {}x{} tile {}", is_inverse ? "un" : "", rows, cols, tile),
          .inputs = {&b->input.buffer()},
          .outputs = {&b->first},
          .queue = [b, tile, is_inverse, rows, cols](const DeviceCopies& device, Stream stream) {
            const TensorView output = device.view(as_matrix(b->first, DType::kBF16, rows, cols));
            (is_inverse ? unshuffle_rows : shuffle_rows)(device.view(b->input.view()), output, tile,
                                                         stream);
          }};
}

OperationCall pack_bits_call(BitOrder order, Random& random) {
  const int64_t rows = random.range(1, 50);
  const int64_t cols = random.range(1, 3000);
  const int64_t count = rows * cols * 2;
  const auto b = make_small(Matrix::filled({.dtype = DType::kBF16, .rows = rows, .cols = cols},
                                           Fill::kRandomBits, random.bits()),
                            (count + 7) / 8, 0);
  return {.name = fmt::format("pack_bits {}", count),
          .inputs = {&b->input.buffer()},
          .outputs = {&b->first},
          .queue = [b, order, count](const DeviceCopies& device, Stream stream) {
            const TensorView all = device.view(b->input.view());
            pack_bits(
                TensorView::contiguous(all.data, DType::kU8, {count}, all.device),
                device.view(TensorView::contiguous(b->first.data(), DType::kU8, {(count + 7) / 8})),
                order, stream);
          }};
}

OperationCall invert_scales_call(MathMode math, Random& random) {
  const int64_t count = random.range(1, 500);
  const auto b = make_small(Matrix::filled({.dtype = DType::kF32, .rows = 1, .cols = count},
                                           Fill::kRandomBits, random.bits()),
                            count * 4, 0);
  return {.name = fmt::format("invert_scales {} {}", count, name(math)),
          .inputs = {&b->input.buffer()},
          .outputs = {&b->first},
          .queue = [b, math, count](const DeviceCopies& device, Stream stream) {
            const TensorView scales = device.view(b->input.view());
            encode_scales_from_decode(
                TensorView::contiguous(scales.data, DType::kF32, {count}, scales.device),
                device.view(TensorView::contiguous(b->first.data(), DType::kF32, {count})), math,
                stream);
          }};
}

}  // namespace

std::vector<OperationCall> small_operation_calls(Random& random) {
  std::vector<OperationCall> calls;
  for (const DType output : {DType::kF8E4M3, DType::kF8E5M2, DType::kI8}) {
    calls.push_back(group_quantize_call(output, random));
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    calls.push_back(kv_quantize_call(dtype, MathMode::kExact, random));
    calls.push_back(kv_quantize_call(dtype, MathMode::kFast, random));
    calls.push_back(kv_dequantize_call(dtype, random));
  }
  for (const int64_t tile : {64, 128}) {
    calls.push_back(shuffle_call(tile, false, random));
    calls.push_back(shuffle_call(tile, true, random));
  }
  calls.push_back(pack_bits_call(BitOrder::kBig, random));
  calls.push_back(pack_bits_call(BitOrder::kLittle, random));
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    calls.push_back(invert_scales_call(math, random));
  }
  return calls;
}

}  // namespace narrowfloat::testing
