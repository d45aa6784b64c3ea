// A file that one process at a time owns: whoever holds the lock of the file that the path names.
#pragma once

#include <string>
#include <string_view>

#include "checkpoint/file_io.h"

namespace narrowfloat {

class LockedFile {
 public:
  LockedFile() = default;
  // Opens the file, or makes it, and locks it. The file of a dead process is taken over as it is.
  // Throws kIo "PATH: BUSY" if a live one has it, and if PATH is anything else than a regular file
  // of one name.
  LockedFile(std::string path, std::string_view busy);
  LockedFile(LockedFile&&) noexcept = default;
  LockedFile& operator=(LockedFile&&) noexcept = default;

  [[nodiscard]] const FileDescriptor& fd() const { return fd_; }
  // Whether the file was made, not taken over.
  [[nodiscard]] bool is_new() const { return is_new_; }
  [[nodiscard]] uint64_t initial_size() const { return stamp_.size; }
  // Whether the path still names this file.
  [[nodiscard]] bool is_named() const noexcept;
  // Removes the name if it still is this file's. The lock stays until the file is closed.
  void unlink() noexcept;
  void close();

 private:
  // False if the name was lost between opening and locking.
  bool try_acquire(std::string_view busy);

  std::string path_;
  FileDescriptor fd_;
  FileStamp stamp_;
  bool is_new_ = false;
};

}  // namespace narrowfloat
