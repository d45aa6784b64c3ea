// Where a checkpoint may be written, and that nothing else is touched.
#include "layers/checkpoint_target.h"

#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

class CheckpointTargetTest : public testing::Test {
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
  expect_refused(dir_ / "old", "exists and is not empty; use force");
  fs::create_directory(dir_ / "empty");
  EXPECT_NO_THROW(CheckpointTarget(Checkpoint(source_), dir_ / "empty", false));
}

TEST_F(CheckpointTargetTest, ForceReplacesCheckpointsOnly) {
  write_model(dir_ / "old", tiny_model());
  EXPECT_NO_THROW(CheckpointTarget(Checkpoint(source_), dir_ / "old", true));
  fs::create_directory(dir_ / "photos");
  write_file(dir_ / "photos/cat.jpg", "x");
  expect_refused(dir_ / "photos", "holds no .safetensors file, so it is not replaced", true);
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
  CheckpointTarget target(Checkpoint(source_), dir_ / "old", true);
  target.begin(0);
  write_file(target.file_path("new.txt"), "x");
  target.commit();
  EXPECT_EQ(names_in(dir_ / "old"), std::vector<std::string>{"new.txt"});
  EXPECT_EQ(names_in(dir_.path()), (std::vector<std::string>{"model", "old"}));
}

TEST_F(CheckpointTargetTest, LeftoversOfAKilledRunAreNotInTheWay) {
  fs::create_directory(dir_ / "out.partial-1");
  CheckpointTarget target(Checkpoint(source_), dir_ / "out", false);
  target.begin(0);
  target.commit();
  EXPECT_TRUE(fs::exists(dir_ / "out"));
  EXPECT_TRUE(fs::exists(dir_ / "out.partial-1"));
}

}  // namespace
}  // namespace narrowfloat
