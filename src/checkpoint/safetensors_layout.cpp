// Checks the specs, orders the tensors, hands out offsets, writes the JSON.
#include "checkpoint/safetensors_layout.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <tuple>

#include <fmt/format.h>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/safetensors_header.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kWidestElementBytes = 8;

void check_tensor(const TensorInfo& tensor) {
  const std::string& name = tensor.name;
  if (name.empty()) throw_invalid("a tensor has an empty name");
  if (name == kMetadataKey) throw_invalid("the tensor name '{}' is reserved", name);
  if (name.size() > kMaxNameBytes) {
    throw_invalid("tensor name '{}' has {} bytes; the limit is {}", printable(name, 40),
                  name.size(), kMaxNameBytes);
  }
  if (!is_valid_utf8(name) || name.find('\0') != name.npos) {
    throw_invalid("tensor name '{}' must be UTF-8 without NUL", printable(name));
  }
  if (tensor.shape.size() > kMaxTensorRank) {
    throw_invalid("tensor '{}' has {} dimensions; the limit is {}", printable(name),
                  tensor.shape.size(), kMaxTensorRank);
  }
}

void check_metadata(const std::map<std::string, std::string>& metadata) {
  const HeaderLimits limits;
  size_t num_bytes = 0;
  for (const auto& [key, value] : metadata) {
    if (key.size() > kMaxNameBytes || key.find('\0') != key.npos || !is_valid_utf8(key) ||
        !is_valid_utf8(value)) {
      throw_invalid("metadata '{}' must be UTF-8 with a short key without NUL", printable(key));
    }
    num_bytes += key.size() + value.size();
  }
  if (metadata.size() > limits.max_metadata_entries || num_bytes > limits.max_metadata_bytes) {
    throw_invalid("{} metadata entries of {} bytes are too many", metadata.size(), num_bytes);
  }
}

void sort_for_alignment(std::vector<TensorInfo>& tensors) {
  const auto rank = [](const TensorInfo& tensor) {
    const bool breaks_alignment = tensor.size_bytes % kWidestElementBytes != 0;
    return std::tuple(-bits(tensor.dtype), breaks_alignment, ~tensor.size_bytes);
  };
  std::sort(tensors.begin(), tensors.end(), [&](const TensorInfo& a, const TensorInfo& b) {
    const auto rank_a = rank(a);
    const auto rank_b = rank(b);
    return rank_a != rank_b ? rank_a < rank_b : a.name < b.name;
  });
}

void check_duplicates(const std::vector<TensorInfo>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end()) throw_invalid("two tensors are named '{}'", printable(*twin));
}

// Writes the JSON object; offsets of `tensors` still count from the buffer.
std::string header_json(const std::vector<TensorInfo>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string json = "{";
  const auto out = std::back_inserter(json);
  if (!metadata.empty()) {
    fmt::format_to(out, "\"{}\":{{", kMetadataKey);
    for (const auto& [key, value] : metadata) {
      fmt::format_to(out, "{}:{},", json_quote(key), json_quote(value));
    }
    json.back() = '}';
    json += ',';
  }
  for (const TensorInfo& tensor : tensors) {
    fmt::format_to(out, R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}},)",
                   json_quote(tensor.name), name(tensor.dtype), fmt::join(tensor.shape, ","),
                   tensor.offset, tensor.offset + tensor.size_bytes);
  }
  if (json.back() == ',') json.pop_back();
  return json + '}';
}

std::string with_length_and_padding(const std::string& json) {
  const auto unpadded = static_cast<int64_t>(kLengthFieldBytes + json.size());
  const auto padded =
      static_cast<uint64_t>(round_up(unpadded, static_cast<int64_t>(kBufferAlignment)));
  const uint64_t length = padded - kLengthFieldBytes;
  if (length > kMaxHeaderBytes) {
    throw_invalid("the header would have {} bytes; the limit of the format is {}: use more shards",
                  length, kMaxHeaderBytes);
  }
  std::string header;
  header.reserve(padded);
  for (uint64_t i = 0; i < kLengthFieldBytes; ++i) {
    header += static_cast<char>(length >> (8 * i) & 0xFFU);
  }
  header += json;
  header.resize(padded, ' ');
  return header;
}

}  // namespace

FileLayout plan_layout(std::vector<TensorSpec> tensors,
                       const std::map<std::string, std::string>& metadata) {
  check_metadata(metadata);
  FileLayout layout;
  layout.tensors.reserve(tensors.size());
  for (TensorSpec& spec : tensors) {
    const uint64_t size_bytes = data_bytes(spec);
    layout.tensors.push_back(
        {std::move(spec.name), spec.dtype, std::move(spec.shape), 0, size_bytes});
    check_tensor(layout.tensors.back());
  }
  check_duplicates(layout.tensors);
  sort_for_alignment(layout.tensors);

  int64_t end = 0;
  for (TensorInfo& tensor : layout.tensors) {
    tensor.offset = static_cast<uint64_t>(end);
    const auto sum = checked_add(end, static_cast<int64_t>(tensor.size_bytes));
    if (!sum) throw_invalid("tensor '{}': the file overflows 63 bits", printable(tensor.name));
    end = *sum;
  }
  layout.header = with_length_and_padding(header_json(layout.tensors, metadata));
  for (TensorInfo& tensor : layout.tensors) tensor.offset += layout.header.size();
  layout.file_size = static_cast<uint64_t>(end) + layout.header.size();
  return layout;
}

uint64_t data_bytes(const TensorSpec& tensor) {
  for (const int64_t extent : tensor.shape) {
    if (extent < 0) {
      throw_invalid("tensor '{}': negative extent {}", printable(tensor.name), extent);
    }
  }
  const DenseSize size = dense_size(tensor.dtype, tensor.shape);
  if (!size.problem.empty()) throw_invalid("tensor '{}': {}", printable(tensor.name), size.problem);
  return size.size_bytes;
}

uint64_t max_entry_bytes(const TensorSpec& tensor) {
  // 19 digits and a comma for each extent; 100 bytes hold the field names, a dtype, two offsets
  // and the punctuation.
  return json_quote(tensor.name).size() + 20 * tensor.shape.size() + 100;
}

uint64_t max_metadata_entry_bytes(const std::map<std::string, std::string>& metadata) {
  uint64_t num_bytes = 32;  // The key, the brackets.
  for (const auto& [key, value] : metadata) {
    num_bytes += json_quote(key).size() + json_quote(value).size() + 2;
  }
  return num_bytes;
}

}  // namespace narrowfloat
