// Who owns a file, and what happens to files whose owner is dead.
#include "checkpoint/locked_file.h"

#include <filesystem>

#include "test_files.h"

namespace narrowfloat {
namespace {

TEST(LockedFile, HasOneOwner) {
  const TempDir dir;
  const LockedFile owner(dir / "f", "taken");
  EXPECT_TRUE(owner.is_new());
  expect_error(ErrorKind::kIo, "taken", [&] { LockedFile(dir / "f", "taken"); });
  EXPECT_TRUE(owner.is_named());
}

TEST(LockedFile, TakesOverWhatADeadOwnerLeft) {
  const TempDir dir;
  write_file(dir / "f", "abc");
  const LockedFile owner(dir / "f", "taken");
  EXPECT_FALSE(owner.is_new());
  EXPECT_EQ(owner.initial_size(), 3U);
}

TEST(LockedFile, RemovesNoFileButItsOwn) {
  const TempDir dir;
  LockedFile owner(dir / "f", "taken");
  std::filesystem::remove(dir / "f");
  write_file(dir / "f", "of someone else");
  EXPECT_FALSE(owner.is_named());
  owner.unlink();
  EXPECT_TRUE(std::filesystem::exists(dir / "f"));
}

}  // namespace
}  // namespace narrowfloat
