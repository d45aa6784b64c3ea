// Opens a safetensors file: length field, header, validation; then serves byte ranges with pread,
// so that a file truncated by someone else is an error and not a SIGBUS.
#include <algorithm>
#include <fcntl.h>
#include <numeric>
#include <string>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "checkpoint/foreign_format.h"
#include "checkpoint/partial_file.h"
#include "checkpoint/safetensors_header.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat {
namespace {

uint64_t read_header_length(const OpenedFile& file, const std::string& path) {
  std::string first_bytes(std::min(file.size, kLengthFieldBytes), '\0');
  read_exact(file.fd, path, 0, std::as_writable_bytes(std::span(first_bytes)));
  return header_length(first_bytes, file.size, printable(path));
}

std::vector<uint32_t> sort_by_name(const std::vector<TensorInfo>& tensors) {
  std::vector<uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return tensors[a].name < tensors[b].name; });
  return order;
}

}  // namespace

struct SafetensorsReader::State {
  std::string path;
  OpenedFile file;  // Its descriptor is closed unless SafetensorsOptions::keep_open.
  uint64_t header_size = 0;
  ParsedHeader header;
  std::vector<uint32_t> by_name;  // Indices into header.tensors.
};

SafetensorsReader::SafetensorsReader(const std::string& path, const SafetensorsOptions& options) {
  auto state = std::make_shared<State>();
  state->path = path;
  state->file = open_regular_file(path);
  refuse_foreign_name(path);
  const uint64_t length = read_header_length(state->file, path);
  std::string json(length, '\0');
  read_exact(state->file.fd, path, kLengthFieldBytes, std::as_writable_bytes(std::span(json)));

  state->header_size = kLengthFieldBytes + length;
  state->header = parse_header(json, {.file = printable(path),
                                      .buffer_begin = state->header_size,
                                      .buffer_bytes = state->file.size - state->header_size,
                                      .lenient = options.lenient});
  require_unchanged(state->file.fd, path, state->file.stamp);
  state->by_name = sort_by_name(state->header.tensors);
  if (!options.keep_open) state->file.fd = FileDescriptor();
  state_ = std::move(state);
}

const std::string& SafetensorsReader::path() const { return state_->path; }
uint64_t SafetensorsReader::file_size() const { return state_->file.size; }
uint64_t SafetensorsReader::header_size() const { return state_->header_size; }
std::span<const TensorInfo> SafetensorsReader::tensors() const { return state_->header.tensors; }
const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return state_->header.metadata;
}
const std::vector<std::string>& SafetensorsReader::warnings() const {
  return state_->header.warnings;
}

const TensorInfo* SafetensorsReader::find(std::string_view name) const {
  const std::vector<TensorInfo>& tensors = state_->header.tensors;
  const auto found = std::lower_bound(
      state_->by_name.begin(), state_->by_name.end(), name,
      [&](uint32_t index, std::string_view wanted) { return tensors[index].name < wanted; });
  if (found == state_->by_name.end() || tensors[*found].name != name) return nullptr;
  return &tensors[*found];
}

// The file, opened again where it is not kept open.
struct SafetensorsReader::OpenState {
  OpenedFile reopened;

  [[nodiscard]] const FileDescriptor& file(const State& state) const {
    return reopened.fd.get() >= 0 ? reopened.fd : state.file.fd;
  }
};

SafetensorsReader::OpenState SafetensorsReader::open(const TensorInfo& tensor, uint64_t begin,
                                                     uint64_t count) const {
  const State& state = *state_;
  // `tensor` may come from another reader, so it is checked against this file too.
  const bool is_inside = tensor.offset >= state.header_size && tensor.offset <= state.file.size &&
                         tensor.size_bytes <= state.file.size - tensor.offset;
  if (!is_inside) {
    throw_invalid("{}: tensor '{}' is not one of this file", printable(state.path),
                  printable(tensor.name));
  }
  if (begin > tensor.size_bytes || count > tensor.size_bytes - begin) {
    throw_invalid("{}: tensor '{}' has {} bytes; {} bytes from byte {} are outside",
                  printable(state.path), printable(tensor.name), tensor.size_bytes, count, begin);
  }
  OpenState opened;
  if (state.file.fd.get() < 0) opened.reopened = open_regular_file(state.path);
  return opened;
}

void SafetensorsReader::read(const TensorInfo& tensor, uint64_t begin,
                             std::span<std::byte> out) const {
  const State& state = *state_;
  const OpenState opened = open(tensor, begin, out.size());
  const FileDescriptor& file = opened.file(state);
  // Before reading, for a message that says more than that bytes are missing; after it, because
  // what was read may be of two contents.
  require_unchanged(file, state.path, state.file.stamp);
  read_exact(file, state.path, tensor.offset + begin, out);
  require_unchanged(file, state.path, state.file.stamp);
}

void SafetensorsReader::will_read(uint64_t offset, uint64_t num_bytes) const {
  if (state_->file.fd.get() < 0) return;
  // A hint: what it returns makes no difference.
  (void)::posix_fadvise(state_->file.fd.get(), static_cast<off_t>(offset),
                        static_cast<off_t>(num_bytes), POSIX_FADV_WILLNEED);
}

uint64_t SafetensorsReader::copy_to(const TensorInfo& tensor, PartialFile& target,
                                    uint64_t offset) const {
  const State& state = *state_;
  const OpenState opened = open(tensor, 0, tensor.size_bytes);
  const FileDescriptor& file = opened.file(state);
  require_unchanged(file, state.path, state.file.stamp);
  const uint64_t copied = target.copy(file, tensor.offset, offset, tensor.size_bytes);
  require_unchanged(file, state.path, state.file.stamp);
  return copied;
}

}  // namespace narrowfloat
