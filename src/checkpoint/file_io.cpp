// POSIX calls. EINTR and short transfers are retried, everything else becomes kIo.
#include "checkpoint/file_io.h"

#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/partial_file.h"

namespace narrowfloat {
namespace {

// O_NONBLOCK: a FIFO put in place of the file between check and open must not hang us.
constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;

int open_for_reading(const std::string& path) {
  open_how how{};
  how.flags = kReadFlags;
  how.resolve = RESOLVE_NO_MAGICLINKS;
  const long fd = ::syscall(SYS_openat2, AT_FDCWD, path.c_str(), &how, sizeof(how));
  if (fd >= 0) return static_cast<int>(fd);
  // Kernels before 5.6 do not have the call, and some sandboxes answer EPERM to what they do not
  // know.
  if (errno != ENOSYS && errno != EPERM) return -1;
  return ::open(path.c_str(), kReadFlags);
}

void require_regular(const struct stat& status, const std::string& path) {
  if (S_ISREG(status.st_mode)) return;
  throw_error(ErrorKind::kIo, "{}: {}, not a regular file", printable(path),
              S_ISDIR(status.st_mode) ? "is a directory" : "is a device, pipe or socket");
}

// Errors of renameat2() where the kernel or the file system does not know its flags.
bool is_unsupported(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == EPERM;
}

int64_t nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

FileStamp stamp_of(const struct stat& status) {
  return {.device = status.st_dev,
          .inode = status.st_ino,
          .size = static_cast<uint64_t>(status.st_size),
          .modified_ns = nanoseconds(status.st_mtim),
          .changed_ns = nanoseconds(status.st_ctim),
          .names = status.st_nlink};
}

}  // namespace

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

void FileDescriptor::close(const std::string& path) {
  // Linux frees the descriptor whatever close() returns, so it is never retried.
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) throw_errno(path, "close");
}

void throw_errno(const std::string& path, std::string_view action) {
  const int error = errno;
  throw_error(ErrorKind::kIo, "{}: cannot {}: {}", printable(path), action,
              std::generic_category().message(error));
}

OpenedFile open_regular_file(const std::string& path) {
  // Opening a device can have effects already, so the kind is checked before; the descriptor, which
  // cannot change any more, is checked again.
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) throw_errno(path, "open");
  require_regular(status, path);
  FileDescriptor file(open_for_reading(path));
  if (file.get() < 0) throw_errno(path, "open");
  if (::fstat(file.get(), &status) != 0) throw_errno(path, "read the status");
  require_regular(status, path);
  return {std::move(file), static_cast<uint64_t>(status.st_size), stamp_of(status)};
}

std::optional<FileStamp> file_stamp(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return std::nullopt;
  return stamp_of(status);
}

FileStamp file_stamp(const FileDescriptor& file, const std::string& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_errno(path, "read the status");
  return stamp_of(status);
}

void require_unchanged(const FileDescriptor& file, const std::string& path,
                       const FileStamp& expected) {
  const FileStamp now = file_stamp(file, path);
  if (now.has_same_content(expected)) return;
  if (!now.is_same_file(expected)) {
    throw_error(ErrorKind::kIo, "{}: was replaced by another file since it was opened",
                printable(path));
  }
  if (now.size != expected.size) {
    throw_error(ErrorKind::kIo, "{}: changed from {} to {} bytes since it was opened",
                printable(path), expected.size, now.size);
  }
  throw_error(ErrorKind::kIo,
              "{}: was written to or renamed since it was opened; run again when nothing changes "
              "it",
              printable(path));
}

void sync_directory(const std::string& path) {
  FileDescriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0) throw_errno(path, "open");
  if (::fsync(directory.get()) != 0 && errno != EINVAL) throw_errno(path, "sync the directory");
  directory.close(path);
}

void rename_new(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (is_unsupported(errno)) {
    struct stat status {};
    if (::lstat(to.c_str(), &status) == 0) {
      errno = EEXIST;
    } else if (::rename(from.c_str(), to.c_str()) == 0) {
      return;
    }
  }
  if (errno == EEXIST) {
    throw_error(ErrorKind::kIo, "{}: exists; something else made it since it was looked for",
                printable(to));
  }
  throw_errno(to, fmt::format("rename {} to it", printable(from)));
}

bool rename_exchange(const std::string& a, const std::string& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (is_unsupported(errno)) return false;
  throw_errno(b, fmt::format("exchange it with {}", printable(a)));
}

void read_exact(const FileDescriptor& file, const std::string& path, uint64_t offset,
                std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::pread(file.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno(path, "read");
    if (got == 0) {
      throw_error(ErrorKind::kIo, "{}: ends at byte {}; it became shorter while it was read",
                  printable(path), offset);
    }
    offset += static_cast<uint64_t>(got);
    out = out.subspan(static_cast<size_t>(got));
  }
}

void write_exact(const FileDescriptor& file, const std::string& path, uint64_t offset,
                 std::span<const std::byte> data) {
  while (!data.empty()) {
    const ssize_t put = ::pwrite(file.get(), data.data(), data.size(), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_errno(path, "write");
    offset += static_cast<uint64_t>(put);
    data = data.subspan(static_cast<size_t>(put));
  }
}

std::string read_file_bounded(const std::string& path, uint64_t max_bytes) {
  const OpenedFile file = open_regular_file(path);
  if (file.size > max_bytes) {
    throw_error(ErrorKind::kCorruptData, "{}: has {} bytes; the limit is {}", printable(path),
                file.size, max_bytes);
  }
  std::string text(file.size, '\0');
  read_exact(file.fd, path, 0, std::as_writable_bytes(std::span(text)));
  require_unchanged(file.fd, path, file.stamp);
  return text;
}

void write_file_atomically(const std::string& path, std::string_view bytes, Replace replace) {
  PartialFile file(path);
  file.reserve(bytes.size());
  file.write(0, std::as_bytes(std::span(bytes)));
  file.sync();
  file.publish(replace);
}

std::string join_path(const std::string& directory, const std::string& name) {
  return (std::filesystem::path(directory) / name).string();
}

}  // namespace narrowfloat
