// The fingerprint hashes a header's content, not its JSON: spelling and padding do not count.
#include "layers/source_facts.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>
#define XXH_INLINE_ALL  // NOLINT(readability-identifier-naming): the name is the library's.
#include <xxhash.h>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "numbers are hashed as they lie");

// Lengths precede texts, so that no two headers give the same bytes.
class HeaderBytes {
 public:
  void add(uint64_t number) {
    std::array<char, sizeof(number)> bytes{};
    std::memcpy(bytes.data(), &number, sizeof(number));
    bytes_.append(bytes.data(), bytes.size());
  }
  void add(std::string_view text) {
    add(uint64_t{text.size()});
    bytes_.append(text);
  }
  void add(const TensorInfo& tensor) {
    add(std::string_view(tensor.name));
    add(name(tensor.dtype));
    add(uint64_t{tensor.shape.size()});
    for (const int64_t extent : tensor.shape) add(static_cast<uint64_t>(extent));
    add(tensor.offset);
    add(tensor.size_bytes);
  }
  [[nodiscard]] uint64_t hash() const { return XXH64(bytes_.data(), bytes_.size(), 0); }

 private:
  std::string bytes_;
};

// Sorted, without hidden ones (.git, .cache), which belong to tools.
std::vector<std::string> subdirectories(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    const std::string name = at->path().filename().string();
    if (at->is_directory(ignored) && !name.starts_with('.')) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Other files (tokenizer, licence) that are links to outside of the directory, with where they
// lead.
std::vector<std::string> links_to_outside(const Checkpoint& source) {
  std::vector<std::string> links;
  std::error_code error;
  const fs::path directory = fs::canonical(source.path(), error);
  for (const std::string& name : source.auxiliary_files()) {
    const fs::path path = fs::path(source.path()) / name;
    if (!fs::is_symlink(path, error)) continue;
    const fs::path target = fs::canonical(path, error);
    if (error || target.parent_path() == directory) continue;
    links.push_back(fmt::format("{} -> {}", name, target.string()));
  }
  return links;
}

}  // namespace

void check_number_of_tensors(const Checkpoint& source) {
  constexpr size_t kMost = 500'000;  // Several times those of any model.
  const size_t count = source.tensors().size();
  if (count <= kMost) return;
  throw_error(ErrorKind::kUnsupported,
              "{}: has {} tensors; the limit for a source is {}; split it into several checkpoints",
              printable(source.path()), count, kMost);
}

std::vector<std::string> source_warnings(const Checkpoint& source) {
  std::vector<std::string> warnings = source.warnings();
  if (!source.is_directory()) return warnings;
  if (source.config_text().empty()) {
    warnings.push_back(
        fmt::format("{}: there is no config.json; the target will have none, and loaders will not "
                    "learn how its weights are stored",
                    printable(source.path())));
  }
  const std::vector<std::string> names = subdirectories(source.path());
  if (!names.empty()) {
    warnings.push_back(fmt::format("{}: subdirectories are not copied: {}",
                                   printable(source.path()),
                                   printable(fmt::format("{}", fmt::join(names, ", ")))));
  }
  const std::vector<std::string> links = links_to_outside(source);
  if (!links.empty()) {
    warnings.push_back(fmt::format(
        "{}: files that are links out of the directory are copied with their content: "
        "{}",
        printable(source.path()), printable(fmt::format("{}", fmt::join(links, ", ")), 1000)));
  }
  return warnings;
}

std::string source_fingerprint(const Checkpoint& source) {
  HeaderBytes header;
  for (const SafetensorsReader& shard : source.shards()) {
    header.add(uint64_t{shard.tensors().size()});
    for (const TensorInfo& tensor : shard.tensors()) header.add(tensor);
    header.add(uint64_t{shard.metadata().size()});
    for (const auto& [key, value] : shard.metadata()) {
      header.add(std::string_view(key));
      header.add(std::string_view(value));
    }
  }
  return fmt::format("xxh64:{:016x}", header.hash());
}

}  // namespace narrowfloat
