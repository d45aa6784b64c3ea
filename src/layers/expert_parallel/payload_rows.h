// The rows that a rank sends: checked, and quantized to the payload's format where they are not in
// it already.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "layers/moe/row_buffers.h"
#include "narrowfloat/moe_types.h"

namespace narrowfloat {

class PayloadRows {
 public:
  PayloadRows(RowFormat format, int64_t max_tokens, int64_t hidden, Device device);

  // Memory of rows that are quantized here.
  [[nodiscard]] int64_t bytes() const { return storage_bytes_; }
  // Throws kInvalidArgument for rows that are neither of an unquantized type nor in the format.
  // Returns the number of tokens.
  [[nodiscard]] int64_t check(const CodedRows& rows) const;
  // Dense rows in the format: the given ones, or those of a buffer that the next call overwrites.
  // On a GPU the scales of given rows keep their strides.
  [[nodiscard]] CodedRows quantize(const CodedRows& rows, Stream stream);
  // Views of `count` rows in the format over the three parts.
  [[nodiscard]] CodedRows views(void* values, void* scales, void* row_scale, int64_t count) const;

 private:
  RowFormat format_;
  int64_t hidden_;
  Device device_;
  RowBuffers buffers_;
  int64_t storage_bytes_ = 0;
  std::shared_ptr<std::byte> storage_;
};

}  // namespace narrowfloat
