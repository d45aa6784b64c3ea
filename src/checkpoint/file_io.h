// File access with every return code checked: descriptors that close themselves, and reads and
// writes that are complete or throw kIo. Only regular files are opened: a FIFO or device that a
// checkpoint names can neither block the process nor be touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
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

// Identifies a file and a state of its content. A write changes the times, as far as the file
// system's clock can tell.
struct FileStamp {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t size = 0;
  int64_t modified_ns = 0;  // st_mtime
  int64_t changed_ns = 0;   // st_ctime
  uint64_t names = 0;       // st_nlink

  [[nodiscard]] bool is_same_file(const FileStamp& other) const {
    return device == other.device && inode == other.inode;
  }
  // A name that is added or removed sets the change time, too, and leaves the content alone.
  [[nodiscard]] bool has_same_content(const FileStamp& other) const {
    return is_same_file(other) && size == other.size && modified_ns == other.modified_ns &&
           (changed_ns == other.changed_ns || names != other.names);
  }
};

struct OpenedFile {
  FileDescriptor fd;
  uint64_t size = 0;
  FileStamp stamp;  // At the time of opening.
};

// The stamp of what PATH names, links followed; empty if there is nothing.
std::optional<FileStamp> file_stamp(const std::string& path);
FileStamp file_stamp(const FileDescriptor& file, const std::string& path);

// Throws kIo if `file` is no longer what `expected` says: whoever read it may have two contents.
void require_unchanged(const FileDescriptor& file, const std::string& path,
                       const FileStamp& expected);

// Opens for reading. Symbolic links are followed, but not the magic ones of /proc.
OpenedFile open_regular_file(const std::string& path);

// Makes the names of a directory's files last. Does nothing where the file system has no such
// operation and needs none.
void sync_directory(const std::string& path);

// Renames; throws kIo if TO exists.
void rename_new(const std::string& from, const std::string& to);
// Exchanges two names in one step. False where the system has no such operation.
bool rename_exchange(const std::string& a, const std::string& b);

// Reads all of `out`, or throws kIo.
void read_exact(const FileDescriptor& file, const std::string& path, uint64_t offset,
                std::span<std::byte> out);
void write_exact(const FileDescriptor& file, const std::string& path, uint64_t offset,
                 std::span<const std::byte> data);

// Reads the whole file. Throws kCorruptData for more than `max_bytes`, kIo if it was written to
// meanwhile.
std::string read_file_bounded(const std::string& path, uint64_t max_bytes);

// Whether a file that exists is an error.
enum class Replace : int { kNo = 0, kYes = 1 };

// Makes PATH appear complete and on disk, or not at all; see partial_file.h.
void write_file_atomically(const std::string& path, std::string_view bytes,
                           Replace replace = Replace::kYes);

// DIRECTORY/NAME.
std::string join_path(const std::string& directory, const std::string& name);

}  // namespace narrowfloat
