// The places at which a checkpoint may be written, and that nothing else is touched.
#include "layers/checkpoint_target.h"

#include <csignal>
#include <sys/wait.h>
#include <unistd.h>

#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

class CheckpointTargetTest : public ::testing::Test {
 protected:
  void SetUp() override { write_model(source_, tiny_model()); }

  void expect_refused(const std::string& target, std::string_view part, bool force = false) {
    expect_error(ErrorKind::kInvalidArgument, part,
                 [&] { CheckpointTarget refused(Checkpoint(source_), target, force); });
  }

  TempDir dir_;
  const std::string source_ = dir_ / "model";
};

TEST_F(CheckpointTargetTest, RefusesTheSourceAndItsSurroundings) {
  for (const bool force : {false, true}) {
    expect_refused(source_, "is the source", force);
    expect_refused(source_ + "/", "is the source", force);
    expect_refused(source_ + "/../model/.", "is the source", force);
    expect_refused(source_ + "/out", "is inside the source", force);
    expect_refused(dir_.path(), "contains the source", force);
  }
}

TEST_F(CheckpointTargetTest, SeesThroughLinks) {
  fs::create_directory_symlink(source_, dir_ / "link");
  expect_refused(dir_ / "link", "is the source", true);
  fs::create_directory(dir_ / "hub");
  fs::rename(source_ + "/model.safetensors", dir_ / "hub/blob.safetensors");
  fs::create_symlink(dir_ / "hub/blob.safetensors", source_ + "/model.safetensors");
  expect_refused(dir_ / "hub", "holds a file of the source", true);
}

TEST_F(CheckpointTargetTest, SeesThroughHardLinks) {
  fs::create_directory(dir_ / "twin");
  fs::create_hard_link(source_ + "/model.safetensors", dir_ / "twin/model.safetensors");
  expect_refused(dir_ / "twin", "holds a file of the source", true);
  const std::string file = dir_ / "one.safetensors";
  write_model_file(file, tiny_model());
  fs::create_hard_link(file, dir_ / "same.safetensors");
  expect_error(ErrorKind::kInvalidArgument, "is the source", [&] {
    CheckpointTarget refused(Checkpoint(file), dir_ / "same.safetensors", true);
  });
}

TEST_F(CheckpointTargetTest, RefusesToReplaceAnotherFileThatIsRead) {
  write_model(dir_ / "old", tiny_model());
  write_model_file(dir_ / "old/statistics.safetensors", tiny_model());
  fs::create_hard_link(dir_ / "old/statistics.safetensors", dir_ / "twin.safetensors");
  write_model_file(dir_ / "one.safetensors", tiny_model());
  const std::vector<std::string> read = {dir_ / "old/statistics.safetensors"};
  expect_error(ErrorKind::kInvalidArgument, "old' holds the file '",
               [&] { CheckpointTarget refused(Checkpoint(source_), dir_ / "old", true, read); });
  expect_error(ErrorKind::kInvalidArgument, "twin.safetensors' is the file '", [&] {
    CheckpointTarget refused(Checkpoint(dir_ / "one.safetensors"), dir_ / "twin.safetensors", true,
                             read);
  });
}

TEST_F(CheckpointTargetTest, RefusesTheOtherKind) {
  expect_refused(dir_ / "out.safetensors", "the source is a directory, so");
  write_file(dir_ / "file", "x");
  expect_refused(dir_ / "file", "must be a directory", true);
  write_model_file(dir_ / "one.safetensors", tiny_model());
  expect_error(ErrorKind::kInvalidArgument, "must be a file named *.safetensors", [&] {
    CheckpointTarget refused(Checkpoint(dir_ / "one.safetensors"), dir_ / "out", false);
  });
}

TEST_F(CheckpointTargetTest, RefusesWhatExistsWithoutForce) {
  write_model(dir_ / "old", tiny_model());
  expect_refused(dir_ / "old", "exists and is not empty; use option force");
  fs::create_directory(dir_ / "empty");
  EXPECT_NO_THROW(CheckpointTarget(Checkpoint(source_), dir_ / "empty", false));
}

TEST_F(CheckpointTargetTest, ForceReplacesCheckpointsOnly) {
  write_model(dir_ / "old", tiny_model());
  EXPECT_NO_THROW(CheckpointTarget(Checkpoint(source_), dir_ / "old", true));
  fs::create_directory(dir_ / "config");
  write_file(dir_ / "config/config.json", "{}");
  expect_refused(dir_ / "config", "holds no .safetensors file, so it is not replaced", true);
}

