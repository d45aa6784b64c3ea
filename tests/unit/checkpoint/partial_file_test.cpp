// The promise "complete or not at all", and what happens to other people's partial files.
#include "checkpoint/partial_file.h"

#include <filesystem>
#include <memory>

#include "test_files.h"

namespace narrowfloat {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST(PartialFile, IsInvisibleUntilPublished) {
  const TempDir dir;
  PartialFile file(dir / "f");
  file.reserve(3);
  file.write(0, bytes_of("abc"));
  file.sync();
  EXPECT_FALSE(std::filesystem::exists(dir / "f"));
  EXPECT_TRUE(std::filesystem::exists(dir / "f.narrowfloat.partial"));
  file.publish();
  EXPECT_EQ(read_file(dir / "f"), "abc");
  EXPECT_FALSE(std::filesystem::exists(dir / "f.narrowfloat.partial"));
}

TEST(PartialFile, AbandonedLeavesTheOldFileAndNoPartial) {
  const TempDir dir;
  write_file(dir / "f", "old");
  {
    PartialFile file(dir / "f");
    file.write(0, bytes_of("new"));
  }
  EXPECT_EQ(read_file(dir / "f"), "old");
  EXPECT_FALSE(std::filesystem::exists(dir / "f.narrowfloat.partial"));
}

TEST(PartialFile, ReplacesAStaleOne) {
  const TempDir dir;
  write_file(dir / "f.narrowfloat.partial", std::string(100, 'x'));
  PartialFile file(dir / "f");
  file.write(0, bytes_of("abc"));
  file.sync();
  file.publish();
  EXPECT_EQ(read_file(dir / "f"), "abc");
}

TEST(PartialFile, LeavesThePartialFilesOfOtherProgramsAlone) {
  const TempDir dir;
  write_file(dir / "f.partial", "a download");
  PartialFile file(dir / "f");
  file.write(0, bytes_of("abc"));
  file.sync();
  file.publish();
  EXPECT_EQ(read_file(dir / "f.partial"), "a download");
}

TEST(PartialFile, RefusesASecondWriterOfTheSameTarget) {
  const TempDir dir;
  const auto first = std::make_unique<PartialFile>(dir / "f");
  expect_error(ErrorKind::kIo, "another process is writing it", [&] { PartialFile(dir / "f"); });
  EXPECT_TRUE(std::filesystem::exists(dir / "f.narrowfloat.partial"));
}

TEST(PartialFile, NeitherPublishesNorRemovesAFileThatIsNotIts) {
  const TempDir dir;
  {
    PartialFile file(dir / "f");
    std::filesystem::remove(dir / "f.narrowfloat.partial");
    write_file(dir / "f.narrowfloat.partial", "of someone else");
    expect_error(ErrorKind::kIo, "replaced by another process", [&] { file.publish(); });
  }
  EXPECT_EQ(read_file(dir / "f.narrowfloat.partial"), "of someone else");
  EXPECT_FALSE(std::filesystem::exists(dir / "f"));
}

TEST(PartialFile, RefusesSomethingElseInItsPlace) {
  const TempDir dir;
  std::filesystem::create_directory(dir / "f.narrowfloat.partial");
  expect_error(ErrorKind::kIo, "in the way", [&] { PartialFile(dir / "f"); });
  write_file(dir / "victim", "untouched");
  std::filesystem::create_symlink(dir / "victim", dir / "g.narrowfloat.partial");
  expect_error(ErrorKind::kIo, "in the way", [&] { PartialFile(dir / "g"); });
  std::filesystem::create_hard_link(dir / "victim", dir / "h.narrowfloat.partial");
  expect_error(ErrorKind::kIo, "in the way", [&] { PartialFile(dir / "h"); });
  EXPECT_EQ(read_file(dir / "victim"), "untouched");
}

TEST(PartialFile, ReportsAFullDiskBeforeWriting) {
  const TempDir dir;
  PartialFile file(dir / "f");
  expect_error(ErrorKind::kIo, "are free on the disk", [&] { file.reserve(uint64_t{1} << 61); });
  expect_error(ErrorKind::kIo, "more than a file can hold",
               [&] { file.reserve(uint64_t{1} << 63); });
}

TEST(PartialFile, HasItsFinalSizeAfterReserve) {
  const TempDir dir;
  PartialFile file(dir / "f");
  file.reserve(10'000);
  EXPECT_EQ(std::filesystem::file_size(dir / "f.narrowfloat.partial"), 10'000U);
}

}  // namespace
}  // namespace narrowfloat
