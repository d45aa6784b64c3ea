// The record of a run's finished shards, in its staging directory, from which a later run of the
// same work continues. Nothing is trusted because it exists: shards are hashed again.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

inline constexpr const char* kManifestName = "narrowfloat-manifest.json";

struct ResumeManifest {
  struct SourceFile {
    std::string name;
    uint64_t size = 0;
    int64_t modified_ns = 0;
    std::string header_hash;

    bool operator==(const SourceFile&) const = default;
  };
  struct FinishedFile {
    uint64_t size = 0;
    std::string hash;

    bool operator==(const FinishedFile&) const = default;
  };

  std::string version;              // The version of the library.
  std::string settings;             // A hash of all that determines the target but the source.
  std::vector<SourceFile> sources;  // Shards in their order, then other files that are read.
  std::map<std::string, FinishedFile> files;  // Key: final name.

  [[nodiscard]] std::string to_json() const;
  // Throws kCorruptData that starts with `source`, which must be printable.
  static ResumeManifest parse(std::string_view text, std::string_view source);
};

// "xxh64:0123456789abcdef".
std::string hash_of(std::string_view bytes);
// Size and hash of a whole file.
ResumeManifest::FinishedFile hash_file(const std::string& path);
// The file as it is now.
ResumeManifest::SourceFile source_file(const SafetensorsReader& file);
// The source's files as they are now.
std::vector<ResumeManifest::SourceFile> source_files(const Checkpoint& source);

}  // namespace narrowfloat
