// Parsing takes two passes: HeaderParser turns JSON events into tensors and checks each entry
// alone; check_buffer then checks that the tensors tile the buffer.
#include "checkpoint/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/foreign_format.h"
#include "checkpoint/json_guard.h"

namespace narrowfloat {
namespace {

// Product of the extents that are not 0; empty where it does not fit 63 bits. Extents beside a 0
// are bounded, too, so that later products of some of them cannot overflow.
std::optional<int64_t> checked_nonzero_product(std::span<const int64_t> shape) {
  std::optional<int64_t> product = 1;
  for (const int64_t extent : shape) {
    if (extent != 0) product = checked_mul(*product, extent);
    if (!product) break;
  }
  return product;
}

bool is_empty(std::span<const int64_t> shape) {
  return std::find(shape.begin(), shape.end(), 0) != shape.end();
}

class HeaderParser : public JsonVisitor {
 public:
  explicit HeaderParser(const HeaderContext& context) : context_(context) {}

  ParsedHeader take() { return std::move(header_); }

  void begin_object() override {
    if (place_ == Place::kDocument) {
      place_ = Place::kRoot;
    } else if (place_ == Place::kRoot) {
      if (key_ == kMetadataKey) {
        place_ = Place::kMetadata;
      } else {
        begin_entry();
      }
    } else {
      refuse("an object");
    }
  }

  void end_object() override {
    if (place_ == Place::kEntry) finish_entry();
    place_ = place_ == Place::kRoot ? Place::kDocument : Place::kRoot;
  }

  void begin_array() override {
    if (place_ != Place::kEntry || field_ == Field::kDType) refuse("an array");
    place_ = field_ == Field::kShape ? Place::kShape : Place::kOffsets;
  }

  void end_array() override { place_ = Place::kEntry; }

  void key(std::string&& text) override {
    if (place_ == Place::kEntry) {
      begin_field(text);
      return;
    }
    check_name(text);
    key_ = std::move(text);
  }

  void string(std::string&& text) override {
    if (place_ == Place::kMetadata) {
      add_metadata(std::move(text));
    } else if (place_ == Place::kEntry && field_ == Field::kDType) {
      set_dtype(text);
    } else {
      refuse(fmt::format("the string '{}'", printable(text)));
    }
  }

  void integer(int64_t value) override {
    if (place_ == Place::kShape) {
      if (tensor_.shape.size() == kMaxTensorRank) {
        fail_tensor("more than {} dimensions", kMaxTensorRank);
      }
      tensor_.shape.push_back(value);
    } else if (place_ == Place::kOffsets) {
      if (num_offsets_ == 2) fail_tensor("'data_offsets' must hold two numbers, not more");
      offsets_[num_offsets_++] = static_cast<uint64_t>(value);
    } else {
      refuse(std::to_string(value));
    }
  }

  void other_value(std::string_view spelling) override { refuse(printable(spelling)); }

