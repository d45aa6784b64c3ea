// safetensors files: a strict reader and an atomic writer. Tensor data is never interpreted here:
// every dtype of the format passes through byte for byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/export.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// `text` (untrusted: a name or a path) with control characters, text-direction overrides,
// backslashes and bytes that are not UTF-8 written as \n, \x1b or \u{202e}. Cut after about
// `max_bytes` with "...".
NARROWFLOAT_API std::string printable(std::string_view text, size_t max_bytes = 200);

struct TensorInfo {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
  uint64_t offset = 0;  // First byte, from the start of the file.
  uint64_t size_bytes = 0;

  [[nodiscard]] NARROWFLOAT_API int64_t num_elements() const;
};

struct SafetensorsOptions {
  // Accept holes and trailing bytes (each becomes a warning). Never overlaps or overflows.
  bool lenient = false;
  // False: the file is opened again for each read, which must find the same file. For checkpoints
  // of more shards than a process may have open.
  bool keep_open = true;
};

class PartialFile;

// A validated file, open for reading. Nothing is allocated from a number in the file before it was
// checked. Throws kIo where the system refuses, kCorruptData (naming file, tensor and reason) where
// the file breaks a rule. Copies share the open file; read() may be called from several threads.
class NARROWFLOAT_API SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path, const SafetensorsOptions& options = {});

  [[nodiscard]] const std::string& path() const;
  [[nodiscard]] uint64_t file_size() const;
  [[nodiscard]] uint64_t header_size() const;  // Bytes before the data, the length field included.
  // In file order.
  [[nodiscard]] std::span<const TensorInfo> tensors() const;
  // nullptr if there is none.
  [[nodiscard]] const TensorInfo* find(std::string_view name) const;
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const;
  [[nodiscard]] const std::vector<std::string>& warnings() const;

  // Copies bytes [begin, begin + out.size()) of the tensor. Throws kInvalidArgument outside it, kIo
  // where the file was written to, replaced or became shorter since it was opened.
  void read(const TensorInfo& tensor, uint64_t begin, std::span<std::byte> out) const;
  // Tells the system that bytes [offset, offset + num_bytes) of the file will be read soon.
  void will_read(uint64_t offset, uint64_t num_bytes) const;

 private:
  friend class SafetensorsWriter;
  struct State;
  struct OpenState;
  // Checks the range, and opens the file if need be.
  [[nodiscard]] OpenState open(const TensorInfo& tensor, uint64_t begin, uint64_t count) const;
  // Lets the system copy the tensor to `offset` in `target`. Returns the bytes that it copied.
  uint64_t copy_to(const TensorInfo& tensor, PartialFile& target, uint64_t offset) const;
  std::shared_ptr<const State> state_;
};

struct TensorSpec {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
};

struct SafetensorsWriterOptions {
  bool replace = true;  // Whether commit() replaces a file at PATH; otherwise it throws.
};

// Writes one file tensor by tensor, in any order and in ranges. The bytes go to
// PATH.narrowfloat.partial; only commit() makes PATH appear, complete and on disk. Without commit()
// the destructor removes the partial file. The result depends on tensors and metadata alone.
class NARROWFLOAT_API SafetensorsWriter {
 public:
  // Throws kInvalidArgument for duplicate or empty names, bad shapes and reserved names, kIo where
  // the file cannot be made or the disk is too small.
  SafetensorsWriter(std::string path, std::vector<TensorSpec> tensors,
                    std::map<std::string, std::string> metadata,
                    const SafetensorsWriterOptions& options = {});
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&& other) noexcept;
  ~SafetensorsWriter();

  [[nodiscard]] uint64_t file_size() const;
  // Bytes [begin, begin + data.size()) of tensor `name`.
  void write(std::string_view name, uint64_t begin, std::span<const std::byte> data);
  // Copies the first bytes of tensor `name` from one of the same size in another file, without a
  // detour through memory. Returns their number: 0, or less than all, where the system cannot copy
  // between these files. Throws as read() and write().
  uint64_t copy(std::string_view name, const SafetensorsReader& from, const TensorInfo& tensor);
  // Everything that takes time: checks that every byte was written, syncs, validates the header by
  // reading it back. Nothing can be written afterwards.
  void finish();
  // Calls finish() if that was not done, and renames.
  void commit();

 private:
  struct State;
  // Throws unless [begin, begin + count) may be written.
  const TensorInfo& find(std::string_view name, uint64_t begin, uint64_t count) const;
  std::unique_ptr<State> state_;
};

}  // namespace narrowfloat
