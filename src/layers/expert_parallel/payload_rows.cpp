// See payload_rows.h.
#include "layers/expert_parallel/payload_rows.h"

#include <cstring>
#include <vector>

#include "base/throw_error.h"
#include "moe_shared/quantize_activations.h"
#include "tensor/row_checks.h"
#include "tensor/row_format.h"
#include "tensor/view_checks.h"
#if defined(NARROWFLOAT_CUDA)
#include "runtime/cuda/device_memory.h"
#endif

namespace narrowfloat {
namespace {

bool is_unquantized(const CodedRows& rows) {
  const DType dtype = rows.values.dtype;
  return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32;
}

// Aligned to kWorkspaceAlignment.
std::shared_ptr<std::byte> allocate(Device device, int64_t size_bytes) {
#if defined(NARROWFLOAT_CUDA)
  if (device.type == DeviceType::kCuda) {
    const std::shared_ptr<uint8_t> memory = allocate_device_memory(device, size_bytes);
    return {memory, reinterpret_cast<std::byte*>(memory.get())};
  }
#endif
  static_cast<void>(device);
  auto memory = std::make_shared<std::vector<std::byte>>(
      static_cast<size_t>(size_bytes + kWorkspaceAlignment));
  const auto address = reinterpret_cast<uintptr_t>(memory->data());
  return {memory, memory->data() +
                      (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment};
}

// Copies scales of any strides side by side.
void copy_scales(const TensorView& from, const TensorView& to) {
  const auto size = static_cast<size_t>(bits(from.dtype) / 8);
  auto* target = static_cast<std::byte*>(to.data);
  for (int64_t row = 0; row < from.shape[0]; ++row) {
    for (int64_t block = 0; block < from.shape[1]; ++block, target += size) {
      const int64_t element = row * from.strides[0] + block * from.strides[1];
      std::memcpy(target, static_cast<const std::byte*>(from.data) + element * int64_t(size), size);
    }
  }
}

}  // namespace

PayloadRows::PayloadRows(RowFormat format, int64_t max_tokens, int64_t hidden, Device device)
    : format_(format),
      hidden_(hidden),
      device_(device),
      buffers_(row_buffers(format, max_tokens, hidden)) {
  if (format == RowFormat::kBf16) return;  // Rows travel as they are given.
  storage_bytes_ = buffers_.bytes();
  storage_ = allocate(device, storage_bytes_);
}

int64_t PayloadRows::check(const CodedRows& rows) const {
  require_view("rows.values", rows.values);
  if (rows.values.rank != 2) {
    throw_invalid("rows.values: expected [tokens, {}], got {}", hidden_, to_string(rows.values));
  }
  const int64_t tokens = rows.values.shape[0];
  if (format_ != RowFormat::kBf16 && is_unquantized(rows)) {
    require_tensor("rows.values", rows.values, {DType::kBF16, DType::kF16, DType::kF32},
                   {tokens, hidden_}, device_);
    if (!rows.scales.is_absent() || !rows.row_scale.is_absent()) {
      throw_invalid("rows.scales: {} rows have none; leave them out", name(rows.values.dtype));
    }
    return tokens;
  }
  require_quantized_rows({"rows.values", "rows.scales", "rows.row_scale"}, rows,
                         {.format = format_, .rows = tokens, .cols = hidden_, .device = device_});
  return tokens;
}

CodedRows PayloadRows::quantize(const CodedRows& rows, Stream stream) {
  if (format_ == RowFormat::kBf16) return rows;
  const int64_t tokens = rows.values.shape[0];
  CodedRows coded = buffers_.bind(storage_.get(), tokens, device_);
  if (is_unquantized(rows)) {
    if (tokens > 0) {
      QuantizeActivationsArgs args;
      args.rows = rows.values;
      args.format = format_;
      args.output = coded;
      quantize_activations(args, stream);
    }
    return coded;
  }
  if (device_.type != DeviceType::kCpu) return rows;
  copy_scales(rows.scales, coded.scales);
  return {.values = rows.values, .scales = coded.scales, .row_scale = rows.row_scale};
}

CodedRows PayloadRows::views(void* values, void* scales, void* row_scale, int64_t count) const {
  CodedRows rows;
  rows.values = TensorView::contiguous(values, value_dtype(format_),
                                       {count, value_cols(format_, hidden_)}, device_);
  if (const int64_t blocks = scale_blocks(format_, hidden_); blocks > 0) {
    rows.scales = TensorView::contiguous(scales, scale_dtype(format_), {count, blocks}, device_);
  }
  if (format_ == RowFormat::kNvfp4PerToken) {
    rows.row_scale = TensorView::contiguous(row_scale, DType::kF32, {count}, device_);
  }
  return rows;
}

}  // namespace narrowfloat
