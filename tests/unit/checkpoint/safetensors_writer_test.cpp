// Written files: complete or absent, the same bytes every time, and read back exactly.
#include <algorithm>
#include <filesystem>
#include <random>
#include <vector>

#include "narrowfloat/safetensors.h"
#include "test_files.h"

namespace narrowfloat {
namespace {

using Metadata = std::map<std::string, std::string>;

std::vector<std::byte> pattern(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xFFU);
  return bytes;
}

std::vector<TensorSpec> two_tensors() {
  return {{"w", DType::kBF16, {3, 2}}, {"s", DType::kU8, {5}}};
}

void write_two(SafetensorsWriter& writer) {
  writer.write("w", 0, pattern(12, 1));
  writer.write("s", 0, pattern(5, 2));
}

TEST(SafetensorsWriter, RoundTripsEveryDType) {
  const TempDir dir;
  std::vector<TensorSpec> specs;
  for (int type = 0; type < kNumDTypes; ++type) {
    const auto dtype = static_cast<DType>(type);
    specs.push_back({std::string(name(dtype)), dtype, {3, 4}});
  }
  specs.push_back({"scalar", DType::kF32, {}});
  specs.push_back({"empty", DType::kF16, {0, 9}});
  const Metadata metadata = {{"format", "pt"}, {"key \"1\"", "line\nbreak"}};
  SafetensorsWriter writer(dir / "t.safetensors", specs, metadata);
  const auto size_of = [](const TensorSpec& spec) {
    size_t elements = 1;
    for (const int64_t extent : spec.shape) elements *= static_cast<size_t>(extent);
    return elements * static_cast<size_t>(bits(spec.dtype)) / 8;
  };
  for (unsigned i = 0; i < specs.size(); ++i) {
    writer.write(specs[i].name, 0, pattern(size_of(specs[i]), i));
  }
  writer.commit();

  const SafetensorsReader reader(dir / "t.safetensors");
  EXPECT_EQ(reader.metadata(), metadata);
  EXPECT_EQ(reader.file_size(), writer.file_size());
  ASSERT_EQ(reader.tensors().size(), specs.size());
  for (unsigned i = 0; i < specs.size(); ++i) {
    const TensorInfo* tensor = reader.find(specs[i].name);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->dtype, specs[i].dtype);
    EXPECT_EQ(tensor->shape, specs[i].shape);
    std::vector<std::byte> bytes(tensor->size_bytes);
    reader.read(*tensor, 0, bytes);
    EXPECT_EQ(bytes, pattern(size_of(specs[i]), i)) << specs[i].name;
  }
}

TEST(SafetensorsWriter, MakesThePathAppearOnlyAtCommit) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  SafetensorsWriter writer(path, two_tensors(), {});
  write_two(writer);
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_TRUE(std::filesystem::exists(path + ".narrowfloat.partial"));
  writer.commit();
  EXPECT_EQ(std::filesystem::file_size(path), writer.file_size());
  EXPECT_FALSE(std::filesystem::exists(path + ".narrowfloat.partial"));
}

TEST(SafetensorsWriter, LeavesTheOldFileAndNoPartialWhenAbandoned) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  write_file(path, "old");
  {
    SafetensorsWriter writer(path, two_tensors(), {});
    write_two(writer);
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_FALSE(std::filesystem::exists(path + ".narrowfloat.partial"));
}

TEST(SafetensorsWriter, ItsPartialFileDoesNotLoad) {
  const TempDir dir;
  SafetensorsWriter writer(dir / "t.safetensors", two_tensors(), {});
  write_two(writer);
  expect_error(ErrorKind::kCorruptData, "must start with",
               [&] { const SafetensorsReader reader(dir / "t.safetensors.narrowfloat.partial"); });
}

TEST(SafetensorsWriter, RefusesToCommitWhileBytesAreMissing) {
  const TempDir dir;
  SafetensorsWriter writer(dir / "t.safetensors", two_tensors(), {});
  expect_error(ErrorKind::kInvalidArgument, "tensor 'w' was not written from byte 0 of 12",
               [&] { writer.commit(); });
  writer.write("w", 0, pattern(7, 1));
  writer.write("w", 8, pattern(4, 1));
  writer.write("s", 0, pattern(5, 1));
  expect_error(ErrorKind::kInvalidArgument, "tensor 'w' was not written from byte 7 of 12",
               [&] { writer.commit(); });
  EXPECT_FALSE(std::filesystem::exists(dir / "t.safetensors"));
  writer.write("w", 7, pattern(1, 1));
  EXPECT_NO_THROW(writer.commit());
}

