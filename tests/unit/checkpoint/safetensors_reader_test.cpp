// The reader against the file system and against damaged files: special files, truncation at every
// byte and while open, bit flips, odd alignments, and time that grows with the size of the header.
#include <chrono>
#include <fcntl.h>
#include <filesystem>
#include <numeric>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <fmt/format.h>

#include "narrowfloat/safetensors.h"
#include "test_files.h"

namespace narrowfloat {
namespace {

std::string small_file() {
  return safetensors_bytes(
      object({R"("__metadata__":{"format":"pt"})", entry("w", "BF16", "2,3", "0,12"),
              entry("s", "F8_E4M3", "5", "12,17"), entry("e", "F32", "0,7", "17,17")}),
      17);
}

std::vector<std::byte> read_all(const SafetensorsReader& reader, std::string_view name) {
  const TensorInfo* tensor = reader.find(name);
  if (tensor == nullptr) throw std::out_of_range("no such tensor");
  std::vector<std::byte> bytes(tensor->size_bytes);
  reader.read(*tensor, 0, bytes);
  return bytes;
}

TEST(SafetensorsReader, FindsTensorsMetadataAndBytes) {
  const TempDir dir;
  write_file(dir / "t.safetensors", small_file());
  const SafetensorsReader reader(dir / "t.safetensors");
  EXPECT_EQ(reader.path(), dir / "t.safetensors");
  EXPECT_EQ(reader.file_size(), small_file().size());
  EXPECT_EQ(reader.header_size(), small_file().size() - 17);
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  EXPECT_TRUE(reader.warnings().empty());
  ASSERT_EQ(reader.tensors().size(), 3U);
  const TensorInfo* weight = reader.find("w");
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(weight->dtype, DType::kBF16);
  EXPECT_EQ(weight->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(weight->num_elements(), 6);
  EXPECT_EQ(reader.find("v"), nullptr);
  EXPECT_EQ(reader.find(""), nullptr);
  EXPECT_EQ(read_all(reader, "s")[4], std::byte{16});
  EXPECT_TRUE(read_all(reader, "e").empty());
  std::vector<std::byte> part(3);
  reader.read(*weight, 9, part);
  EXPECT_EQ(part[2], std::byte{11});
}

TEST(SafetensorsReader, RefusesRangesOutsideTheTensor) {
  const TempDir dir;
  write_file(dir / "t.safetensors", small_file());
  const SafetensorsReader reader(dir / "t.safetensors");
  const TensorInfo* weight = reader.find("w");
  std::vector<std::byte> bytes(12);
  EXPECT_NO_THROW(reader.read(*weight, 12, std::span(bytes).first(0)));
  for (const uint64_t begin : {uint64_t{1}, uint64_t{12}, uint64_t{13}, ~uint64_t{0}}) {
    expect_error(ErrorKind::kInvalidArgument, "tensor 'w' has 12 bytes; 12 bytes from byte",
                 [&] { reader.read(*weight, begin, bytes); });
  }
  TensorInfo foreign = *weight;
  for (const uint64_t offset : {uint64_t{0}, reader.file_size() - 11, ~uint64_t{0}}) {
    foreign.offset = offset;
    expect_error(ErrorKind::kInvalidArgument, "is not one of this file",
                 [&] { reader.read(foreign, 0, bytes); });
  }
}

TEST(SafetensorsReader, StaysOpenWhenCopiedAndReadsFromManyThreads) {
  const TempDir dir;
  write_file(dir / "t.safetensors", small_file());
  const auto copy = [&] { return SafetensorsReader(dir / "t.safetensors"); }();
  std::filesystem::remove(dir / "t.safetensors");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([copy] {
      for (int round = 0; round < 100; ++round) {
        EXPECT_EQ(read_all(copy, "w")[11], std::byte{11});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Reads before a change stand; whatever was read after it may be of two contents.
TEST(SafetensorsReader, NoticesThatTheFileWasWrittenToInPlace) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  for (const bool keep_open : {true, false}) {
    write_file(path, small_file());
    const SafetensorsReader reader(path, {.keep_open = keep_open});
    EXPECT_NO_THROW(read_all(reader, "s"));
    // File systems tell times apart from a clock tick on, some 4 ms.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    ASSERT_EQ(::pwrite(fd, "x", 1, static_cast<off_t>(small_file().size()) - 1), 1);
    ::close(fd);
    expect_error(ErrorKind::kIo, "written to", [&] { read_all(reader, "s"); });
  }
}

TEST(SafetensorsReader, OpensTheSameFileForEachReadWhereNoneIsKeptOpen) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  write_file(path, small_file());
  const SafetensorsReader reader(path, {.keep_open = false});
  EXPECT_EQ(read_all(reader, "s"), read_all(SafetensorsReader(path), "s"));
  std::filesystem::rename(path, dir / "old");
  write_file(path, small_file());
  expect_error(ErrorKind::kIo, "replaced by another file", [&] { read_all(reader, "s"); });
}

TEST(SafetensorsReader, RefusesSpecialFilesAndFollowsLinks) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo((dir / "fifo.safetensors").c_str(), 0600), 0);
  expect_error(ErrorKind::kIo, "device, pipe or socket",
               [&] { const SafetensorsReader reader(dir / "fifo.safetensors"); });
  expect_error(ErrorKind::kIo, "is a directory",
               [&] { const SafetensorsReader reader(dir.path()); });
  expect_error(ErrorKind::kIo, "device, pipe or socket",
               [] { const SafetensorsReader reader("/dev/zero"); });
  expect_error(ErrorKind::kIo, "No such file",
               [&] { const SafetensorsReader reader(dir / "missing.safetensors"); });
  write_file(dir / "blob", small_file());
  std::filesystem::create_symlink(dir / "blob", dir / "link.safetensors");
  EXPECT_EQ(SafetensorsReader(dir / "link.safetensors").tensors().size(), 3U);
}

TEST(SafetensorsReader, RefusesPickleAndGgufFilesByName) {
  const TempDir dir;
  for (const char* name : {"m.bin", "m.pt", "m.pth", "m.ckpt", "M.BIN"}) {
    write_file(dir / name, small_file());
    expect_error(ErrorKind::kInvalidArgument, "can run code when it is loaded",
                 [&] { const SafetensorsReader reader(dir / name); });
  }
  write_file(dir / "m.gguf", small_file());
  expect_error(ErrorKind::kInvalidArgument, "a GGUF file",
               [&] { const SafetensorsReader reader(dir / "m.gguf"); });
}

TEST(SafetensorsReader, RefusesAFileCutAtAnyByte) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  const std::string whole = small_file();
  for (size_t size = 0; size < whole.size(); ++size) {
    write_file(path, whole.substr(0, size));
    expect_error(ErrorKind::kCorruptData, "t.safetensors",
                 [&] { const SafetensorsReader reader(path); });
  }
}

TEST(SafetensorsReader, SurvivesEveryBitFlipInTheHeader) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  const std::string whole = small_file();
  size_t num_refused = 0;
  for (size_t bit = 0; bit < 8 * (whole.size() - 17); ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    write_file(path, flipped);
    try {
      const SafetensorsReader reader(path);
      for (const TensorInfo& tensor : reader.tensors()) {
        std::vector<std::byte> bytes(tensor.size_bytes);
        reader.read(tensor, 0, bytes);
      }
    } catch (const Error& error) {
      EXPECT_EQ(to_string(error.kind()), "corrupt data") << error.what();
      ++num_refused;
    }
  }
  // Most flips break a rule; those inside names and metadata cannot be noticed.
  EXPECT_GT(num_refused, 4 * whole.size());
}

TEST(SafetensorsReader, ReportsAFileThatWasCutSinceItWasOpened) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  write_file(path, small_file());
  const SafetensorsReader reader(path);
  ASSERT_EQ(::truncate(path.c_str(), 20), 0);
  expect_error(ErrorKind::kIo, "since it was opened", [&] { read_all(reader, "w"); });
}

