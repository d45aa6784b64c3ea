// The writer holds a lock on its partial file, which distinguishes a live run from a dead one.
#include "checkpoint/partial_file.h"

#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <utility>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// False if another process holds the lock. File systems without locks count as unlocked.
bool try_lock(const FileDescriptor& file) {
  return ::flock(file.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
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

void sync_directory(const std::string& directory) {
  FileDescriptor handle(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (handle.get() < 0) throw_errno(directory, "open");
  // EINVAL: the file system has no such operation and needs none.
  if (::fsync(handle.get()) != 0 && errno != EINVAL) throw_errno(directory, "sync");
  handle.close(directory);
}

}  // namespace

PartialFile::PartialFile(std::string path)
    : path_(std::move(path)), partial_path_(path_ + ".narrowfloat.partial") {
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw_error(ErrorKind::kIo, "{}: exists and is not a regular file", printable(path_));
  }
  acquire();
}

// Whoever holds the lock of the file that the partial path names owns it. The name is looked at
// again after locking: the owner may have renamed or removed the file since it was opened, and
// somebody else may have made another one.
void PartialFile::acquire() {
  struct stat status {};
  do {
    file_ = FileDescriptor(::open(partial_path_.c_str(),
                                  O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
    if (file_.get() < 0 && errno != ELOOP && errno != EISDIR && errno != ENXIO) {
      throw_errno(partial_path_, "create");
    }
    const bool is_regular = file_.get() >= 0 && ::fstat(file_.get(), &status) == 0 &&
                            S_ISREG(status.st_mode) && status.st_nlink <= 1;
    if (!is_regular) {
      file_ = FileDescriptor();
      throw_error(ErrorKind::kIo, "{}: is in the way: not a regular file of one name; remove it",
                  printable(partial_path_));
    }
    if (!try_lock(file_)) {
      file_ = FileDescriptor();
      throw_error(ErrorKind::kIo, "{}: another process is writing it", printable(path_));
    }
    device_ = status.st_dev;
    inode_ = status.st_ino;
  } while (!is_ours());
  if (status.st_size > 0 && ::ftruncate(file_.get(), 0) != 0) {
    throw_errno(partial_path_, "empty");
  }
}

PartialFile::~PartialFile() {
  if (!published_ && is_ours()) ::unlink(partial_path_.c_str());
}

void PartialFile::reserve(uint64_t num_bytes) {
  if (num_bytes > static_cast<uint64_t>(std::numeric_limits<off_t>::max())) {
    throw_error(ErrorKind::kIo, "{}: {} bytes are more than a file can hold", printable(path_),
                num_bytes);
  }
  check_free_space(file_, path_, num_bytes);
  if (num_bytes == 0) return;
  const auto size = static_cast<off_t>(num_bytes);
  // Not posix_fallocate: where the file system cannot, it writes to every block instead.
  int result = -1;
  do {
    result = ::fallocate(file_.get(), 0, 0, size);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EOPNOTSUPP && errno != EINVAL && errno != ENOSYS) {
    throw_errno(partial_path_, "reserve space");
  }
  if (::ftruncate(file_.get(), size) != 0) throw_errno(partial_path_, "set the size");
}

void PartialFile::write(uint64_t offset, std::span<const std::byte> data) {
  write_exact(file_, partial_path_, offset, data);
}

void PartialFile::sync() {
  if (::fsync(file_.get()) != 0) throw_errno(partial_path_, "sync");
}

void PartialFile::publish() {
  if (!is_ours()) {
    throw_error(ErrorKind::kIo, "{}: was replaced by another process", printable(partial_path_));
  }
  if (::rename(partial_path_.c_str(), path_.c_str()) != 0) throw_errno(path_, "rename to");
  published_ = true;
  sync_directory(parent_of(path_));
  file_.close(path_);
}

bool PartialFile::is_ours() const noexcept {
  struct stat status {};
  return file_.get() >= 0 && ::lstat(partial_path_.c_str(), &status) == 0 &&
         status.st_dev == device_ && status.st_ino == inode_;
}

}  // namespace narrowfloat
