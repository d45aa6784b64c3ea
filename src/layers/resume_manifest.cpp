// See resume_manifest.h.
#include "layers/resume_manifest.h"

#include <algorithm>
#include <filesystem>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#define XXH_INLINE_ALL  // NOLINT(readability-identifier-naming): the name is the library's.
#include <xxhash.h>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "checkpoint/json_guard.h"

namespace narrowfloat {
namespace {

using nlohmann::json;

constexpr uint64_t kReadBytes = uint64_t{1} << 20;

std::string hash_text(XXH64_hash_t hash) { return fmt::format("xxh64:{:016x}", hash); }

// File names need not be UTF-8, which JSON is.
std::string name_of(const std::string& path) {
  return printable(std::filesystem::path(path).filename().string(), std::string::npos);
}

std::string header_hash(const SafetensorsReader& shard) {
  const OpenedFile file = open_regular_file(shard.path());
  std::string header(shard.header_size(), '\0');
  read_exact(file.fd, shard.path(), 0, std::as_writable_bytes(std::span(header)));
  return hash_of(header);
}

}  // namespace

std::string hash_of(std::string_view bytes) {
  return hash_text(XXH64(bytes.data(), bytes.size(), 0));
}

ResumeManifest::FinishedFile hash_file(const std::string& path) {
  const OpenedFile file = open_regular_file(path);
  const std::unique_ptr<XXH64_state_t, XXH_errorcode (*)(XXH64_state_t*)> state(XXH64_createState(),
                                                                                XXH64_freeState);
  XXH64_reset(state.get(), 0);
  std::vector<std::byte> buffer(std::min(kReadBytes, file.size));
  for (uint64_t at = 0; at < file.size; at += buffer.size()) {
    const auto piece = std::span(buffer).first(std::min<uint64_t>(buffer.size(), file.size - at));
    read_exact(file.fd, path, at, piece);
    XXH64_update(state.get(), piece.data(), piece.size());
  }
  return {file.size, hash_text(XXH64_digest(state.get()))};
}

ResumeManifest::SourceFile source_file(const SafetensorsReader& file) {
  const std::optional<FileStamp> stamp = file_stamp(file.path());
  if (!stamp) throw_error(ErrorKind::kIo, "{}: is gone", printable(file.path()));
  return {name_of(file.path()), stamp->size, stamp->modified_ns, header_hash(file)};
}

std::vector<ResumeManifest::SourceFile> source_files(const Checkpoint& source) {
  std::vector<ResumeManifest::SourceFile> files;
  for (const SafetensorsReader& shard : source.shards()) files.push_back(source_file(shard));
  return files;
}

std::string ResumeManifest::to_json() const {
  json document = {{"narrowfloat_manifest", 1}, {"version", version}, {"settings", settings}};
  document["sources"] = json::array();
  for (const SourceFile& file : sources) {
    document["sources"].push_back({{"name", file.name},
                                   {"size", file.size},
                                   {"modified_ns", file.modified_ns},
                                   {"header", file.header_hash}});
  }
  document["files"] = json::object();
  for (const auto& [name, file] : files) {
    document["files"][name] = {{"size", file.size}, {"hash", file.hash}};
  }
  return document.dump(1) + "\n";
}

ResumeManifest ResumeManifest::parse(std::string_view text, std::string_view source) {
  check_json_object(text, source);
  try {
    const json document = json::parse(text);
    ResumeManifest manifest;
    document.at("version").get_to(manifest.version);
    document.at("settings").get_to(manifest.settings);
    for (const json& file : document.at("sources")) {
      manifest.sources.push_back(
          {file.at("name"), file.at("size"), file.at("modified_ns"), file.at("header")});
    }
    for (const auto& [name, file] : document.at("files").items()) {
      manifest.files[name] = {file.at("size"), file.at("hash")};
    }
    return manifest;
  } catch (const json::exception&) {
    throw_error(ErrorKind::kCorruptData,
                "{}: is no manifest of this library; leave out option resume to start again",
                source);
  }
}

}  // namespace narrowfloat
