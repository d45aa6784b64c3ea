// The writer holds a lock on its partial file, which tells a live run from a dead one.
#include "checkpoint/partial_file.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <utility>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

// Bytes after which the disk is told to write them.
constexpr uint64_t kStartBytes = uint64_t{32} << 20;

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// Needs the blocks of `num_bytes` and one in a hundred more: file systems need some for themselves.
void check_free_space(const FileDescriptor& file, const std::string& path, uint64_t num_bytes) {
  struct statvfs status {};
  if (::fstatvfs(file.get(), &status) != 0) throw_errno(path, "read the free space");
  if (status.f_blocks == 0) return;  // Some network and overlay systems report no size.
  const uint64_t free_blocks = status.f_bavail;
  const uint64_t needed_bytes = num_bytes + num_bytes / 100;
  if (needed_bytes / status.f_frsize < free_blocks) return;
  throw_error(ErrorKind::kIo, "{}: needs {} bytes, but only {} are free on the disk",
              printable(path), needed_bytes, free_blocks * status.f_frsize);
}

}  // namespace

PartialFile::PartialFile(std::string path)
    : path_(std::move(path)), partial_path_(path_ + ".narrowfloat.partial") {
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw_error(ErrorKind::kIo, "{}: exists and is not a regular file", printable(path_));
  }
  file_ = LockedFile(partial_path_, "another process is writing it");
  if (file_.initial_size() > 0 && ::ftruncate(file_.fd().get(), 0) != 0) {
    throw_errno(partial_path_, "empty");
  }
}

PartialFile::~PartialFile() { file_.unlink(); }

void PartialFile::reserve(uint64_t num_bytes) {
  if (num_bytes > static_cast<uint64_t>(std::numeric_limits<off_t>::max())) {
    throw_error(ErrorKind::kIo, "{}: {} bytes are more than a file can hold", printable(path_),
                num_bytes);
  }
  check_free_space(file_.fd(), path_, num_bytes);
  if (num_bytes == 0) return;
  const auto size = static_cast<off_t>(num_bytes);
  // Not posix_fallocate: where the file system cannot, it writes to every block instead.
  int result = -1;
  do {
    result = ::fallocate(file_.fd().get(), 0, 0, size);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EOPNOTSUPP && errno != EINVAL && errno != ENOSYS) {
    throw_errno(partial_path_, "reserve space");
  }
  if (::ftruncate(file_.fd().get(), size) != 0) throw_errno(partial_path_, "set the size");
}

void PartialFile::write(uint64_t offset, std::span<const std::byte> data) {
  write_exact(file_.fd(), partial_path_, offset, data);
  start_writing(data.size());
}

uint64_t PartialFile::copy(const FileDescriptor& from, uint64_t from_offset, uint64_t offset,
                           uint64_t num_bytes) {
  uint64_t copied = 0;
  while (copied < num_bytes) {
    auto from_at = static_cast<off64_t>(from_offset + copied);
    auto to_at = static_cast<off64_t>(offset + copied);
    const ssize_t got = ::copy_file_range(from.get(), &from_at, file_.fd().get(), &to_at,
                                          std::min(num_bytes - copied, kStartBytes), 0);
    if (got < 0 && errno == EINTR) continue;
    // Reads and writes go on: where they fail, too, they say which of the files it is.
    if (got <= 0) break;
    copied += static_cast<uint64_t>(got);
    start_writing(static_cast<uint64_t>(got));
  }
  return copied;
}

void PartialFile::start_writing(uint64_t num_bytes) {
  unstarted_bytes_ += num_bytes;
  if (unstarted_bytes_ < kStartBytes) return;
  unstarted_bytes_ = 0;
  // A failure shows in sync().
  (void)::sync_file_range(file_.fd().get(), 0, 0, SYNC_FILE_RANGE_WRITE);
}

void PartialFile::sync() {
  if (::fsync(file_.fd().get()) != 0) throw_errno(partial_path_, "sync");
}

void PartialFile::publish(Replace replace) {
  if (!file_.is_named()) {
    throw_error(ErrorKind::kIo, "{}: was replaced by another process", printable(partial_path_));
  }
  if (replace == Replace::kNo) {
    rename_new(partial_path_, path_);
  } else if (::rename(partial_path_.c_str(), path_.c_str()) != 0) {
    throw_errno(path_, "rename to");
  }
  sync_directory(parent_of(path_));
  file_.close();
}

}  // namespace narrowfloat
