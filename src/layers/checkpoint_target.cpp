// Paths are used in canonical form, as links and `..` can hide that two are the same.
#include "layers/checkpoint_target.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <iterator>
#include <optional>
#include <set>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "layers/scale_originals.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFileSuffix = ".safetensors";
constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::string_view kStagedSuffix = ".staged";
constexpr const char* kInsidePrefix = ".narrowfloat";       // Begins names inside the target.
constexpr std::string_view kBesidePrefix = ".narrowfloat";  // Follows the name of the target.
constexpr std::string_view kStagingSuffix = ".partial";
constexpr std::string_view kLockSuffix = ".lock";
constexpr const char* kStagingName = ".narrowfloat.partial";
constexpr const char* kLockName = ".narrowfloat.lock";
// Inside the staging directory, while files are moved one by one: the old files, and the journal.
constexpr const char* kReplacedName = "replaced";
constexpr const char* kJournalName = "moves";
constexpr uint64_t kMaxJournalBytes = uint64_t{1} << 30;

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

// Sorted, without what a run keeps inside a target.
std::vector<fs::directory_entry> entries_of(const std::string& directory) {
  std::vector<fs::directory_entry> entries;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    const fs::path name = at->path().filename();
    if (name != kStagingName && name != kLockName) entries.push_back(*at);
  }
  if (error) {
    throw_error(ErrorKind::kIo, "{}: cannot list the directory: {}", printable(directory),
                error.message());
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

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

std::string staged_path(const std::string& staging, const std::string& name) {
  return join_path(staging, name) + std::string(kStagedSuffix);
}

// A mount point cannot be renamed, nor can what is in a directory that is not writable.
bool must_stage_inside(const std::string& target) {
  if (!fs::is_directory(target)) return false;
  const std::string parent = fs::path(target).parent_path().string();
  struct statx status {};
  if (statx(AT_FDCWD, target.c_str(), 0, STATX_BASIC_STATS, &status) == 0 &&
      (status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0) {
    return true;
  }
  const std::optional<FileStamp> stamp = file_stamp(target);
  const std::optional<FileStamp> parent_stamp = file_stamp(parent);
  if (!stamp || !parent_stamp || stamp->device != parent_stamp->device) return true;
  return faccessat(AT_FDCWD, parent.c_str(), W_OK | X_OK, AT_EACCESS) != 0;
}

// The moves of a commit that is made file by file.
struct Journal {
  std::vector<std::string> old_names;  // From the target, in this order.
  std::vector<std::string> new_names;  // To the target, after them.

  // Names may hold anything but NUL.
  [[nodiscard]] std::string text() const {
    std::string text;
    for (const std::string& name : old_names) text.append("-").append(name).append(1, '\0');
    for (const std::string& name : new_names) text.append("+").append(name).append(1, '\0');
    return text;
  }
  static Journal parse(std::string_view text) {
    Journal journal;
    while (!text.empty()) {
      const std::string_view record = text.substr(0, text.find('\0'));
      (record.front() == '-' ? journal.old_names : journal.new_names)
          .emplace_back(record.substr(1));
      text.remove_prefix(record.size() + 1);
    }
    return journal;
  }
};

bool exists(const std::string& path) { return fs::exists(fs::symlink_status(path)); }

// Paths of the staging directory and of the lock, less their suffixes.
std::string staging_prefix(const std::string& target, bool is_inside) {
  return is_inside ? join_path(target, kInsidePrefix) : target + std::string(kBesidePrefix);
}

// Whether a run was killed while it moved files to the target.
bool is_half_committed(const std::string& target) {
  const std::string staging =
      staging_prefix(target, must_stage_inside(target)) + std::string(kStagingSuffix);
  return exists(join_path(staging, kJournalName));
}

// Undoes a commit of which a journal is left: takes the new files back and returns the old ones, in
// the opposite order.
void undo_moves(const std::string& staging, const std::string& target) {
  const std::string journal_path = join_path(staging, kJournalName);
  if (!exists(journal_path)) return;
  const Journal journal = Journal::parse(read_file_bounded(journal_path, kMaxJournalBytes));
  const std::string replaced = join_path(staging, kReplacedName);
  const auto is_still_old = [&](const std::string& name) {
    const auto& old = journal.old_names;
    return std::find(old.begin(), old.end(), name) != old.end() &&
           !exists(join_path(replaced, name));
  };
  const auto return_new = [&](const std::string& name) {
    const std::string path = join_path(target, name);
    if (exists(staged_path(staging, name)) || !exists(path) || is_still_old(name)) return;
    rename_new(path, staged_path(staging, name));
  };
  const auto restore_old = [&](const std::string& name) {
    const std::string path = join_path(replaced, name);
    if (exists(path)) rename_new(path, join_path(target, name));
  };
  std::for_each(journal.new_names.rbegin(), journal.new_names.rend(), return_new);
  std::for_each(journal.old_names.rbegin(), journal.old_names.rend(), restore_old);
  sync_directory(target);
  if (unlink(journal_path.c_str()) != 0) throw_errno(journal_path, "remove");
  rmdir(replaced.c_str());
  sync_directory(staging);
}

}  // namespace

CheckpointTarget::CheckpointTarget(const Checkpoint& source, const std::string& target, bool force,
                                   std::span<const std::string> more_files)
    : is_directory_(source.is_directory()), force_(force), auxiliary_(source.auxiliary_files()) {
  if (target.empty()) throw_invalid("target: expected a path, got an empty one");
  target_ = canonical(target).string();
  check_relation(source);
  for (const std::string& file : more_files) check_not_read(file);
  check_existing();
  const fs::path parent = fs::path(target_).parent_path();
  if (!fs::is_directory(parent)) {
    throw_error(ErrorKind::kIo, "{}: no such directory; create it first",
                printable(parent.string()));
  }
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

void CheckpointTarget::check_not_read(const std::string& file) const {
  const fs::path path = canonical(file);
  const bool is_target = is_same(path, target_);
  if (!is_target && !is_below(path, target_)) return;
  throw_invalid("target: '{}' {} '{}', which is read; name a different place", printable(target_),
                is_target ? "is the file" : "holds the file", printable(path.string()));
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
  if (is_directory_ && is_half_committed(target_)) return;  // begin() undoes that and asks again.
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
         name == kScalesFileName ||
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
  return is_directory_ && must_stage_inside(target_) ? target_
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

void CheckpointTarget::begin(uint64_t bytes_needed, bool resume) {
  check_room(bytes_needed);
  if (is_directory_) make_staging(resume);
}

void CheckpointTarget::make_staging(bool resume) {
  is_inside_ = must_stage_inside(target_);
  const std::string prefix = staging_prefix(target_, is_inside_);
  const std::string path = prefix + std::string(kStagingSuffix);
  lock_ = LockedFile(prefix + std::string(kLockSuffix),
                     "another run is writing there; wait for it or stop it");
  if (exists(path)) {
    // Every run makes the lock file first and removes it last.
    if (lock_.is_new()) {
      lock_.unlink();
      throw_error(ErrorKind::kIo,
                  "{}: is in the way, and no lock beside it says that a run left it; "
                  "remove it",
                  printable(path));
    }
    undo_moves(path, target_);
    // It may be the old checkpoint, of an exchange that is not on disk yet.
    sync_directory(fs::path(path).parent_path().string());
  }
  staging_ = path;
  keeps_staging_ = resume;  // Even if this run is refused.
  check_existing();         // Whatever a dead run did to the target is undone now.
  // A staging directory with a manifest holds nothing but a run's files: the manifest is removed
  // before the directory is renamed.
  if (resume && exists(own_path(kManifestName))) return;
  keeps_staging_ = false;
  std::error_code error;
  fs::remove_all(staging_, error);
  if (error) {
    throw_error(ErrorKind::kIo, "{}: cannot remove the files of a dead run: {}",
                printable(staging_), error.message());
  }
  if (mkdir(staging_.c_str(), 0777) != 0) throw_errno(staging_, "make the directory");
}

CheckpointTarget::~CheckpointTarget() {
  if (!staging_.empty() && !keeps_staging_) remove_staging();
}

// The lock goes last: a staging directory without one belongs to nobody.
void CheckpointTarget::remove_staging() noexcept {
  std::error_code error;
  fs::remove_all(std::exchange(staging_, {}), error);
  if (!error) lock_.unlink();
}

std::string CheckpointTarget::file_path(const std::string& name) const {
  return is_directory_ ? staged_path(staging_, name) : target_;
}

std::string CheckpointTarget::own_path(const std::string& name) const {
  return join_path(staging_, name);
}

void CheckpointTarget::keep_only(
    const std::map<std::string, ResumeManifest::FinishedFile>& files) const {
  for (const fs::directory_entry& entry : entries_of(staging_)) {
    const std::string name = entry.path().filename().string();
    const bool is_staged = name.ends_with(kStagedSuffix);
    const bool is_kept =
        name == kManifestName ||
        (is_staged && files.contains(name.substr(0, name.size() - kStagedSuffix.size())));
    if (!is_kept) fs::remove_all(entry.path());
  }
}

void CheckpointTarget::commit(std::vector<std::string> names) {
  if (!is_directory_) return;
  sort_for_arrival(names);
  for (const std::string& name : names) {
    const std::string path = staged_path(staging_, name);
    if (!fs::is_regular_file(fs::symlink_status(path))) {
      throw_error(ErrorKind::kIo, "{}: is gone; did another program remove it?", printable(path));
    }
  }
  check_existing();
  if (is_inside_) {
    publish_by_moves(std::move(names));
  } else if (fs::is_directory(target_)) {
    publish_by_exchange(std::move(names));
  } else {
    publish_new(names);
  }
}

// Leaves these files alone in the staging directory, under their final names.
void CheckpointTarget::name_staged_files(const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    rename_new(staged_path(staging_, name), join_path(staging_, name));
  }
  for (const fs::directory_entry& entry : entries_of(staging_)) {
    const std::string name = entry.path().filename().string();
    if (std::find(names.begin(), names.end(), name) == names.end()) fs::remove_all(entry.path());
  }
  sync_directory(staging_);
}

void CheckpointTarget::publish_new(const std::vector<std::string>& names) {
  name_staged_files(names);
  rename_new(staging_, target_);
  try {
    sync_directory(fs::path(target_).parent_path().string());
  } catch (...) {
    // A directory that may not be on disk is not published.
    if (rename(target_.c_str(), staging_.c_str()) != 0) staging_.clear();
    throw;
  }
  staging_.clear();
  lock_.unlink();
}

void CheckpointTarget::publish_by_exchange(std::vector<std::string> names) {
  struct stat status {};
  if (stat(target_.c_str(), &status) != 0) throw_errno(target_, "read the status");
  name_staged_files(names);
  // The target is another directory afterwards, as accessible as the old one. Only root may give it
  // to the old one's owner.
  [[maybe_unused]] const int ignored = chown(staging_.c_str(), status.st_uid, status.st_gid);
  if (chmod(staging_.c_str(), status.st_mode & 07777U) != 0) throw_errno(staging_, "set the mode");
  if (!rename_exchange(staging_, target_)) {  // Some file systems have no exchange.
    for (const std::string& name : names) {
      rename_new(join_path(staging_, name), staged_path(staging_, name));
    }
    publish_by_moves(std::move(names));
    return;
  }
  try {
    if (!force_ && !entries_of(staging_).empty()) {
      throw_error(ErrorKind::kIo, "{}: is not empty any more", printable(target_));
    }
    sync_directory(fs::path(target_).parent_path().string());
  } catch (...) {
    // A checkpoint that may not be on disk is not published, and the old one not removed.
    if (!rename_exchange(staging_, target_)) staging_.clear();
    throw;
  }
  remove_replaced();
}

// The staging directory is the old target now. What is in it and is no part of a checkpoint came
// after the last check; it stays in the target.
void CheckpointTarget::remove_replaced() {
  std::error_code ignored;
  for (fs::directory_iterator at(staging_, ignored), end; !ignored && at != end;
       at.increment(ignored)) {
    const std::string name = at->path().filename().string();
    const bool is_ours = name == kStagingName || name == kLockName;
    if (is_ours || (is_replaceable(name) && !fs::is_directory(at->symlink_status()))) continue;
    if (renameat2(AT_FDCWD, at->path().c_str(), AT_FDCWD, join_path(target_, name).c_str(),
                  RENAME_NOREPLACE) != 0) {
      staging_.clear();  // It cannot be saved, so nothing is removed.
      return;
    }
  }
  remove_staging();
}

void CheckpointTarget::publish_by_moves(std::vector<std::string> names) {
  Journal journal;
  journal.new_names = std::move(names);
  for (const fs::directory_entry& entry : entries_of(target_)) {
    const std::string name = entry.path().filename().string();
    // Files that came since the check stay.
    if (force_ && is_replaceable(name) && !fs::is_directory(entry.symlink_status())) {
      journal.old_names.push_back(name);
    }
  }
  // Old files leave in the opposite order.
  sort_for_arrival(journal.old_names);
  std::reverse(journal.old_names.begin(), journal.old_names.end());
  const std::string replaced = join_path(staging_, kReplacedName);
  const std::string journal_path = join_path(staging_, kJournalName);
  if (mkdir(replaced.c_str(), 0777) != 0) throw_errno(replaced, "make the directory");
  sync_directory(staging_);
  write_file_atomically(journal_path, journal.text());
  try {
    for (const std::string& name : journal.old_names) {
      rename_new(join_path(target_, name), join_path(replaced, name));
    }
    sync_directory(target_);
    for (const std::string& name : journal.new_names) {
      rename_new(staged_path(staging_, name), join_path(target_, name));
    }
    sync_directory(target_);
    if (unlink(journal_path.c_str()) != 0) throw_errno(journal_path, "remove");
  } catch (...) {
    try {
      undo_moves(staging_, target_);
    } catch (...) {
      staging_.clear();  // It has the only copy of a file; the next run tries again.
    }
    throw;
  }
  try {
    sync_directory(staging_);
  } catch (...) {
    staging_.clear();  // After a power cut the journal may be there again, and needs the old files.
    throw;
  }
  remove_staging();
}

}  // namespace narrowfloat
