// The name is looked at again after locking: the owner may have renamed or removed the file since
// it was opened, and somebody else may have made another one.
#include "checkpoint/locked_file.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

// O_NONBLOCK: opening a FIFO must not hang.
constexpr int kFlags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;

// False if another process holds the lock. File systems without locks count as unlocked.
bool try_lock(const FileDescriptor& file) {
  return ::flock(file.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

bool is_regular_of_one_name(const FileDescriptor& file) {
  struct stat status {};
  return ::fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink <= 1;
}

}  // namespace

LockedFile::LockedFile(std::string path, std::string_view busy) : path_(std::move(path)) {
  while (!try_acquire(busy)) {
  }
}

bool LockedFile::try_acquire(std::string_view busy) {
  const auto refuse_other_kind = [&] {
    throw_error(ErrorKind::kIo, "{}: is in the way: not a regular file of one name; remove it",
                printable(path_));
  };
  fd_ = FileDescriptor(::open(path_.c_str(), kFlags | O_CREAT | O_EXCL, 0666));
  is_new_ = fd_.get() >= 0;
  if (!is_new_) {
    if (errno != EEXIST) throw_errno(path_, "create");
    fd_ = FileDescriptor(::open(path_.c_str(), kFlags));
    if (fd_.get() < 0) {
      if (errno == ENOENT) return false;
      if (errno == ELOOP || errno == EISDIR || errno == ENXIO) refuse_other_kind();
      throw_errno(path_, "open");
    }
  }
  if (!is_regular_of_one_name(fd_)) refuse_other_kind();
  if (!try_lock(fd_)) throw_error(ErrorKind::kIo, "{}: {}", printable(path_), busy);
  stamp_ = file_stamp(fd_, path_);
  return is_named();
}

bool LockedFile::is_named() const noexcept {
  struct stat status {};
  return fd_.get() >= 0 && ::lstat(path_.c_str(), &status) == 0 && status.st_dev == stamp_.device &&
         status.st_ino == stamp_.inode;
}

void LockedFile::unlink() noexcept {
  if (is_named()) ::unlink(path_.c_str());
}

void LockedFile::close() { fd_.close(path_); }

}  // namespace narrowfloat
