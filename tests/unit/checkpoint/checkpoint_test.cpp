// Opening checkpoints: a file, a directory with one, several or indexed shards, and every way in
// which index, shards and other files can contradict each other.
#include "narrowfloat/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <sys/stat.h>
#include <vector>

#include "test_files.h"

namespace narrowfloat {
namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";

// A file with U8 tensors of one byte each.
std::string shard_of(const std::vector<std::string>& names) {
  std::vector<std::string> entries;
  for (size_t i = 0; i < names.size(); ++i) {
    entries.push_back(entry(names[i], "U8", "1", pair_text(i, i + 1)));
  }
  return safetensors_bytes(object(entries), names.size());
}

// Two shards, "1.safetensors" with a and b, "2.safetensors" with c, and an index.
void write_sharded(const TempDir& dir, std::string_view index_text) {
  write_file(dir / "1.safetensors", shard_of({"a", "b"}));
  write_file(dir / "2.safetensors", shard_of({"c"}));
  write_file(dir / kIndexName, index_text);
}

constexpr std::string_view kGoodIndex =
    R"({"metadata":{"total_size":3},)"
    R"("weight_map":{"a":"1.safetensors","b":"1.safetensors","c":"2.safetensors"}})";

bool has_warning(const Checkpoint& checkpoint, std::string_view part) {
  const std::vector<std::string>& warnings = checkpoint.warnings();
  return std::any_of(warnings.begin(), warnings.end(), [&](const std::string& warning) {
    return warning.find(part) != std::string::npos;
  });
}

std::vector<std::string> names_of(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) names.push_back(tensor.info.name);
  return names;
}

