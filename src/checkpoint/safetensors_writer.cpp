// Writes the tensors into a PartialFile at their planned places, and the header last, so that even
// a partial file under its final name would not load.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/throw_error.h"
#include "checkpoint/coverage.h"
#include "checkpoint/escape.h"
#include "checkpoint/partial_file.h"
#include "checkpoint/safetensors_layout.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat {

struct SafetensorsWriter::State {
  State(std::string path, FileLayout planned, std::map<std::string, std::string> entries,
        Replace replaces)
      : layout(std::move(planned)),
        metadata(std::move(entries)),
        replace(replaces),
        file(std::move(path)) {
    file.reserve(layout.file_size);
    for (const TensorInfo& tensor : layout.tensors) by_name.emplace(tensor.name, &tensor);
  }

  const FileLayout layout;
  const std::map<std::string, std::string> metadata;
  const Replace replace;
  PartialFile file;
  std::unordered_map<std::string_view, const TensorInfo*> by_name;
  Coverage written;
  bool finished = false;
  bool committed = false;

  void check_complete() const;
  void check_read_back() const;
};

void SafetensorsWriter::State::check_complete() const {
  const uint64_t gap = written.first_gap(layout.header.size());
  if (gap == layout.file_size) return;
  const auto missing = std::find_if(
      layout.tensors.begin(), layout.tensors.end(),
      [&](const TensorInfo& tensor) { return gap < tensor.offset + tensor.size_bytes; });
  throw_invalid("{}: tensor '{}' was not written from byte {} of {} on", printable(file.path()),
                printable(missing->name), gap - missing->offset, missing->size_bytes);
}

// Our own reader must find the planned header: the last guard against a bug here or a file system
// that lost the header.
void SafetensorsWriter::State::check_read_back() const {
  const SafetensorsReader reader(file.partial_path());
  const auto is_same = [](const TensorInfo& a, const TensorInfo& b) {
    return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.offset == b.offset &&
           a.size_bytes == b.size_bytes;
  };
  const auto tensors = reader.tensors();
  const bool same_tensors = tensors.size() == layout.tensors.size() &&
                            std::all_of(tensors.begin(), tensors.end(), [&](const TensorInfo& t) {
                              const auto planned = by_name.find(t.name);
                              return planned != by_name.end() && is_same(t, *planned->second);
                            });
  if (!same_tensors || reader.metadata() != metadata) {
    throw_error(ErrorKind::kIo, "{}: the header read back differs from the one written",
                printable(file.partial_path()));
  }
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<TensorSpec> tensors,
                                     std::map<std::string, std::string> metadata,
                                     const SafetensorsWriterOptions& options) {
  FileLayout layout = plan_layout(std::move(tensors), metadata);
  state_ = std::make_unique<State>(std::move(path), std::move(layout), std::move(metadata),
                                   options.replace ? Replace::kYes : Replace::kNo);
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&& other) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

uint64_t SafetensorsWriter::file_size() const { return state_->layout.file_size; }

const TensorInfo& SafetensorsWriter::find(std::string_view name, uint64_t begin,
                                          uint64_t count) const {
  const State& state = *state_;
  const std::string path = printable(state.file.path());
  if (state.finished) throw_invalid("{}: was committed already", path);
  const auto found = state.by_name.find(name);
  if (found == state.by_name.end()) {
    throw_invalid("{}: no tensor '{}' was announced", path, printable(name));
  }
  const TensorInfo& tensor = *found->second;
  if (begin > tensor.size_bytes || count > tensor.size_bytes - begin) {
    throw_invalid("{}: tensor '{}' has {} bytes; {} bytes from byte {} are outside", path,
                  printable(name), tensor.size_bytes, count, begin);
  }
  return tensor;
}

void SafetensorsWriter::write(std::string_view name, uint64_t begin,
                              std::span<const std::byte> data) {
  State& state = *state_;
  const TensorInfo& tensor = find(name, begin, data.size());
  state.file.write(tensor.offset + begin, data);
  state.written.add(tensor.offset + begin, tensor.offset + begin + data.size());
}

uint64_t SafetensorsWriter::copy(std::string_view name, const SafetensorsReader& from,
                                 const TensorInfo& tensor) {
  State& state = *state_;
  const TensorInfo& target = find(name, 0, tensor.size_bytes);
  const uint64_t copied = from.copy_to(tensor, state.file, target.offset);
  state.written.add(target.offset, target.offset + copied);
  return copied;
}

void SafetensorsWriter::finish() {
  State& state = *state_;
  if (state.finished) return;
  state.check_complete();
  state.file.write(0, std::as_bytes(std::span(state.layout.header)));
  state.file.sync();
  state.check_read_back();
  state.finished = true;
}

void SafetensorsWriter::commit() {
  State& state = *state_;
  if (state.committed) throw_invalid("{}: was committed already", printable(state.file.path()));
  finish();
  state.file.publish(state.replace);
  state.committed = true;
}

}  // namespace narrowfloat
