// Opening, reading and atomically writing plain files.
#include "checkpoint/file_io.h"

#include <fcntl.h>
#include <filesystem>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "test_files.h"

namespace narrowfloat {
namespace {

TEST(ReadFileBounded, ReadsUpToTheLimit) {
  const TempDir dir;
  write_file(dir / "f", "12345");
  EXPECT_EQ(read_file_bounded(dir / "f", 5), "12345");
  expect_error(ErrorKind::kCorruptData, "has 5 bytes; the limit is 4",
               [&] { read_file_bounded(dir / "f", 4); });
}

TEST(OpenRegularFile, RefusesEverythingElseAtOnce) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo((dir / "fifo").c_str(), 0600), 0);
  std::filesystem::create_symlink(dir / "loop", dir / "loop");
  expect_error(ErrorKind::kIo, "is a directory", [&] { open_regular_file(dir.path()); });
  expect_error(ErrorKind::kIo, "device, pipe or socket", [&] { open_regular_file(dir / "fifo"); });
  expect_error(ErrorKind::kIo, "device, pipe or socket", [] { open_regular_file("/dev/zero"); });
  expect_error(ErrorKind::kIo, "cannot open", [&] { open_regular_file(dir / "missing"); });
  expect_error(ErrorKind::kIo, "cannot open", [&] { open_regular_file(dir / "loop"); });
}

TEST(OpenRegularFile, FollowsSymbolicLinks) {
  const TempDir dir;
  write_file(dir / "blob", "abc");
  std::filesystem::create_symlink(dir / "blob", dir / "link");
  EXPECT_EQ(open_regular_file(dir / "link").size, 3U);
}

// The kernel must have openat2, which tells: such a link may lead out of a container.
TEST(OpenRegularFile, RefusesMagicLinks) {
  const TempDir dir;
  write_file(dir / "blob", "abc");
  const OpenedFile file = open_regular_file(dir / "blob");
  const std::string magic = "/proc/self/fd/" + std::to_string(file.fd.get());
  open_how how{};
  how.flags = O_RDONLY;
  const long probe = ::syscall(SYS_openat2, AT_FDCWD, magic.c_str(), &how, sizeof(how));
  if (probe < 0) GTEST_SKIP() << "no openat2 here";
  ::close(static_cast<int>(probe));
  expect_error(ErrorKind::kIo, "cannot open", [&] { open_regular_file(magic); });
}

TEST(OpenRegularFile, NamesAreEscapedInMessages) {
  expect_error(ErrorKind::kIo, "no\\nsuch\\x1bfile", [] {
    open_regular_file(
        "no\nsuch\x1b"
        "file");
  });
}

TEST(WriteFileAtomically, ReplacesTheFileAndLeavesNothingElse) {
  const TempDir dir;
  write_file(dir / "f", "old content");
  write_file_atomically(dir / "f", "new");
  EXPECT_EQ(read_file(dir / "f"), "new");
  write_file_atomically(dir / "empty", "");
  EXPECT_EQ(read_file(dir / "empty"), "");
  const std::filesystem::directory_iterator begin(dir.path());
  EXPECT_EQ(std::distance(begin, std::filesystem::directory_iterator{}), 2);
}

TEST(WriteFileAtomically, RefusesATargetThatIsNoFile) {
  const TempDir dir;
  expect_error(ErrorKind::kIo, "not a regular file",
               [&] { write_file_atomically(dir.path(), "x"); });
  expect_error(ErrorKind::kIo, "cannot create",
               [&] { write_file_atomically(dir / "no" + "/file", "x"); });
}

TEST(JoinPath, PutsOneSeparatorBetween) {
  EXPECT_EQ(join_path("a", "b"), "a/b");
  EXPECT_EQ(join_path("a/", "b"), "a/b");
}

}  // namespace
}  // namespace narrowfloat