TEST(SafetensorsWriter, GivesTheSameBytesForAnyOrderOfTensorsAndRanges) {
  const TempDir dir;
  std::vector<TensorSpec> specs = two_tensors();
  SafetensorsWriter straight(dir / "a.safetensors", specs, {{"k", "v"}});
  write_two(straight);
  straight.commit();
  std::reverse(specs.begin(), specs.end());
  SafetensorsWriter scattered(dir / "b.safetensors", specs, {{"k", "v"}});
  const std::vector<std::byte> weight = pattern(12, 1);
  const std::vector<std::byte> scale = pattern(5, 2);
  for (const size_t at : {4U, 0U, 3U, 1U, 2U}) {
    scattered.write("s", at, std::span(scale).subspan(at, 1));
  }
  for (const size_t at : {8U, 0U, 4U}) scattered.write("w", at, std::span(weight).subspan(at, 4));
  scattered.commit();
  EXPECT_EQ(read_file(dir / "a.safetensors"), read_file(dir / "b.safetensors"));
}

TEST(SafetensorsWriter, RefusesWritesThatWereNotAnnounced) {
  const TempDir dir;
  SafetensorsWriter writer(dir / "t.safetensors", two_tensors(), {});
  expect_error(ErrorKind::kInvalidArgument, "no tensor 'x' was announced",
               [&] { writer.write("x", 0, pattern(1, 1)); });
  for (const uint64_t begin : {uint64_t{5}, uint64_t{6}, ~uint64_t{0}}) {
    expect_error(ErrorKind::kInvalidArgument, "are outside",
                 [&] { writer.write("s", begin, pattern(1, 1)); });
  }
  write_two(writer);
  writer.commit();
  expect_error(ErrorKind::kInvalidArgument, "committed already",
               [&] { writer.write("s", 0, pattern(5, 2)); });
  expect_error(ErrorKind::kInvalidArgument, "committed already", [&] { writer.commit(); });
}

TEST(SafetensorsWriter, ReplacesAStalePartialFile) {
  const TempDir dir;
  write_file(dir / "t.safetensors.narrowfloat.partial", std::string(100'000, 'x'));
  SafetensorsWriter writer(dir / "t.safetensors", two_tensors(), {});
  write_two(writer);
  writer.commit();
  EXPECT_EQ(SafetensorsReader(dir / "t.safetensors").tensors().size(), 2U);
}

TEST(SafetensorsWriter, RefusesATensorThatDoesNotFitOnTheDisk) {
  const TempDir dir;
  expect_error(ErrorKind::kIo, "are free on the disk", [&] {
    const SafetensorsWriter writer(dir / "t.safetensors", {{"t", DType::kU8, {int64_t{1} << 58}}},
                                   {});
  });
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(SafetensorsWriter, RefusesBadSpecsBeforeItTouchesTheDisk) {
  const TempDir dir;
  expect_error(ErrorKind::kInvalidArgument, "two tensors are named 'a'", [&] {
    const SafetensorsWriter writer(dir / "t.safetensors",
                                   {{"a", DType::kU8, {1}}, {"a", DType::kU8, {1}}}, {});
  });
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(SafetensorsWriter, WritesAFileWithoutTensors) {
  const TempDir dir;
  SafetensorsWriter writer(dir / "t.safetensors", {}, {});
  writer.commit();
  EXPECT_EQ(read_file(dir / "t.safetensors").size(), 4096U);
  EXPECT_TRUE(SafetensorsReader(dir / "t.safetensors").tensors().empty());
}

TEST(SafetensorsWriter, MovesWithItsPartialFile) {
  const TempDir dir;
  SafetensorsWriter first(dir / "a.safetensors", two_tensors(), {});
  SafetensorsWriter second(std::move(first));
  SafetensorsWriter third(dir / "b.safetensors", two_tensors(), {});
  third = std::move(second);
  EXPECT_FALSE(std::filesystem::exists(dir / "b.safetensors.narrowfloat.partial"));
  write_two(third);
  third.commit();
  EXPECT_TRUE(std::filesystem::exists(dir / "a.safetensors"));
}

}  // namespace
}  // namespace narrowfloat