TEST_F(CheckpointTargetTest, ForceDeletesNothingElse) {
  write_model(dir_ / "old", tiny_model());
  write_file(dir_ / "old/notes.txt", "x");
  expect_refused(dir_ / "old", "holds 'notes.txt', which is not part of a checkpoint", true);
  fs::remove(dir_ / "old/notes.txt");
  fs::create_directory(dir_ / "old/.git");
  expect_refused(dir_ / "old", "holds '.git', which is not part of a checkpoint", true);
  fs::remove(dir_ / "old/.git");
  fs::create_directory(dir_ / "old/deep.safetensors");
  expect_refused(dir_ / "old", "holds 'deep.safetensors'", true);
  fs::remove(dir_ / "old/deep.safetensors");
  EXPECT_NO_THROW(CheckpointTarget(Checkpoint(source_), dir_ / "old", true));
}

TEST_F(CheckpointTargetTest, RefusesAMissingParent) {
  expect_error(ErrorKind::kIo, "no such directory; create it first",
               [&] { CheckpointTarget(Checkpoint(source_), dir_ / "a/b", false); });
}

TEST_F(CheckpointTargetTest, RefusesADiskThatIsTooSmall) {
  CheckpointTarget target(Checkpoint(source_), dir_ / "out", false);
  expect_error(ErrorKind::kIo, "bytes are needed", [&] { target.begin(uint64_t{1} << 62); });
  EXPECT_EQ(names_in(dir_.path()), std::vector<std::string>{"model"});
}

TEST_F(CheckpointTargetTest, NothingAppearsBeforeTheCommit) {
  {
    CheckpointTarget target(Checkpoint(source_), dir_ / "out", false);
    target.begin(0);
    write_file(target.file_path("model.safetensors"), "x");
    EXPECT_FALSE(fs::exists(dir_ / "out"));
  }
  EXPECT_EQ(names_in(dir_.path()), std::vector<std::string>{"model"});
}

TEST_F(CheckpointTargetTest, CommitReplacesTheWholeDirectory) {
  write_model(dir_ / "old", tiny_model());
  write_file(dir_ / "old/hf_quant_config.json", "{}");
  fs::permissions(dir_ / "old", fs::perms::owner_all | fs::perms::others_exec);
  CheckpointTarget target(Checkpoint(source_), dir_ / "old", true);
  target.begin(0);
  write_file(target.file_path("new.txt"), "x");
  write_file(target.file_path("unplanned.txt"), "x");
  target.commit({"new.txt"});
  EXPECT_EQ(names_in(dir_ / "old"), std::vector<std::string>{"new.txt"});
  EXPECT_EQ(names_in(dir_.path()), (std::vector<std::string>{"model", "old"}));
  EXPECT_EQ(fs::status(dir_ / "old").permissions(), fs::perms::owner_all | fs::perms::others_exec);
}

TEST_F(CheckpointTargetTest, ForceKeepsTheOldOneUntilTheCommit) {
  write_model(dir_ / "old", tiny_model());
  const std::vector<std::string> before = names_in(dir_ / "old");
  {
    CheckpointTarget target(Checkpoint(source_), dir_ / "old", true);
    target.begin(0);
    write_file(target.file_path("new.txt"), "x");
    EXPECT_NO_THROW(Checkpoint{dir_ / "old"});
  }
  EXPECT_EQ(names_in(dir_ / "old"), before);
}

TEST_F(CheckpointTargetTest, ACommitWithoutOneOfItsFilesChangesNothing) {
  write_model(dir_ / "old", tiny_model());
  const std::vector<std::string> before = names_in(dir_ / "old");
  {
    CheckpointTarget target(Checkpoint(source_), dir_ / "old", true);
    target.begin(0);
    write_file(target.file_path("a.txt"), "x");
    expect_error(ErrorKind::kIo, "b.txt.staged: is gone", [&] {
      target.commit({"a.txt", "b.txt"});
    });
  }
  EXPECT_EQ(names_in(dir_ / "old"), before);
  EXPECT_EQ(names_in(dir_.path()), (std::vector<std::string>{"model", "old"}));
}

TEST_F(CheckpointTargetTest, FilesThatCameSinceTheCheckAreNotReplaced) {
  write_model(dir_ / "old", tiny_model());
  CheckpointTarget target(Checkpoint(source_), dir_ / "old", true);
  target.begin(0);
  write_file(target.file_path("a.txt"), "x");
  write_file(dir_ / "old/notes.txt", "mine");
  expect_error(ErrorKind::kInvalidArgument, "holds 'notes.txt'", [&] { target.commit({"a.txt"}); });
  EXPECT_EQ(read_file(dir_ / "old/notes.txt"), "mine");
  EXPECT_NO_THROW(Checkpoint{dir_ / "old"});

  CheckpointTarget fresh(Checkpoint(source_), dir_ / "new", false);
  fresh.begin(0);
  write_file(fresh.file_path("a.txt"), "x");
  write_model(dir_ / "new", tiny_model());
  expect_error(ErrorKind::kInvalidArgument, "use option force", [&] { fresh.commit({"a.txt"}); });
  EXPECT_FALSE(fs::exists(dir_ / "new/a.txt"));
}

