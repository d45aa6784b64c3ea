// Where a rewritten checkpoint goes, so that nothing half-written ever loads.
//
// A single file is atomic by itself. A directory is filled under the name TARGET.partial-N beside
// it and renamed at the end; with `force`, what was there is renamed to TARGET.partial-N.old first
// and removed last. A kill can leave one of those two, never a mixture at the target.
#pragma once

#include <string>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

class CheckpointTarget {
 public:
  // Throws kInvalidArgument for a target that is the source, inside it or around it, that is of the
  // other kind (file, directory), or that exists without `force`. Writes nothing.
  CheckpointTarget(const Checkpoint& source, const std::string& target, bool force);
  CheckpointTarget(const CheckpointTarget&) = delete;
  CheckpointTarget& operator=(const CheckpointTarget&) = delete;
  // Removes everything unless it was committed.
  ~CheckpointTarget();

  [[nodiscard]] bool is_directory() const { return is_directory_; }

  // Checks the free space and makes the directory to write to.
  void begin(uint64_t bytes_needed);
  // Path of a file of the checkpoint; of the only one if it is a single file.
  [[nodiscard]] std::string file_path(const std::string& name) const;
  // Makes the directory appear at the target. Files must be complete and on disk.
  void commit();

 private:
  void check_relation(const Checkpoint& source) const;
  void check_existing(bool force) const;

  bool is_directory_;
  std::string target_;   // Canonical.
  std::string staging_;  // Empty before begin(), and for files.
};

}  // namespace narrowfloat