TEST(Checkpoint, OpensASingleFile) {
  const TempDir dir;
  write_file(dir / "m.safetensors", shard_of({"b", "a"}));
  write_file(dir / "config.json", "not even JSON");
  const Checkpoint checkpoint(dir / "m.safetensors");
  EXPECT_FALSE(checkpoint.is_directory());
  EXPECT_EQ(checkpoint.path(), dir / "m.safetensors");
  EXPECT_EQ(checkpoint.shards().size(), 1U);
  EXPECT_EQ(names_of(checkpoint), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(checkpoint.config_text(), "");
  EXPECT_TRUE(checkpoint.auxiliary_files().empty());
  std::byte value{};
  checkpoint.read(*checkpoint.find("a"), 0, std::span(&value, 1));
  EXPECT_EQ(value, std::byte{1});
  EXPECT_EQ(checkpoint.find("c"), nullptr);
}

TEST(Checkpoint, OpensADirectoryThroughItsIndex) {
  const TempDir dir;
  write_sharded(dir, kGoodIndex);
  const Checkpoint checkpoint(dir.path());
  EXPECT_TRUE(checkpoint.is_directory());
  EXPECT_EQ(checkpoint.shards().size(), 2U);
  EXPECT_EQ(names_of(checkpoint), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(checkpoint.find("c")->shard, 1U);
  EXPECT_TRUE(checkpoint.warnings().empty());
  std::byte value{};
  checkpoint.read(*checkpoint.find("b"), 0, std::span(&value, 1));
  EXPECT_EQ(value, std::byte{1});
  CheckpointTensor wrong = *checkpoint.find("b");
  wrong.shard = 2;
  expect_error(ErrorKind::kInvalidArgument, "is not one of this checkpoint",
               [&] { checkpoint.read(wrong, 0, std::span(&value, 1)); });
}

TEST(Checkpoint, FollowsLinksAsHubCachesMakeThem) {
  const TempDir blobs;
  const TempDir dir;
  write_file(blobs / "0a1b", shard_of({"a"}));
  write_file(blobs / "config", "{}");
  std::filesystem::create_symlink(blobs / "0a1b", dir / "model.safetensors");
  std::filesystem::create_symlink(blobs / "config", dir / "config.json");
  const Checkpoint checkpoint(dir.path());
  EXPECT_EQ(names_of(checkpoint), (std::vector<std::string>{"a"}));
  EXPECT_EQ(checkpoint.config_text(), "{}");
}

TEST(Checkpoint, TakesTheUnionWithoutAnIndexAndWarns) {
  const TempDir dir;
  write_file(dir / "1.safetensors", shard_of({"a", "b"}));
  EXPECT_TRUE(Checkpoint(dir.path()).warnings().empty());
  write_file(dir / "2.safetensors", shard_of({"c"}));
  const Checkpoint checkpoint(dir.path());
  EXPECT_EQ(names_of(checkpoint), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_TRUE(has_warning(checkpoint, "no index"));
  write_file(dir / "3.safetensors", shard_of({"b"}));
  expect_error(ErrorKind::kCorruptData, "tensor 'b' is in two files",
               [&] { const Checkpoint colliding(dir.path()); });
}

TEST(Checkpoint, RefusesADirectoryWithoutSafetensors) {
  const TempDir dir;
  expect_error(ErrorKind::kIo, "holds no .safetensors file",
               [&] { const Checkpoint checkpoint(dir.path()); });
  write_file(dir / "pytorch_model.bin", "x");
  expect_error(ErrorKind::kIo, "are not read: pytorch_model.bin",
               [&] { const Checkpoint checkpoint(dir.path()); });
  expect_error(ErrorKind::kIo, "No such file",
               [&] { const Checkpoint checkpoint(dir / "missing"); });
}

TEST(Checkpoint, RefusesTwoIndexesUnlessOneIsNamed) {
  const TempDir dir;
  write_sharded(dir, kGoodIndex);
  write_file(dir / "other.safetensors.index.json", R"({"weight_map":{"c":"2.safetensors"}})");
  expect_error(ErrorKind::kCorruptData, "more than one index: model.safetensors.index.json, other",
               [&] { const Checkpoint checkpoint(dir.path()); });
  const Checkpoint named(dir / "other.safetensors.index.json");
  EXPECT_EQ(names_of(named), (std::vector<std::string>{"c"}));
  EXPECT_EQ(named.path(), dir.path());
  EXPECT_TRUE(named.is_directory());
  EXPECT_TRUE(has_warning(named, "'1.safetensors' is not listed"));
}

struct RefusedIndexFile {
  std::string_view name;
  std::string_view index;
  ErrorKind kind;
  std::string_view part;
};

TEST(Checkpoint, RefusesAnIndexThatContradictsTheShards) {
  const std::vector<RefusedIndexFile> cases = {
      {"missing shard", R"({"weight_map":{"a":"1.safetensors","d":"3.safetensors"}})",
       ErrorKind::kIo, "3.safetensors: cannot open"},
      {"tensor in no file", R"({"weight_map":{"a":"1.safetensors","d":"1.safetensors"}})",
       ErrorKind::kCorruptData, "tensor 'd' is not in its file 1.safetensors"},
      {"tensor in another file", R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})",
       ErrorKind::kCorruptData, "tensor 'b' is not in its file 2.safetensors; it is in"},
      {"tensor in an unlisted file", R"({"weight_map":{"c":"1.safetensors"}})",
       ErrorKind::kCorruptData, "tensor 'c' is not in its file"},
      {"path", R"({"weight_map":{"a":"../1.safetensors"}})", ErrorKind::kCorruptData,
       "expected one plain file name"},
      {"pickle shard", R"({"weight_map":{"a":"x.bin"}})", ErrorKind::kInvalidArgument,
       "can run code"},
      {"directory", R"({"weight_map":{"a":"sub"}})", ErrorKind::kIo, "is a directory"},
      {"FIFO", R"({"weight_map":{"a":"fifo"}})", ErrorKind::kIo, "pipe"},
      {"device", R"({"weight_map":{"a":"zero"}})", ErrorKind::kIo, "device"},
      {"link loop", R"({"weight_map":{"a":"loop"}})", ErrorKind::kIo, "cannot open"},
      {"dangling link", R"({"weight_map":{"a":"dangling"}})", ErrorKind::kIo, "cannot open"},
      {"same file by hard link", R"({"weight_map":{"a":"1.safetensors","b":"hard"}})",
       ErrorKind::kCorruptData, "is in two files"},
      {"same file by symbolic link", R"({"weight_map":{"a":"1.safetensors","b":"soft"}})",
       ErrorKind::kCorruptData, "is in two files"},
      {"not safetensors", R"({"weight_map":{"a":"model.safetensors.index.json"}})",
       ErrorKind::kCorruptData, "over the limit"},
  };
  namespace fs = std::filesystem;
  for (const RefusedIndexFile& c : cases) {
    SCOPED_TRACE(c.name);
    const TempDir dir;
    write_sharded(dir, c.index);
    write_file(dir / "x.bin", "x");
    fs::create_directory(dir / "sub");
    ASSERT_EQ(::mkfifo((dir / "fifo").c_str(), 0600), 0);
    fs::create_symlink("/dev/zero", dir / "zero");
    fs::create_symlink(dir / "loop", dir / "loop");
    fs::create_symlink(dir / "nothing", dir / "dangling");
    fs::create_hard_link(dir / "1.safetensors", dir / "hard");
    fs::create_symlink(dir / "1.safetensors", dir / "soft");
    expect_error(c.kind, c.part, [&] { const Checkpoint checkpoint(dir.path()); });
  }
}

TEST(Checkpoint, RefusesAListedTensorThatAnotherListedFileRepeats) {
  const TempDir dir;
  write_sharded(dir, kGoodIndex);
  write_file(dir / "2.safetensors", shard_of({"c", "a"}));
  expect_error(ErrorKind::kCorruptData, "tensor 'a' is in two files",
               [&] { const Checkpoint checkpoint(dir.path()); });
}

TEST(Checkpoint, WarnsOfWhatTheIndexLeavesOut) {
  const TempDir dir;
  write_sharded(dir, R"({"metadata":{"total_size":2},"weight_map":{"a":"1.safetensors"}})");
  write_file(dir / "0.safetensors", "not even safetensors");
  const Checkpoint checkpoint(dir.path());
  EXPECT_EQ(names_of(checkpoint), (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(has_warning(checkpoint, "1 tensor(s) are not listed in the index: 'b'"));
  EXPECT_TRUE(has_warning(checkpoint, "'2.safetensors' is not listed"));
  EXPECT_TRUE(has_warning(checkpoint, "'0.safetensors' is not listed"));
  EXPECT_FALSE(has_warning(checkpoint, "total_size"));
}

TEST(Checkpoint, WarnsOfAWrongTotalSize) {
  const TempDir dir;
  write_sharded(dir, R"({"metadata":{"total_size":4},)"
                     R"("weight_map":{"a":"1.safetensors","c":"2.safetensors"}})");
  EXPECT_TRUE(has_warning(Checkpoint(dir.path()), "'total_size' is 4, but the tensors have 3"));
}

TEST(Checkpoint, RefusesADamagedShardByName) {
  const TempDir dir;
  write_sharded(dir, kGoodIndex);
  write_file(dir / "2.safetensors", shard_of({"c"}).substr(0, 30));
  expect_error(ErrorKind::kCorruptData, "2.safetensors: header length",
               [&] { const Checkpoint checkpoint(dir.path()); });
}

TEST(Checkpoint, RefusesADanglingShardOrConfigInsteadOfIgnoringIt) {
  const TempDir dir;
  write_file(dir / "1.safetensors", shard_of({"a"}));
  std::filesystem::create_symlink(dir / "nothing", dir / "config.json");
  expect_error(ErrorKind::kIo, "config.json: cannot open",
               [&] { const Checkpoint checkpoint(dir.path()); });
  std::filesystem::remove(dir / "config.json");
  std::filesystem::create_symlink(dir / "nothing", dir / "2.safetensors");
  expect_error(ErrorKind::kIo, "2.safetensors: cannot open",
               [&] { const Checkpoint checkpoint(dir.path()); });
}

TEST(Checkpoint, BoundsAnIndexBeforeReadingIt) {
  const TempDir dir;
  write_sharded(dir, kGoodIndex);
  std::filesystem::resize_file(dir / kIndexName, 100'000'001);
  expect_error(ErrorKind::kCorruptData, "has 100000001 bytes; the limit is 100000000",
               [&] { const Checkpoint checkpoint(dir.path()); });
}

TEST(Checkpoint, ListsOtherFilesButNoCachesIndexesShardsOrPickles) {
  const TempDir dir;
  write_sharded(dir, kGoodIndex);
  for (const char* name :
       {"tokenizer.json", "LICENSE", "modeling.py", "hf_quant_config.json", ".hidden",
        ".gitattributes", "old.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json",
        "x.safetensors.partial", "config.json.partial"}) {
    write_file(dir / name, "x");
  }
  write_file(dir / "config.json", "{\"model_type\": \"tiny\"}\n");
  std::filesystem::create_directory(dir / "__pycache__");
  std::filesystem::create_directory(dir / ".cache");
  const Checkpoint checkpoint(dir.path());
  EXPECT_EQ(checkpoint.auxiliary_files(),
            (std::vector<std::string>{"LICENSE", "hf_quant_config.json", "modeling.py",
                                      "tokenizer.json"}));
  EXPECT_EQ(checkpoint.config_text(), "{\"model_type\": \"tiny\"}\n");
  EXPECT_TRUE(has_warning(checkpoint, "pytorch_model.bin"));
}

TEST(Checkpoint, RefusesAConfigThatIsNoStrictJsonObject) {
  const TempDir dir;
  write_file(dir / "model.safetensors", shard_of({"a"}));
  for (const char* config : {"", "[]", "{", "{\"a\":1,\"a\":2}", "{\"a\":NaN}", "{} //"}) {
    write_file(dir / "config.json", config);
    expect_error(ErrorKind::kCorruptData,
                 "config.json: ", [&] { const Checkpoint checkpoint(dir.path()); });
  }
  write_file(dir / "config.json", "{}");
  std::filesystem::resize_file(dir / "config.json", (16 << 20) + 1);
  expect_error(ErrorKind::kCorruptData, "has 16777217 bytes; the limit is 16777216",
               [&] { const Checkpoint checkpoint(dir.path()); });
}

TEST(Checkpoint, PassesLenientOnToItsShards) {
  const TempDir dir;
  write_file(dir / "model.safetensors", shard_of({"a"}) + "trailing");
  expect_error(ErrorKind::kCorruptData, "after the last tensor",
               [&] { const Checkpoint checkpoint(dir.path()); });
  EXPECT_TRUE(has_warning(Checkpoint(dir.path(), {.lenient = true}), "8 bytes in 1 place(s)"));
}

}  // namespace
}  // namespace narrowfloat
