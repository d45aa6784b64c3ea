// The places of tensors in a file that our writer makes, and the header that lists them. A pure
// function of tensors and metadata: equal inputs give equal files.
//
// The buffer starts at a multiple of 4096 (the header is padded with spaces). The format forbids
// holes, so alignment comes from the order: wide dtypes first, large tensors first, then names;
// tensors whose size is not a multiple of 8 bytes go last among those of their width. Every tensor
// of a byte-sized dtype is then aligned to its elements.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "narrowfloat/safetensors.h"

namespace narrowfloat {

inline constexpr uint64_t kBufferAlignment = 4096;

struct FileLayout {
  std::string header;               // From the length field to the start of the buffer.
  std::vector<TensorInfo> tensors;  // In file order, placed.
  uint64_t file_size = 0;
};

// Throws kInvalidArgument for names that are empty, duplicate, reserved, too long, not UTF-8 or
// hold a NUL, for impossible shapes, and for more than the format's 100,000,000 bytes of header.
FileLayout plan_layout(std::vector<TensorSpec> tensors,
                       const std::map<std::string, std::string>& metadata);

// Bytes of the tensor's data. Throws kInvalidArgument for an impossible shape.
uint64_t data_bytes(const TensorSpec& tensor);

// Upper bounds on the bytes that a tensor and the metadata add to a header; the sum of all, rounded
// up to kBufferAlignment, bounds the header.
uint64_t max_entry_bytes(const TensorSpec& tensor);
uint64_t max_metadata_entry_bytes(const std::map<std::string, std::string>& metadata);

}  // namespace narrowfloat