 private:
  enum class Place { kDocument, kRoot, kMetadata, kEntry, kShape, kOffsets };
  enum class Field { kDType, kShape, kOffsets };

  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_error(ErrorKind::kCorruptData, "{}: {}", context_.file,
                fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  [[noreturn]] void fail_tensor(fmt::format_string<Args...> format, Args&&... args) const {
    fail("tensor '{}': {}", printable(tensor_.name),
         fmt::format(format, std::forward<Args>(args)...));
  }

  // Refuses a value of the wrong type, `got`, at the parser's position.
  [[noreturn]] void refuse(std::string_view got) const {
    constexpr std::string_view kPlain = "plain decimal integers from 0 to 2^63 - 1";
    switch (place_) {
      case Place::kDocument:
      case Place::kRoot:
        fail("header entry '{}' must be an object, got {}", printable(key_), got);
      case Place::kMetadata:
        fail("metadata '{}' must be a string, got {}", printable(key_), got);
      case Place::kEntry:
        if (field_ == Field::kDType) fail_tensor("'dtype' must be a string, got {}", got);
        fail_tensor("'{}' must be an array, got {}",
                    field_ == Field::kShape ? "shape" : "data_offsets", got);
      case Place::kShape:
        fail_tensor("'shape' must hold {}, got {}", kPlain, got);
      case Place::kOffsets:
        fail_tensor("'data_offsets' must hold {}, got {}", kPlain, got);
    }
    fail("unexpected {}", got);
  }

  void check_name(const std::string& text) const {
    if (text.size() > kMaxNameBytes) {
      fail("name '{}' has {} bytes; the limit is {}", printable(text, 40), text.size(),
           kMaxNameBytes);
    }
    if (text.find('\0') != text.npos) fail("NUL character in the name '{}'", printable(text));
  }

  void add_metadata(std::string&& value) {
    metadata_bytes_ += key_.size() + value.size();
    if (metadata_bytes_ > context_.limits.max_metadata_bytes) {
      fail("more than {} bytes of metadata", context_.limits.max_metadata_bytes);
    }
    if (header_.metadata.size() == context_.limits.max_metadata_entries) {
      fail("more than {} metadata entries", context_.limits.max_metadata_entries);
    }
    header_.metadata.insert_or_assign(std::move(key_), std::move(value));
  }

  void begin_entry() {
    if (header_.tensors.size() == context_.limits.max_tensors) {
      fail("more than {} tensors", context_.limits.max_tensors);
    }
    tensor_ = TensorInfo{};
    tensor_.name = std::move(key_);
    has_dtype_ = false;
    has_shape_ = false;
    num_offsets_ = 0;
    place_ = Place::kEntry;
  }

  // A repeated field is reported when the object ends; until then the last one counts.
  void begin_field(std::string_view name) {
    if (name == "dtype") {
      field_ = Field::kDType;
    } else if (name == "shape") {
      field_ = Field::kShape;
      has_shape_ = true;
      tensor_.shape.clear();
    } else if (name == "data_offsets") {
      field_ = Field::kOffsets;
      num_offsets_ = 0;
    } else {
      fail_tensor("unknown field '{}'; expected dtype, shape and data_offsets", printable(name));
    }
  }

  void set_dtype(std::string_view text) {
    const std::optional<DType> dtype = parse_dtype(text);
    if (!dtype) fail_tensor("unknown dtype '{}'", printable(text));
    tensor_.dtype = *dtype;
    has_dtype_ = true;
  }

  void finish_entry() {
    if (!has_dtype_) fail_tensor("'dtype' is missing");
    if (!has_shape_) fail_tensor("'shape' is missing");
    if (num_offsets_ != 2) fail_tensor("'data_offsets' must hold two numbers");
    const auto [begin, end] = std::tuple(offsets_[0], offsets_[1]);
    if (begin > end) fail_tensor("data_offsets [{}, {}) end before they begin", begin, end);
    if (end > context_.buffer_bytes) {
      fail_tensor("data_offsets [{}, {}) end after the file's {} data bytes; is it truncated?",
                  begin, end, context_.buffer_bytes);
    }
    const DenseSize expected = dense_size(tensor_.dtype, tensor_.shape);
    if (!expected.problem.empty()) fail_tensor("{}", expected.problem);
    if (expected.size_bytes != end - begin) {
      fail_tensor("shape [{}] of {} needs {} bytes, but data_offsets [{}, {}) hold {}",
                  fmt::join(tensor_.shape, ", "), name(tensor_.dtype), expected.size_bytes, begin,
                  end, end - begin);
    }
    tensor_.offset = context_.buffer_begin + begin;
    tensor_.size_bytes = end - begin;
    header_.tensors.push_back(std::move(tensor_));
  }

  const HeaderContext& context_;
  ParsedHeader header_;
  Place place_ = Place::kDocument;
  std::string key_;
  size_t metadata_bytes_ = 0;
  // The entry being read.
  TensorInfo tensor_;
  Field field_ = Field::kDType;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  size_t num_offsets_ = 0;
  uint64_t offsets_[2] = {0, 0};
};

// The format starts the header with '{' and pads it with spaces only; the JSON grammar alone would
// accept other white space.
void check_frame(std::string_view json, const HeaderContext& context) {
  if (!json.starts_with('{')) {
    throw_error(ErrorKind::kCorruptData, "{}: the header must start with '{{'", context.file);
  }
  if (const size_t last = json.find_last_not_of(' '); json[last] != '}') {
    throw_error(ErrorKind::kCorruptData,
                "{}: the header must end with '}}' and padding spaces, got '{}' at byte {}",
                context.file, printable(json.substr(last, 1)), last);
  }
}

// Bytes that belong to no tensor: refused, or counted for one warning in lenient mode.
class GapReport {
 public:
  GapReport(const HeaderContext& context, ParsedHeader& header)
      : context_(context), header_(header) {}

