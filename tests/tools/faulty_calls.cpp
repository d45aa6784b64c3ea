// A library to preload (LD_PRELOAD) that makes one system call of a program fail, or kills the
// program right before it. The environment says which:
//
//   NARROWFLOAT_FAULT=CALL:N:WHAT   the N-th CALL (counted from 1) fails with the error WHAT, a
//                                   number; "short" makes it a write of one byte, "kill" a SIGKILL.
//                                   CALL is one of the names below, or "any".
//   NARROWFLOAT_FAULT_COUNTS=FILE   FILE gets a line "CALL COUNT" for each, when the program ends.
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

namespace {

enum Call {
  kOpen,
  kRead,
  kWrite,
  kCopy,
  kFallocate,
  kTruncate,
  kFsync,
  kRename,
  kClose,
  kMkdir,
  kUnlink,
  kFlock,
  kChmod,
  kNumCalls
};
constexpr std::array<const char*, kNumCalls> kNames = {
    "open",   "read",  "write", "copy",   "fallocate", "truncate", "fsync",
    "rename", "close", "mkdir", "unlink", "flock",     "chmod"};

constexpr int kShort = -1;
constexpr int kKill = -2;

struct Fault {
  int call = -1;  // An index of kNames; kNumCalls for any.
  long number = 0;
  int what = 0;
};

std::array<std::atomic<long>, kNumCalls + 1> counts;

Fault fault_from_environment() {
  Fault fault;
  const char* const text = std::getenv("NARROWFLOAT_FAULT");
  if (text == nullptr) return fault;
  std::array<char, 32> name{};
  std::array<char, 32> what{};
  if (std::sscanf(text, "%31[^:]:%ld:%31s", name.data(), &fault.number, what.data()) != 3) {
    std::abort();
  }
  for (int i = 0; i < kNumCalls; ++i) {
    if (std::strcmp(name.data(), kNames[static_cast<size_t>(i)]) == 0) fault.call = i;
  }
  if (std::strcmp(name.data(), "any") == 0) fault.call = kNumCalls;
  if (fault.call < 0) std::abort();
  if (std::strcmp(what.data(), "short") == 0) {
    fault.what = kShort;
  } else if (std::strcmp(what.data(), "kill") == 0) {
    fault.what = kKill;
  } else {
    fault.what = std::atoi(what.data());
  }
  return fault;
}

// Counts the call and returns its error, kShort, or 0 where nothing happens to it.
int next_fault(Call call) {
  static const Fault fault = fault_from_environment();
  const long number = ++counts[call];
  const long number_of_any = ++counts[kNumCalls];
  const bool is_meant = fault.call == call        ? number == fault.number
                        : fault.call == kNumCalls ? number_of_any == fault.number
                                                  : false;
  if (!is_meant) return 0;
  if (fault.what == kKill) ::kill(::getpid(), SIGKILL);
  return fault.what;
}

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

// Calls `function` unless the call is to fail.
template <typename Function, typename... Args>
auto call_or_fail(Call call, const char* name, Args... args) {
  using Result = decltype(std::declval<Function>()(args...));
  const int error = next_fault(call);
  if (error > 0) {
    errno = error;
    return static_cast<Result>(-1);
  }
  return next<Function>(name)(args...);
}

struct CountsAtExit {
  ~CountsAtExit() {
    const char* const path = std::getenv("NARROWFLOAT_FAULT_COUNTS");
    if (path == nullptr) return;
    std::FILE* const file = std::fopen(path, "w");
    if (file == nullptr) std::abort();
    for (int i = 0; i < kNumCalls; ++i) {
      std::fprintf(file, "%s %ld\n", kNames[static_cast<size_t>(i)],
                   counts[static_cast<size_t>(i)].load());
    }
    std::fprintf(file, "any %ld\n", counts[kNumCalls].load());
    std::fclose(file);
  }
};
const CountsAtExit kCountsAtExit;

}  // namespace

// The names and signatures are those of the C library.
extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return call_or_fail<int(const char*, int, mode_t)>(kOpen, "open", path, flags, mode);
}

int openat(int directory, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return call_or_fail<int(int, const char*, int, mode_t)>(kOpen, "openat", directory, path, flags,
                                                          mode);
}

// The library's openat2() is a raw system call.
long syscall(long number, ...) {
  va_list arguments;
  va_start(arguments, number);
  std::array<long, 6> values{};
  for (long& value : values) value = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_openat2) {
    const int error = next_fault(kOpen);
    if (error > 0) {
      errno = error;
      return -1;
    }
  }
  return next<long(long, long, long, long, long, long, long)>("syscall")(
      number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

ssize_t pread(int file, void* data, size_t size, off_t offset) {
  return call_or_fail<ssize_t(int, void*, size_t, off_t)>(kRead, "pread", file, data, size, offset);
}

ssize_t write(int file, const void* data, size_t size) {
  return call_or_fail<ssize_t(int, const void*, size_t)>(kWrite, "write", file, data, size);
}

ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  const int error = next_fault(kWrite);
  if (error > 0) {
    errno = error;
    return -1;
  }
  return next<ssize_t(int, const void*, size_t, off_t)>("pwrite")(
      file, data, error == kShort ? 1 : size, offset);
}

ssize_t copy_file_range(int from, off64_t* from_offset, int to, off64_t* to_offset, size_t size,
                        unsigned flags) {
  return call_or_fail<ssize_t(int, off64_t*, int, off64_t*, size_t, unsigned)>(
      kCopy, "copy_file_range", from, from_offset, to, to_offset, size, flags);
}

int fallocate(int file, int mode, off_t offset, off_t size) {
  return call_or_fail<int(int, int, off_t, off_t)>(kFallocate, "fallocate", file, mode, offset,
                                                   size);
}

int ftruncate(int file, off_t size) noexcept {
  return call_or_fail<int(int, off_t)>(kTruncate, "ftruncate", file, size);
}

int fsync(int file) { return call_or_fail<int(int)>(kFsync, "fsync", file); }

int rename(const char* from, const char* to) noexcept {
  return call_or_fail<int(const char*, const char*)>(kRename, "rename", from, to);
}

int renameat2(int from_directory, const char* from, int to_directory, const char* to,
              unsigned flags) noexcept {
  return call_or_fail<int(int, const char*, int, const char*, unsigned)>(
      kRename, "renameat2", from_directory, from, to_directory, to, flags);
}

// A close that fails has closed the file nevertheless.
int close(int file) {
  const int error = next_fault(kClose);
  const int result = next<int(int)>("close")(file);
  if (error <= 0) return result;
  errno = error;
  return -1;
}

int mkdir(const char* path, mode_t mode) noexcept {
  return call_or_fail<int(const char*, mode_t)>(kMkdir, "mkdir", path, mode);
}

int unlink(const char* path) noexcept {
  return call_or_fail<int(const char*)>(kUnlink, "unlink", path);
}

int unlinkat(int directory, const char* path, int flags) noexcept {
  return call_or_fail<int(int, const char*, int)>(kUnlink, "unlinkat", directory, path, flags);
}

int rmdir(const char* path) noexcept {
  return call_or_fail<int(const char*)>(kUnlink, "rmdir", path);
}

int flock(int file, int operation) noexcept {
  return call_or_fail<int(int, int)>(kFlock, "flock", file, operation);
}

int chmod(const char* path, mode_t mode) noexcept {
  return call_or_fail<int(const char*, mode_t)>(kChmod, "chmod", path, mode);
}

}  // extern "C"
