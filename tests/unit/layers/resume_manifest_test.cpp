// The manifest as text and back, what is refused, and hashes against published values.
#include "layers/resume_manifest.h"

#include <filesystem>

#include <fmt/format.h>

#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

ResumeManifest small_manifest() {
  return {.version = "1.2.3",
          .settings = hash_of("settings"),
          .sources = {{"a \"b\".safetensors", uint64_t{1} << 53, -1, hash_of("a")},
                      {"c.safetensors", 0, int64_t{1} << 62, hash_of("")}},
          .files = {{"model-00001-of-00002.safetensors", {~uint64_t{0}, hash_of("x")}},
                    {"model-00002-of-00002.safetensors", {4096, hash_of("y")}}}};
}

TEST(ResumeManifest, TextAndBackIsTheSame) {
  const ResumeManifest manifest = small_manifest();
  const ResumeManifest back = ResumeManifest::parse(manifest.to_json(), "m");
  EXPECT_EQ(back.version, manifest.version);
  EXPECT_EQ(back.settings, manifest.settings);
  EXPECT_EQ(back.sources, manifest.sources);
  EXPECT_EQ(back.files, manifest.files);
  EXPECT_TRUE(ResumeManifest::parse(ResumeManifest{}.to_json(), "m").files.empty());
}

// A write that was cut off, or a file of someone else.
TEST(ResumeManifest, RefusesEveryCutOfItsText) {
  const std::string text = small_manifest().to_json();
  for (size_t size = 0; size + 1 < text.size(); ++size) {  // The last byte is a newline.
    expect_error(ErrorKind::kCorruptData,
                 "the file: ", [&] { ResumeManifest::parse(text.substr(0, size), "the file"); });
  }
}

TEST(ResumeManifest, RefusesMembersThatAreMissingOrOfAnotherType) {
  const std::string hash = hash_of("x");
  const auto text = [&](std::string_view sources, std::string_view files) {
    return fmt::format(R"({{"version":"1","settings":"s","sources":{},"files":{}}})", sources,
                       files);
  };
  EXPECT_NO_THROW(ResumeManifest::parse(text("[]", "{}"), "m"));
  for (const std::string& broken :
       {std::string("{}"), std::string(R"({"version":1,"settings":"s","sources":[],"files":{}})"),
        text("[1]", "{}"), text(R"([{"name":"a","size":1,"modified_ns":2}])", "{}"),
        text(R"([{"name":"a","size":"1","modified_ns":2,"header":"h"}])", "{}"),
        text("[]", R"({"a":{"size":1}})"), text("[]", R"({"a":{"size":"1","hash":"h"}})"),
        text("[]", R"({"a":{"size":1,"hash":2}})"), text("[]", R"({"a":7})"), text("[]", "7")}) {
    SCOPED_TRACE(broken);
    expect_error(ErrorKind::kCorruptData, "is no manifest of this library; leave out option resume",
                 [&] { ResumeManifest::parse(broken, "m"); });
  }
  expect_error(ErrorKind::kCorruptData, "m: duplicate key 'version'",
               [] { ResumeManifest::parse(R"({"version":"1","version":"2"})", "m"); });
}

TEST(ResumeManifest, HashesAreXxh64) {
  EXPECT_EQ(hash_of(""), "xxh64:ef46db3751d8e999");
  EXPECT_EQ(hash_of("a"), "xxh64:d24ec4f1a98c6e5b");
  const TempDir dir;
  std::string bytes(3'000'001, 'x');  // More than is read at a time.
  bytes[2'000'000] = 'y';
  for (const std::string& content : {std::string(), std::string("a"), bytes}) {
    write_file(dir / "file", content);
    const ResumeManifest::FinishedFile file = hash_file(dir / "file");
    EXPECT_EQ(file.size, content.size());
    EXPECT_EQ(file.hash, hash_of(content));
  }
}

// A resumed run compares names, sizes, times and headers of the source's files.
TEST(ResumeManifest, SourceFilesTellASourceThatChanged) {
  const TempDir dir;
  const std::string path = dir / "model.safetensors";
  write_file(path, safetensors_bytes(object({entry("a", "U8", "2", "0,2")}), 2));
  const auto before = source_files(Checkpoint(dir.path()));
  ASSERT_EQ(before.size(), 1U);
  EXPECT_EQ(before[0].name, "model.safetensors");
  EXPECT_EQ(before[0].size, std::filesystem::file_size(path));
  EXPECT_EQ(source_files(Checkpoint(dir.path())), before);
  // Another name of the tensor, with the time of before: the header alone tells.
  const auto time = std::filesystem::last_write_time(path);
  write_file(path, safetensors_bytes(object({entry("b", "U8", "2", "0,2")}), 2));
  std::filesystem::last_write_time(path, time);
  const auto renamed = source_files(Checkpoint(dir.path()));
  EXPECT_EQ(renamed[0].size, before[0].size);
  EXPECT_NE(renamed[0].header_hash, before[0].header_hash);
  // Another time alone.
  std::filesystem::last_write_time(path, time + std::chrono::seconds(1));
  EXPECT_NE(source_files(Checkpoint(dir.path()))[0].modified_ns, renamed[0].modified_ns);
}

}  // namespace
}  // namespace narrowfloat
