// Paths are compared in canonical form: links and `..` must not hide that two are the same.
#include "layers/checkpoint_target.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFileSuffix = ".safetensors";

fs::path canonical(const std::string& path) {
  std::error_code error;
  fs::path result = fs::weakly_canonical(fs::absolute(path), error);
  if (error) throw_error(ErrorKind::kIo, "{}: {}", printable(path), error.message());
  // "out/" and "out" are the same directory.
  return result.has_filename() ? result : result.parent_path();
}

bool is_inside(const fs::path& inner, const fs::path& outer) {
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

// What --force may remove: only a directory that is recognisably a checkpoint.
bool looks_like_checkpoint(const fs::path& directory) {
  return std::any_of(
      fs::directory_iterator(directory), fs::directory_iterator(),
      [](const fs::directory_entry& entry) { return entry.path().extension() == kFileSuffix; });
}

void sync_directory(const std::string& path) {
  const FileDescriptor directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0 || fsync(directory.get()) != 0) throw_errno(path, "sync the directory");
}

void rename_or_throw(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) throw_errno(to, "rename to it");
}

// A new directory beside `target`: TARGET.partial-N with the first free number.
std::string make_staging(const std::string& target) {
  for (int number = 1;; ++number) {
    std::string path = fmt::format("{}.partial-{}", target, number);
    if (mkdir(path.c_str(), 0777) == 0) return path;
    if (errno != EEXIST) throw_errno(path, "make the directory");
  }
}

}  // namespace

CheckpointTarget::CheckpointTarget(const Checkpoint& source, const std::string& target, bool force)
    : is_directory_(source.is_directory()) {
  if (target.empty()) throw_invalid("target: expected a path, got an empty one");
  target_ = canonical(target).string();
  check_relation(source);
  check_existing(force);
  const fs::path parent = fs::path(target_).parent_path();
  if (!fs::is_directory(parent)) {
    throw_error(ErrorKind::kIo, "{}: no such directory; create it first",
                printable(parent.string()));
  }
}

CheckpointTarget::~CheckpointTarget() {
  std::error_code ignored;
  if (!staging_.empty()) fs::remove_all(staging_, ignored);
}

void CheckpointTarget::check_relation(const Checkpoint& source) const {
  const fs::path target = target_;
  const fs::path origin = canonical(source.path());
  const auto refuse = [&](const char* relation) {
    throw_invalid("target: '{}' {} the source '{}'; name a different place", printable(target_),
                  relation, printable(origin.string()));
  };
  if (target == origin) refuse("is");
  if (is_inside(target, origin)) refuse("is inside");
  if (is_inside(origin, target)) refuse("contains");
  // Shards may be links to files elsewhere (hub caches are made of them).
  for (const SafetensorsReader& shard : source.shards()) {
    if (is_inside(canonical(shard.path()), target)) refuse("holds a file of");
  }
}

void CheckpointTarget::check_existing(bool force) const {
  const fs::file_status status = fs::status(target_);
  const bool is_file_name = target_.ends_with(kFileSuffix);
  if (is_directory_ != !is_file_name ||
      (fs::exists(status) && is_directory_ != fs::is_directory(status))) {
    throw_invalid("target: the source is a {}, so '{}' must be {}",
                  is_directory_ ? "directory" : "file", printable(target_),
                  is_directory_ ? "a directory" : "a file named *.safetensors");
  }
  if (!fs::exists(status) || (is_directory_ && fs::is_empty(target_))) return;
  if (!force) {
    throw_invalid("target: '{}' exists{}; use force to replace it, or name a different place",
                  printable(target_), is_directory_ ? " and is not empty" : "");
  }
  if (is_directory_ && !looks_like_checkpoint(target_)) {
    throw_invalid(
        "target: '{}' holds no .safetensors file, so it is not replaced; remove it "
        "yourself or name a different place",
        printable(target_));
  }
}

void CheckpointTarget::begin(uint64_t bytes_needed) {
  const std::string parent = fs::path(target_).parent_path().string();
  std::error_code error;
  const fs::space_info space = fs::space(parent, error);
  if (!error && space.available < bytes_needed) {
    throw_error(ErrorKind::kIo,
                "{}: {} bytes are needed, {} are free; make room or choose another "
                "disk",
                printable(parent), bytes_needed, space.available);
  }
  if (is_directory_) staging_ = make_staging(target_);
}

std::string CheckpointTarget::file_path(const std::string& name) const {
  return is_directory_ ? join_path(staging_, name) : target_;
}

void CheckpointTarget::commit() {
  if (!is_directory_) return;
  sync_directory(staging_);
  std::string replaced;
  if (fs::exists(target_) && !fs::is_empty(target_)) {
    replaced = staging_ + ".old";
    rename_or_throw(target_, replaced);
  }
  if (rename(staging_.c_str(), target_.c_str()) != 0) {
    const int cause = errno;
    if (!replaced.empty()) rename_or_throw(replaced, target_);
    errno = cause;
    throw_errno(target_, "rename the finished directory to it");
  }
  staging_.clear();
  sync_directory(fs::path(target_).parent_path().string());
  std::error_code ignored;  // The new checkpoint is in place; leftovers are only untidy.
  if (!replaced.empty()) fs::remove_all(replaced, ignored);
}

}  // namespace narrowfloat