  void add(uint64_t num_bytes, const std::string& where) {
    if (!context_.lenient) {
      throw_error(ErrorKind::kCorruptData, "{}: {} bytes {} belong to no tensor", context_.file,
                  num_bytes, where);
    }
    if (num_gaps_++ == 0) first_ = where;
    num_bytes_ += num_bytes;
  }

  void finish() {
    if (num_gaps_ == 0) return;
    header_.warnings.push_back(fmt::format("{}: {} bytes in {} place(s) belong to no tensor: {}",
                                           context_.file, num_bytes_, num_gaps_, first_));
  }

 private:
  const HeaderContext& context_;
  ParsedHeader& header_;
  uint64_t num_gaps_ = 0;
  uint64_t num_bytes_ = 0;
  std::string first_;
};

// Sorts the tensors into file order and checks that they cover the buffer without holes or
// overlaps.
void check_buffer(const HeaderContext& context, ParsedHeader& header) {
  std::sort(
      header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
        return std::tie(a.offset, a.size_bytes, a.name) < std::tie(b.offset, b.size_bytes, b.name);
      });
  GapReport gaps(context, header);
  uint64_t covered = context.buffer_begin;
  std::string_view previous;
  for (const TensorInfo& tensor : header.tensors) {
    if (tensor.offset < covered) {
      throw_error(ErrorKind::kCorruptData, "{}: tensors '{}' and '{}' overlap by {} bytes",
                  context.file, printable(previous), printable(tensor.name),
                  covered - tensor.offset);
    }
    if (tensor.offset > covered) {
      gaps.add(tensor.offset - covered, fmt::format("before tensor '{}'", printable(tensor.name)));
    }
    covered = tensor.offset + tensor.size_bytes;
    previous = tensor.name;
  }
  const uint64_t end = context.buffer_begin + context.buffer_bytes;
  if (covered < end) gaps.add(end - covered, "after the last tensor");
  gaps.finish();
}

}  // namespace

DenseSize dense_size(DType dtype, std::span<const int64_t> shape) {
  const auto describe = [&] {
    return fmt::format("shape [{}] of {}", fmt::join(shape, ", "), name(dtype));
  };
  const std::optional<int64_t> elements = checked_nonzero_product(shape);
  const std::optional<int64_t> size_bits =
      elements ? checked_mul(*elements, bits(dtype)) : std::nullopt;
  if (!size_bits) return {0, describe() + " overflows 63 bits"};
  if (is_empty(shape)) return {0, ""};
  if (*size_bits % 8 != 0) return {0, describe() + " does not fill whole bytes"};
  return {static_cast<uint64_t>(*size_bits / 8), ""};
}

int64_t TensorInfo::num_elements() const {
  const std::optional<int64_t> elements = checked_nonzero_product(shape);
  if (!elements) throw_invalid("tensor '{}': the shape overflows 63 bits", printable(name));
  return is_empty(shape) ? 0 : *elements;
}

uint64_t header_length(std::string_view first_bytes, uint64_t file_size, std::string_view file) {
  if (file_size < kLengthFieldBytes) {
    throw_error(ErrorKind::kCorruptData,
                "{}: has {} bytes, less than the length field of a safetensors file; is the "
                "download incomplete?",
                file, file_size);
  }
  NF_ASSERT(first_bytes.size() >= kLengthFieldBytes);
  uint64_t length = 0;
  for (size_t i = kLengthFieldBytes; i-- > 0;) {
    length = length << 8 | static_cast<unsigned char>(first_bytes[i]);
  }
  if (length > kMaxHeaderBytes) {
    const std::string hint = describe_foreign_content(first_bytes.substr(0, kLengthFieldBytes));
    throw_error(ErrorKind::kCorruptData, "{}: header length {} is over the limit of {} bytes{}",
                file, length, kMaxHeaderBytes, hint.empty() ? "; is it a safetensors file?" : hint);
  }
  // The subtraction cannot wrap; 8 + N may.
  if (length > file_size - kLengthFieldBytes) {
    throw_error(ErrorKind::kCorruptData,
                "{}: header length {} does not fit in the file's {} bytes; is it truncated?", file,
                length, file_size);
  }
  return length;
}

ParsedHeader parse_header(std::string_view json, const HeaderContext& context) {
  check_frame(json, context);
  HeaderParser parser(context);
  // The three levels are root, entry, array.
  scan_json_object(json, context.file, JsonLimits{.max_depth = 3}, parser);
  ParsedHeader header = parser.take();
  check_buffer(context, header);
  return header;
}

}  // namespace narrowfloat
