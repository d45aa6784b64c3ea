// The destination of a rewritten checkpoint. Nothing half-written ever loads, and nothing old is
// lost before the new checkpoint is in its place and on disk.
//
// A single file is atomic by itself. A directory is staged: every file is written under a name that
// no loader knows (NAME.staged) in a staging directory, and a lock file shows that the run lives.
//
//   beside the target: TARGET.narrowfloat.partial, TARGET.narrowfloat.lock. A new target appears by
//     one rename; an old one is exchanged with the staging directory by one system call.
//   inside it, where it is a mount point or its parent is not writable:
//     TARGET/.narrowfloat.partial, TARGET/.narrowfloat.lock. Files are moved one by one: the old
//     weights leave first and the old index last; the new index and configs come first and the new
//     weights last. An index whose shards are missing does not load, so there is the old
//     checkpoint, none that loads, or the new one, never a mixture. A journal in the staging
//     directory lists the moves; while it is there the commit is not done, and the next run undoes
//     it first.
//
// The next run with the same target removes or takes over what a dead one left.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/file_io.h"
#include "checkpoint/locked_file.h"
#include "layers/resume_manifest.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

class CheckpointTarget {
 public:
  // Throws kInvalidArgument for a target that is the source, inside it or around it, that is or
  // holds another one of the files that are read (`more_files`), that is of the other kind (file,
  // directory), that exists without `force`, or that holds with `force` anything but a checkpoint
  // and files of the names that the source has. Writes nothing.
  CheckpointTarget(const Checkpoint& source, const std::string& target, bool force,
                   std::span<const std::string> more_files = {});
  CheckpointTarget(const CheckpointTarget&) = delete;
  CheckpointTarget& operator=(const CheckpointTarget&) = delete;
  // Removes the staging directory unless it was committed or is kept.
  ~CheckpointTarget();

  [[nodiscard]] bool is_directory() const { return is_directory_; }
  // Whether a file at the target may be replaced.
  [[nodiscard]] bool force() const { return force_; }

  // Throws kIo if the file system that will hold the target is not writable or too full.
  void check_room(uint64_t bytes_needed) const;
  // Checks the room and makes the staging directory: empty, or to `resume` as a dead run left it.
  // Undoes the commit of a dead run first. Throws kIo if another run has it.
  void begin(uint64_t bytes_needed, bool resume = false);
  // Whether the staging directory, with whatever is in it, stays for a later run to resume.
  void keep_staging(bool keep) { keeps_staging_ = keep; }
  // Removes everything from the staging directory but the manifest and these files.
  void keep_only(const std::map<std::string, ResumeManifest::FinishedFile>& files) const;
  // Path of a file in the staging directory that is no part of the checkpoint.
  [[nodiscard]] std::string own_path(const std::string& name) const;
  // Path to write a file of the checkpoint to; the target itself if it is a single file.
  [[nodiscard]] std::string file_path(const std::string& name) const;
  // Makes these files, all of which are complete and on disk at their file_path(), the target's.
  void commit(std::vector<std::string> names);

 private:
  void check_relation(const Checkpoint& source) const;
  void check_not_read(const std::string& file) const;
  void check_existing() const;
  void check_replaceable() const;
  [[nodiscard]] bool is_replaceable(const std::string& name) const;
  // The existing directory that the first new name is made in.
  [[nodiscard]] std::string host() const;
  void make_staging(bool resume);
  void remove_staging() noexcept;
  void name_staged_files(const std::vector<std::string>& names) const;
  void publish_new(const std::vector<std::string>& names);
  void publish_by_exchange(std::vector<std::string> names);
  void remove_replaced();
  void publish_by_moves(std::vector<std::string> names);

  bool is_directory_;
  bool force_;
  std::string target_;                  // Canonical.
  std::vector<std::string> auxiliary_;  // Names of the source's other files.
  bool is_inside_ = false;              // Where the staging directory is.
  bool keeps_staging_ = false;
  std::string staging_;  // Empty before begin(), after commit(), and for files.
  LockedFile lock_;
};

}  // namespace narrowfloat
