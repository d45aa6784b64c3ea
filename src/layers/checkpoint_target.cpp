// Paths are used in canonical form, as links and `..` can hide that two are the same.
#include "layers/checkpoint_target.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <iterator>
#include <optional>
#include <set>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFileSuffix = ".safetensors";
constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::string_view kStagedSuffix = ".staged";
constexpr const char* kStagingName = ".narrowfloat.partial";  // Inside an existing target.
constexpr const char* kLockName = ".narrowfloat.lock";        // Inside the staging directory.
constexpr const char* kReplacedName = "replaced";  // Inside it too: the old files, for a while.

fs::path canonical(const std::string& path) {
  std::error_code error;
  fs::path result = fs::weakly_canonical(fs::absolute(path), error);
  if (error) throw_error(ErrorKind::kIo, "{}: {}", printable(path), error.message());
  // "out/" and "out" are the same directory.
  return result.has_filename() ? result : result.parent_path();
}

// Device and inode decide, not names: a bind mount gives a directory a second path, a hard link a
// file.
bool is_same(const fs::path& a, const fs::path& b) {
  const std::optional<FileStamp> stamp_a = file_stamp(a.string());
  const std::optional<FileStamp> stamp_b = file_stamp(b.string());
  return stamp_a && stamp_b && stamp_a->is_same_file(*stamp_b);
}

bool is_below(const fs::path& inner, const fs::path& outer) {
  for (fs::path path = inner; path.has_relative_path();) {
    path = path.parent_path();
    if (is_same(path, outer)) return true;
  }
  return false;
}

// Sorted, without the staging directory.
std::vector<fs::directory_entry> entries_of(const std::string& directory) {
  std::vector<fs::directory_entry> entries;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    if (at->path().filename() != kStagingName) entries.push_back(*at);
  }
  if (error) {
    throw_error(ErrorKind::kIo, "{}: cannot list the directory: {}", printable(directory),
                error.message());
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

void sync_directory(const std::string& path) {
  const FileDescriptor directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: the file system has no such operation and needs none.
  if (directory.get() < 0 || (fsync(directory.get()) != 0 && errno != EINVAL)) {
    throw_errno(path, "sync the directory");
  }
}

void rename_or_throw(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) throw_errno(to, "rename to it");
}

// Renames that are undone unless they are kept.
class Renames {
 public:
  Renames() = default;
  Renames(const Renames&) = delete;
  Renames& operator=(const Renames&) = delete;
  ~Renames() { undo(); }

  void add(const std::string& from, const std::string& to) {
    rename_or_throw(from, to);
    done_.emplace_back(from, to);
  }
  void keep() { done_.clear(); }
  // False if a file could not be moved back.
  bool undo() noexcept {
    bool all = true;
    for (; !done_.empty(); done_.pop_back()) {
      all = rename(done_.back().second.c_str(), done_.back().first.c_str()) == 0 && all;
    }
    return all;
  }

 private:
  std::vector<std::pair<std::string, std::string>> done_;
};

// Files arrive in this order and leave in the opposite one; the header says why.
int rank(const std::string& name) {
  if (name.ends_with(kIndexSuffix)) return 0;
  if (name == "config.json") return 1;
  return name.ends_with(kFileSuffix) ? 3 : 2;
}

void sort_for_arrival(std::vector<std::string>& names) {
  std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
    return std::pair(rank(a), a) < std::pair(rank(b), b);
  });
}

// Final names of the complete files of a staging directory.
std::vector<std::string> staged_names(const std::string& staging) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : entries_of(staging)) {
    std::string name = entry.path().filename().string();
    if (!name.ends_with(kStagedSuffix)) continue;
    name.resize(name.size() - kStagedSuffix.size());
    names.push_back(std::move(name));
  }
  sort_for_arrival(names);
  return names;
}

std::string staged_path(const std::string& staging, const std::string& name) {
  return join_path(staging, name) + std::string(kStagedSuffix);
}

