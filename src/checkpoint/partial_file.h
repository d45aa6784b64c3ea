// A file that appears complete or not at all.
//
// Bytes go to PATH.narrowfloat.partial in the same directory; publish() renames it to PATH. After
// any kill or power cut PATH is absent, the old file, or the whole new one, provided sync() came
// before publish(): a rename alone does not order the data before the name.
//
// No other software makes files of that name (downloads are called PATH.partial), so one that
// nobody has locked is what a dead run left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "checkpoint/file_io.h"
#include "checkpoint/locked_file.h"

namespace narrowfloat {

class PartialFile {
 public:
  // Takes over a partial file that a dead run left. Throws kIo if a live one writes it, or if PATH
  // or the partial file is something else than a regular file.
  explicit PartialFile(std::string path);
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  // Removes the partial file unless it was published.
  ~PartialFile();

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const std::string& partial_path() const { return partial_path_; }

  // Makes the file `num_bytes` long, and allocates its blocks where the file system can, so that a
  // full disk is found now and not after hours.
  void reserve(uint64_t num_bytes);
  void write(uint64_t offset, std::span<const std::byte> data);
  // Copies bytes of another file by the system. Returns how many were copied before it could not go
  // on.
  uint64_t copy(const FileDescriptor& from, uint64_t from_offset, uint64_t offset,
                uint64_t num_bytes);
  void sync();
  void publish(Replace replace = Replace::kYes);

 private:
  // Lets the disk write while the caller works on.
  void start_writing(uint64_t num_bytes);

  std::string path_;
  std::string partial_path_;
  LockedFile file_;
  uint64_t unstarted_bytes_ = 0;  // Written to the system's cache since the disk was last told.
};

}  // namespace narrowfloat
