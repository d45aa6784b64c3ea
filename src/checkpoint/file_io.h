// File access with every return code checked: descriptors that close themselves, and reads and
// writes that are complete or throw kIo. Only regular files are opened: a FIFO or device that a
// checkpoint names can neither block the process nor be touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace narrowfloat {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  // Ignores errors of this close; close() reports them.
  ~FileDescriptor();

  [[nodiscard]] int get() const { return fd_; }
  void close(const std::string& path);

 private:
  int fd_ = -1;
};

// kIo "PATH: cannot ACTION: the system's message", from errno.
[[noreturn]] void throw_errno(const std::string& path, std::string_view action);

struct OpenedFile {
  FileDescriptor fd;
  uint64_t size = 0;
};

// Opens for reading. Symbolic links are followed, but not the magic ones of /proc.
OpenedFile open_regular_file(const std::string& path);

// The current size; open files may change.
uint64_t file_size(const FileDescriptor& file, const std::string& path);

// Reads all of `out`, or throws kIo.
void read_exact(const FileDescriptor& file, const std::string& path, uint64_t offset,
                std::span<std::byte> out);
void write_exact(const FileDescriptor& file, const std::string& path, uint64_t offset,
                 std::span<const std::byte> data);

// Reads the whole file. Throws kCorruptData for more than `max_bytes`.
std::string read_file_bounded(const std::string& path, uint64_t max_bytes);

// Makes PATH appear (or replaces it) complete and on disk, or not at all; see partial_file.h.
void write_file_atomically(const std::string& path, std::string_view bytes);

// DIRECTORY/NAME.
std::string join_path(const std::string& directory, const std::string& name);

}  // namespace narrowfloat