bool is_same_file(const FileDescriptor& file, const std::string& path) {
  struct stat opened {};
  struct stat named {};
  return fstat(file.get(), &opened) == 0 && lstat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

// File systems without locks count as unlocked.
bool try_lock(const FileDescriptor& file) {
  return flock(file.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

// Removes a staging directory whose run is dead. False if it has no lock file, so is not ours.
// Throws kIo if the run is alive.
bool remove_stale(const std::string& path) {
  const std::string lock_path = join_path(path, kLockName);
  const FileDescriptor lock(open(lock_path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (lock.get() < 0) return errno != ENOENT ? false : rmdir(path.c_str()) == 0;
  if (!try_lock(lock)) {
    throw_error(ErrorKind::kIo, "{}: another run is writing there; wait for it or stop it",
                printable(path));
  }
  // Another run may have removed it and started again since it was opened.
  if (!is_same_file(lock, lock_path)) return true;
  std::error_code error;
  fs::remove_all(path, error);
  if (error) {
    throw_error(ErrorKind::kIo, "{}: cannot remove the files of a dead run: {}", printable(path),
                error.message());
  }
  return true;
}

}  // namespace

CheckpointTarget::CheckpointTarget(const Checkpoint& source, const std::string& target, bool force)
    : is_directory_(source.is_directory()), force_(force), auxiliary_(source.auxiliary_files()) {
  if (target.empty()) throw_invalid("target: expected a path, got an empty one");
  target_ = canonical(target).string();
  check_relation(source);
  check_existing();
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
  if (target == origin || is_same(target, origin)) refuse("is");
  if (is_below(target, origin)) refuse("is inside");
  if (is_below(origin, target)) refuse("contains");
  // Shards may be links to files elsewhere (hub caches are made of them), and files of the target
  // may be shards under a second name.
  std::set<std::pair<uint64_t, uint64_t>> shards;
  for (const SafetensorsReader& shard : source.shards()) {
    if (is_below(canonical(shard.path()), target)) refuse("holds a file of");
    if (const auto stamp = file_stamp(shard.path())) shards.emplace(stamp->device, stamp->inode);
  }
  if (!fs::is_directory(target)) return;
  for (const fs::directory_entry& entry : entries_of(target_)) {
    const auto stamp = file_stamp(entry.path().string());
    if (stamp && shards.contains({stamp->device, stamp->inode})) refuse("holds a file of");
  }
}

void CheckpointTarget::check_existing() const {
  // Links to existing files are resolved by now.
  if (fs::is_symlink(fs::symlink_status(target_))) {
    throw_invalid("target: '{}' is a link that leads nowhere; remove it or name a different place",
                  printable(target_));
  }
  const fs::file_status status = fs::status(target_);
  const bool is_file_name = target_.ends_with(kFileSuffix);
  if (is_directory_ != !is_file_name ||
      (fs::exists(status) && is_directory_ != fs::is_directory(status))) {
    throw_invalid("target: the source is a {}, so '{}' must be {}",
                  is_directory_ ? "directory" : "file", printable(target_),
                  is_directory_ ? "a directory" : "a file named *.safetensors");
  }
  if (!fs::exists(status) || (is_directory_ && entries_of(target_).empty())) return;
  if (!force_) {
    throw_invalid(
        "target: '{}' exists{}; use option force to replace it, or name a different place",
        printable(target_), is_directory_ ? " and is not empty" : "");
  }
  if (is_directory_) check_replaceable();
}

// Names of files that force may remove: files of a checkpoint, and no directory.
bool CheckpointTarget::is_replaceable(const std::string& name) const {
  return name.ends_with(kFileSuffix) || name.ends_with(kIndexSuffix) ||
         name.ends_with(".partial") || name == "config.json" || name == "hf_quant_config.json" ||
         name == kLockName ||  // The lock of a run that was killed right after its commit.
         std::find(auxiliary_.begin(), auxiliary_.end(), name) != auxiliary_.end();
}

void CheckpointTarget::check_replaceable() const {
  // The weights may be in the staging directory.
  bool has_weights = fs::exists(join_path(target_, kStagingName));
  for (const fs::directory_entry& entry : entries_of(target_)) {
    const std::string name = entry.path().filename().string();
    const fs::file_type type = entry.symlink_status().type();
    const bool is_file = type == fs::file_type::regular || type == fs::file_type::symlink;
    if (!is_file || !is_replaceable(name)) {
      throw_invalid(
          "target: '{}' holds '{}', which is not part of a checkpoint, so it is not replaced; move "
          "that away or name a different place",
          printable(target_), printable(name));
    }
    has_weights = has_weights || name.ends_with(kFileSuffix);
  }
  if (!has_weights) {
    throw_invalid(
        "target: '{}' holds no .safetensors file, so it is not replaced; remove it "
        "yourself or name a different place",
        printable(target_));
  }
}

std::string CheckpointTarget::host() const {
  return is_directory_ && fs::is_directory(target_) ? target_
                                                    : fs::path(target_).parent_path().string();
}

void CheckpointTarget::check_room(uint64_t bytes_needed) const {
  const std::string directory = host();
  if (faccessat(AT_FDCWD, directory.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    throw_errno(target_, fmt::format("write to {}", printable(directory)));
  }
  std::error_code error;
  const fs::space_info space = fs::space(directory, error);
  // Some network and overlay systems report no capacity at all.
  if (!error && space.capacity != 0 && space.available < bytes_needed) {
    throw_error(ErrorKind::kIo,
                "{}: {} bytes are needed, {} are free; make room or choose another "
                "disk",
                printable(directory), bytes_needed, space.available);
  }
}

void CheckpointTarget::begin(uint64_t bytes_needed) {
  check_room(bytes_needed);
  if (is_directory_) make_staging();
}

void CheckpointTarget::make_staging() {
  exists_ = fs::is_directory(target_);
  if (exists_) {
    const std::string path = join_path(target_, kStagingName);
    if (!try_staging(path)) {
      throw_error(ErrorKind::kIo, "{}: is in the way; remove it", printable(path));
    }
    return;
  }
  for (int number = 1; !try_staging(fmt::format("{}.partial-{}", target_, number)); ++number) {
  }
}

// False if something else of that name exists.
bool CheckpointTarget::try_staging(const std::string& path) {
  while (mkdir(path.c_str(), 0777) != 0) {
    if (errno != EEXIST) throw_errno(path, "make the directory");
    if (!remove_stale(path)) return false;
  }
  staging_ = path;
  const std::string lock_path = join_path(path, kLockName);
  lock_ = FileDescriptor(open(lock_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (lock_.get() < 0) throw_errno(lock_path, "create");
  if (!try_lock(lock_)) throw_error(ErrorKind::kIo, "{}: cannot be locked", printable(lock_path));
  return true;
}

std::string CheckpointTarget::file_path(const std::string& name) const {
  return is_directory_ ? staged_path(staging_, name) : target_;
}

void CheckpointTarget::commit() {
  if (!is_directory_) return;
  if (exists_) {
    commit_in_place();
    return;
  }
  for (const std::string& name : staged_names(staging_)) {
    rename_or_throw(staged_path(staging_, name), join_path(staging_, name));
  }
  sync_directory(staging_);
  if (rename(staging_.c_str(), target_.c_str()) != 0) {
    throw_errno(target_, "rename the finished directory to it");
  }
  staging_.clear();
  unlink(join_path(target_, kLockName).c_str());
  sync_directory(fs::path(target_).parent_path().string());
}

void CheckpointTarget::commit_in_place() {
  std::vector<std::string> old_names;
  for (const fs::directory_entry& entry : entries_of(target_)) {
    const std::string name = entry.path().filename().string();
    // Files that came since the check stay.
    if (force_ && is_replaceable(name) && !fs::is_directory(entry.symlink_status())) {
      old_names.push_back(name);
    }
  }
  if (!force_) check_existing();
  // Old files leave in the opposite order.
  sort_for_arrival(old_names);
  std::reverse(old_names.begin(), old_names.end());
  const std::string replaced = join_path(staging_, kReplacedName);
  if (mkdir(replaced.c_str(), 0777) != 0) throw_errno(replaced, "make the directory");
  sync_directory(staging_);
  Renames renames;
  try {
    for (const std::string& name : old_names) {
      renames.add(join_path(target_, name), join_path(replaced, name));
    }
    sync_directory(target_);
    for (const std::string& name : staged_names(staging_)) {
      renames.add(staged_path(staging_, name), join_path(target_, name));
    }
    sync_directory(target_);
  } catch (...) {
    if (!renames.undo()) staging_.clear();  // The staging directory has the only copy of a file.
    throw;
  }
  renames.keep();
  std::error_code ignored;  // The new checkpoint is in place; leftovers do no harm.
  fs::remove_all(std::exchange(staging_, {}), ignored);
}

}  // namespace narrowfloat