TEST_F(CheckpointTargetTest, AnEmptyDirectoryIsFilledAlsoThroughALink) {
  fs::create_directory(dir_ / "empty");
  fs::create_directory_symlink(dir_ / "empty", dir_ / "link");
  for (const char* name : {"empty", "link"}) {
    CheckpointTarget target(Checkpoint(source_), dir_ / name, false);
    target.begin(0);
    write_file(target.file_path("new.txt"), "x");
    target.commit({"new.txt"});
    EXPECT_EQ(names_in(dir_ / "empty"), std::vector<std::string>{"new.txt"});
    EXPECT_EQ(names_in(dir_.path()), (std::vector<std::string>{"empty", "link", "model"}));
    fs::remove(dir_ / "empty/new.txt");
  }
}

TEST_F(CheckpointTargetTest, RefusesADanglingLink) {
  fs::create_symlink(dir_ / "nowhere", dir_ / "link");
  expect_refused(dir_ / "link", "is a link that leads nowhere");
  expect_refused(dir_ / "link", "is a link that leads nowhere", true);
}

// Runs `body`, which must not return, in a process of its own.
template <typename Body>
void run_and_kill(Body body) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    body();
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
}

TEST_F(CheckpointTargetTest, WhatAKilledRunLeavesIsNoCheckpointAndIsRemoved) {
  fs::create_directory(dir_ / "empty");
  write_model(dir_ / "old", tiny_model());
  for (const std::string name : {"new", "empty", "old"}) {
    const std::string leftover = dir_ / (name + ".narrowfloat.partial");
    run_and_kill([&, target_path = dir_ / name] {
      CheckpointTarget target(Checkpoint(source_), target_path, true);
      target.begin(0);
      for (const char* shard : {"model-00001-of-00003", "model-00002-of-00003"}) {
        write_model_file(target.file_path(std::string(shard) + ".safetensors"), {});
      }
      raise(SIGKILL);
    });
    EXPECT_TRUE(fs::exists(leftover)) << name;
    EXPECT_THROW(Checkpoint{leftover}, Error) << name;
    CheckpointTarget target(Checkpoint(source_), dir_ / name, name == "old");
    target.begin(0);
    write_file(target.file_path("new.txt"), "x");
    target.commit({"new.txt"});
    EXPECT_EQ(names_in(dir_ / name), std::vector<std::string>{"new.txt"});
  }
  EXPECT_EQ(names_in(dir_.path()), (std::vector<std::string>{"empty", "model", "new", "old"}));
}

TEST_F(CheckpointTargetTest, ALiveRunIsNotDisturbed) {
  fs::create_directory(dir_ / "empty");
  for (const char* name : {"new", "empty"}) {
    CheckpointTarget first(Checkpoint(source_), dir_ / name, false);
    first.begin(0);
    CheckpointTarget second(Checkpoint(source_), dir_ / name, false);
    expect_error(ErrorKind::kIo, "another run is writing there", [&] { second.begin(0); });
    write_file(first.file_path("new.txt"), "x");
    EXPECT_NO_THROW(first.commit({"new.txt"}));
  }
}

TEST_F(CheckpointTargetTest, ADirectoryThatNoRunMadeIsNotRemoved) {
  const std::string other = dir_ / "out.narrowfloat.partial";
  fs::create_directory(other);
  write_file(other + "/notes.txt", "x");
  CheckpointTarget target(Checkpoint(source_), dir_ / "out", false);
  expect_error(ErrorKind::kIo, "is in the way", [&] { target.begin(0); });
  EXPECT_TRUE(fs::exists(other + "/notes.txt"));
  EXPECT_FALSE(fs::exists(dir_ / "out.narrowfloat.lock"));
}

TEST_F(CheckpointTargetTest, IncompleteSetsOfShardsDoNotOpen) {
  const std::string path = dir_ / "part";
  fs::create_directory(path);
  const auto write_shard = [&](const std::string& name) {
    write_model_file(path + "/" + name, {bf16_tensor(name, {2, 2})});
  };
  write_shard("model-00002-of-00003.safetensors");
  expect_error(ErrorKind::kCorruptData, "'model-00001-of-00003.safetensors' is missing",
               [&] { Checkpoint{path}; });
  write_shard("model-00001-of-00003.safetensors");
  expect_error(ErrorKind::kCorruptData, "'model-00003-of-00003.safetensors' is missing",
               [&] { Checkpoint{path}; });
  write_shard("model-00003-of-00003.safetensors");
  EXPECT_NO_THROW(Checkpoint{path});
  write_shard("other-00000-of-000002.safetensors");
  expect_error(ErrorKind::kCorruptData, "'other-00001-of-000002.safetensors' is missing",
               [&] { Checkpoint{path}; });
  write_shard("other-00001-of-000002.safetensors");
  write_shard("a-of-b.safetensors");
  EXPECT_NO_THROW(Checkpoint{path});
}

}  // namespace
}  // namespace narrowfloat
