// The destination of a rewritten checkpoint. Nothing half-written ever loads.
//
// A single file is atomic by itself. A directory is staged: every file is written under a name that
// no loader knows (NAME.staged), in a directory that is locked while the run lives. A run removes
// the staging directory of a dead run with the same target.
//
//   target does not exist:  staged in TARGET.partial-N beside it, which is renamed to TARGET;
//   it does (empty, force): staged in TARGET/.narrowfloat.partial, as it may be a mount point.
//
// Order of renames: the old weights leave first and the old index last; the new index and configs
// come first and the new weights last. An index whose shards are missing does not load, so after a
// crash TARGET exists and has the old checkpoint, none, or the new one, never a mixture.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/file_io.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

class CheckpointTarget {
 public:
  // Throws kInvalidArgument for a target that is the source, inside it or around it, that is of the
  // other kind (file, directory), that exists without `force`, or that holds with `force` anything
  // but a checkpoint and files of the names that the source has. Writes nothing.
  CheckpointTarget(const Checkpoint& source, const std::string& target, bool force);
  CheckpointTarget(const CheckpointTarget&) = delete;
  CheckpointTarget& operator=(const CheckpointTarget&) = delete;
  // Removes everything unless it was committed.
  ~CheckpointTarget();

  [[nodiscard]] bool is_directory() const { return is_directory_; }

  // Throws kIo if the file system that will hold the target is not writable or too full.
  void check_room(uint64_t bytes_needed) const;
  // Checks the room and makes the directory to write to. Throws kIo if another run has it.
  void begin(uint64_t bytes_needed);
  // Path to write a file of the checkpoint to; the target itself if it is a single file.
  [[nodiscard]] std::string file_path(const std::string& name) const;
  // Makes the files appear at the target. They must be complete and on disk.
  void commit();

 private:
  void check_relation(const Checkpoint& source) const;
  void check_existing() const;
  void check_replaceable() const;
  [[nodiscard]] bool is_replaceable(const std::string& name) const;
  // The existing directory that the first new name is made in.
  [[nodiscard]] std::string host() const;
  void make_staging();
  bool try_staging(const std::string& path);
  void commit_in_place();

  bool is_directory_;
  bool force_;
  bool exists_ = false;
  std::string target_;                  // Canonical.
  std::vector<std::string> auxiliary_;  // Names of the source's other files.
  std::string staging_;                 // Empty before begin(), and for files.
  FileDescriptor lock_;
};

}  // namespace narrowfloat
