// The header of a safetensors file: its content, and parsing with every check of the format.
//
//   byte 0       8            8 + N                      end of file
//   | N, u64 LE | JSON, N bytes | buffer: tensors, back to back |
//
// JSON: {"__metadata__": {string: string}, NAME: {"dtype": "BF16", "shape": [..],
// "data_offsets": [begin, end)}, ..}, offsets counted from the buffer. Nothing is allocated from a
// number of the file, and no number is used before it was checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/safetensors.h"

namespace narrowfloat {

inline constexpr uint64_t kLengthFieldBytes = 8;
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // N; the reference's limit.
inline constexpr size_t kMaxNameBytes = size_t{64} << 10;
inline constexpr size_t kMaxTensorRank = 32;
inline constexpr std::string_view kMetadataKey = "__metadata__";

// Bounds on memory; the defaults are far above what real files hold.
struct HeaderLimits {
  size_t max_tensors = 10'000'000;
  size_t max_metadata_entries = 100'000;
  size_t max_metadata_bytes = size_t{16} << 20;  // Keys and values together.
};

// Properties of the file that parse_header needs.
struct HeaderContext {
  std::string file;           // Printable; starts every message.
  uint64_t buffer_begin = 0;  // 8 + N.
  uint64_t buffer_bytes = 0;  // File size minus buffer_begin.
  bool lenient = false;       // As in SafetensorsOptions.
  HeaderLimits limits = {};
};

struct ParsedHeader {
  std::vector<TensorInfo> tensors;  // In file order.
  std::map<std::string, std::string> metadata;
  std::vector<std::string> warnings;
};

// N of a file that begins with `first_bytes`, eight of them unless the file is shorter: checked
// against the limit and against `file_size`. `file`: printable. Throws kCorruptData.
uint64_t header_length(std::string_view first_bytes, uint64_t file_size, std::string_view file);

// Throws kCorruptData naming file, tensor and reason.
ParsedHeader parse_header(std::string_view json, const HeaderContext& context);

// Bytes of a dense tensor, or the reason why it has no size.
struct DenseSize {
  uint64_t size_bytes = 0;
  std::string problem;  // Empty if all is well.
};
DenseSize dense_size(DType dtype, std::span<const int64_t> shape);

}  // namespace narrowfloat