TEST(SafetensorsReader, NeverCrashesWhileAnotherThreadTruncates) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  const size_t data_bytes = size_t{1} << 20;
  const std::string whole =
      safetensors_bytes(object({entry("t", "U8", "1048576", "0,1048576")}), data_bytes);
  for (int round = 0; round < 20; ++round) {
    write_file(path, whole);
    const SafetensorsReader reader(path);
    std::thread cutter([&] { EXPECT_EQ(::truncate(path.c_str(), 5000), 0); });
    try {
      for (int i = 0; i < 1000; ++i) read_all(reader, "t");
      ADD_FAILURE() << "the cut was never noticed";
    } catch (const Error& error) {
      EXPECT_EQ(to_string(error.kind()), "I/O error");
    }
    cutter.join();
  }
}

TEST(SafetensorsReader, AcceptsBuffersAtOddAddresses) {
  const TempDir dir;
  for (size_t padding = 0; padding < 16; ++padding) {
    const std::string header =
        object({entry("u", "U8", "3", "0,3"), entry("f", "F64", "1", "3,11")}) +
        std::string(padding, ' ');
    write_file(dir / "t.safetensors", safetensors_bytes(header, 11));
    const SafetensorsReader reader(dir / "t.safetensors");
    EXPECT_EQ(read_all(reader, "f")[7], std::byte{10});
  }
}

TEST(SafetensorsReader, AcceptsAnEmptyFileOfTensors) {
  const TempDir dir;
  for (const char* header : {"{}", "{}        ", R"({"__metadata__":{}})"}) {
    write_file(dir / "t.safetensors", safetensors_bytes(header));
    EXPECT_TRUE(SafetensorsReader(dir / "t.safetensors").tensors().empty());
  }
}

// Guards against quadratic time: each takes a fraction of a second, and minutes if it were.
TEST(SafetensorsReader, Opens200000TensorsInLinearTime) {
  const TempDir dir;
  std::vector<std::string> entries;
  for (size_t i = 0; i < 200'000; ++i) {
    entries.push_back(entry(fmt::format("model.layers.{}", i), "U8", "1", pair_text(i, i + 1)));
  }
  write_file(dir / "t.safetensors", safetensors_bytes(object(entries), 200'000));
  const auto start = std::chrono::steady_clock::now();
  const SafetensorsReader reader(dir / "t.safetensors");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_EQ(reader.tensors().size(), 200'000U);
  ASSERT_NE(reader.find("model.layers.123456"), nullptr);
  EXPECT_EQ(reader.find("model.layers.123456")->offset, reader.header_size() + 123'456);
}

TEST(SafetensorsReader, Opens90MegabytesOfPaddingInLinearTime) {
  const TempDir dir;
  write_file(dir / "t.safetensors", safetensors_bytes("{}" + std::string(90'000'000, ' ')));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(SafetensorsReader(dir / "t.safetensors").tensors().empty());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace narrowfloat
