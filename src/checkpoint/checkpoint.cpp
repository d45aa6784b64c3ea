// Opening a checkpoint: one file, or a directory whose shards are found through the index, or
// without one by their names. All shards are validated at once.
#include "narrowfloat/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "checkpoint/foreign_format.h"
#include "checkpoint/index.h"
#include "checkpoint/json_guard.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kShardSuffix = ".safetensors";
constexpr const char* kConfigName = "config.json";
constexpr uint64_t kMaxConfigBytes = uint64_t{16} << 20;
constexpr size_t kMaxTensors = 2'000'000;  // In all files; a bound on memory, 1 KB for each.
// Checkpoints of more shards open them as they read: processes may have 1024 files open, or fewer.
constexpr size_t kMaxOpenShards = 128;

// Names of the files of a directory by their role; each list is sorted. Files that would be opened
// are listed even if they are dangling links or pipes, so that opening them reports it.
struct Listing {
  std::vector<std::string> indexes;
  std::vector<std::string> shards;
  std::vector<std::string> foreign;  // Pickle and GGUF files.
  std::vector<std::string> others;
  bool has_config = false;
};

void sort_in(Listing& listing, const fs::directory_entry& entry) {
  const std::string name = entry.path().filename().string();
  std::error_code ignored;
  if (entry.is_directory(ignored)) return;
  if (name == kConfigName) {
    listing.has_config = true;
  } else if (name.starts_with('.') || name.ends_with(".partial")) {
    return;  // Hidden files and the remains of a killed writer.
  } else if (name.ends_with(kIndexSuffix)) {
    listing.indexes.push_back(name);
  } else if (name.ends_with(kShardSuffix)) {
    listing.shards.push_back(name);
  } else if (has_foreign_name(name)) {
    listing.foreign.push_back(name);
  } else if (entry.is_regular_file(ignored) && !name.ends_with(".index.json")) {
    listing.others.push_back(name);  // Indexes of pickle shards are dropped with the shards.
  }
}

Listing list_directory(const std::string& directory) {
  Listing listing;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    sort_in(listing, *at);
  }
  if (error) {
    throw_error(ErrorKind::kIo, "{}: cannot list the directory: {}", printable(directory),
                error.message());
  }
  for (auto* names : {&listing.indexes, &listing.shards, &listing.foreign, &listing.others}) {
    std::sort(names->begin(), names->end());
  }
  return listing;
}

bool is_listed(const ShardIndex& index, std::string_view tensor) {
  const auto found = std::lower_bound(index.entries.begin(), index.entries.end(), tensor,
                                      [](const ShardIndex::Entry& entry, std::string_view wanted) {
                                        return entry.tensor < wanted;
                                      });
  return found != index.entries.end() && found->tensor == tensor;
}

// The parts of a name PREFIX-NUMBER-of-COUNT.safetensors.
struct NumberedShard {
  std::string_view prefix;
  std::string_view number;
  std::string_view count;
};

std::optional<NumberedShard> parse_numbered(std::string_view name) {
  constexpr std::string_view kOf = "-of-";
  constexpr size_t kMaxDigits = 7;
  const auto is_number = [](std::string_view text) {
    return !text.empty() && text.size() <= kMaxDigits &&
           text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  name.remove_suffix(kShardSuffix.size());
  const size_t of = name.rfind(kOf);
  if (of == std::string_view::npos) return std::nullopt;
  const size_t dash = name.substr(0, of).rfind('-');
  if (dash == std::string_view::npos) return std::nullopt;
  const NumberedShard shard = {name.substr(0, dash), name.substr(dash + 1, of - dash - 1),
                               name.substr(of + kOf.size())};
  if (!is_number(shard.number) || !is_number(shard.count)) return std::nullopt;
  return shard;
}

// Shards that count themselves must all be there; the first is number 1, or with some writers 0.
void check_numbering(const std::string& directory, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::optional<NumberedShard> shard = parse_numbered(name);
    if (!shard) continue;
    const auto name_of = [&](int64_t number) {
      return fmt::format("{}-{:0{}}-of-{}{}", shard->prefix, number, shard->number.size(),
                         shard->count, kShardSuffix);
    };
    const auto is_there = [&](int64_t number) {
      return std::binary_search(names.begin(), names.end(), name_of(number));
    };
    // A gap shows at the shard before it, or at the first number.
    const int64_t number = std::stoll(std::string(shard->number));
    const int64_t count = std::stoll(std::string(shard->count));
    const int64_t base = is_there(0) ? 0 : 1;
    for (const int64_t wanted : {base, number + 1}) {
      if (wanted >= base + count || is_there(wanted)) continue;
      throw_error(ErrorKind::kCorruptData,
                  "{}: '{}' is missing, but '{}' is there; the checkpoint is incomplete",
                  printable(directory), printable(name_of(wanted)), printable(name));
    }
  }
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + printable(name);
  return printable(text, 1000);
}

}  // namespace

struct Checkpoint::State {
  std::string path;
  bool is_directory = false;
  std::vector<SafetensorsReader> shards;
  size_t num_tensors = 0;  // Those of all shards.
  std::vector<CheckpointTensor> tensors;
  std::string config;
  std::vector<std::string> auxiliary;
  std::vector<std::string> warnings;

  void open_directory(const std::string& named_index, const SafetensorsOptions& options);
  void open_indexed(const std::string& index_name, const Listing& listing,
                    const SafetensorsOptions& options);
  void open_unindexed(const Listing& listing, const SafetensorsOptions& options);
  void open_shards(const std::vector<std::string>& files, SafetensorsOptions options);
  void open_shard(const std::string& file_path, const SafetensorsOptions& options);
  void gather_tensors();
  void check_index(const ShardIndex& index, const std::string& index_path);
  void read_config();

  [[nodiscard]] const CheckpointTensor* find(std::string_view name) const;
};

void Checkpoint::State::open_shards(const std::vector<std::string>& files,
                                    SafetensorsOptions options) {
  options.keep_open = options.keep_open && files.size() <= kMaxOpenShards;
  for (const std::string& file : files) open_shard(join_path(path, file), options);
}

void Checkpoint::State::open_shard(const std::string& file_path,
                                   const SafetensorsOptions& options) {
  shards.emplace_back(file_path, options);
  const std::vector<std::string>& shard_warnings = shards.back().warnings();
  warnings.insert(warnings.end(), shard_warnings.begin(), shard_warnings.end());
  num_tensors += shards.back().tensors().size();
  if (num_tensors > kMaxTensors) {
    throw_error(ErrorKind::kCorruptData, "{}: more than {} tensors in the {} file(s) up to {}",
                printable(path), kMaxTensors, shards.size(), printable(file_path));
  }
}

// Makes the list of all tensors by name; a name in two files is an error.
void Checkpoint::State::gather_tensors() {
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    for (const TensorInfo& info : shards[shard].tensors()) tensors.push_back({info, shard});
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const CheckpointTensor& a, const CheckpointTensor& b) {
              return a.info.name < b.info.name;
            });
  const auto twin = std::adjacent_find(tensors.begin(), tensors.end(),
                                       [](const CheckpointTensor& a, const CheckpointTensor& b) {
                                         return a.info.name == b.info.name;
                                       });
  if (twin != tensors.end()) {
    throw_error(ErrorKind::kCorruptData, "tensor '{}' is in two files: {} and {}",
                printable(twin->info.name), printable(shards[twin->shard].path()),
                printable(shards[std::next(twin)->shard].path()));
  }
}

const CheckpointTensor* Checkpoint::State::find(std::string_view name) const {
  const auto found = std::lower_bound(tensors.begin(), tensors.end(), name,
                                      [](const CheckpointTensor& tensor, std::string_view wanted) {
                                        return tensor.info.name < wanted;
                                      });
  return found == tensors.end() || found->info.name != name ? nullptr : &*found;
}

// Requires every indexed tensor in its file; unlisted tensors and a wrong total are warnings.
void Checkpoint::State::check_index(const ShardIndex& index, const std::string& index_path) {
  const std::string source = printable(index_path);
  for (const ShardIndex::Entry& entry : index.entries) {
    const CheckpointTensor* tensor = find(entry.tensor);
    if (tensor == nullptr || tensor->shard != entry.file) {
      throw_error(ErrorKind::kCorruptData, "{}: tensor '{}' is not in its file {}{}", source,
                  printable(entry.tensor), printable(index.files[entry.file]),
                  tensor == nullptr ? "" : "; it is in " + printable(shards[tensor->shard].path()));
    }
  }
  uint64_t total_size = 0;
  std::vector<const CheckpointTensor*> unlisted;
  for (const CheckpointTensor& tensor : tensors) {
    total_size += tensor.info.size_bytes;
    if (!is_listed(index, tensor.info.name)) unlisted.push_back(&tensor);
  }
  if (!unlisted.empty()) {
    const CheckpointTensor& first = *unlisted.front();
    warnings.push_back(fmt::format("{}: {} tensor(s) are not listed in the index: '{}' of {}{}",
                                   source, unlisted.size(), printable(first.info.name),
                                   printable(shards[first.shard].path()),
                                   unlisted.size() > 1 ? ", ..." : ""));
  }
  if (index.total_size && static_cast<uint64_t>(*index.total_size) != total_size) {
    warnings.push_back(fmt::format("{}: 'total_size' is {}, but the tensors have {} bytes", source,
                                   *index.total_size, total_size));
  }
}

void Checkpoint::State::open_indexed(const std::string& index_name, const Listing& listing,
                                     const SafetensorsOptions& options) {
  const std::string index_path = join_path(path, index_name);
  const ShardIndex index =
      parse_index(read_file_bounded(index_path, kMaxIndexBytes), printable(index_path));
  warnings.insert(warnings.end(), index.warnings.begin(), index.warnings.end());
  open_shards(index.files, options);
  gather_tensors();
  check_index(index, index_path);
  for (const std::string& file : listing.shards) {
    if (!std::binary_search(index.files.begin(), index.files.end(), file)) {
      warnings.push_back(fmt::format("{}: '{}' is not listed in the index and was not opened",
                                     printable(path), printable(file)));
    }
  }
}

void Checkpoint::State::open_unindexed(const Listing& listing, const SafetensorsOptions& options) {
  if (listing.shards.empty()) {
    throw_error(ErrorKind::kIo, "{}: holds no .safetensors file{}", printable(path),
                listing.foreign.empty()
                    ? ""
                    : "; pickle and GGUF files are not read: " + joined(listing.foreign));
  }
  check_numbering(path, listing.shards);
  open_shards(listing.shards, options);
  gather_tensors();
  if (shards.size() > 1) {
    warnings.push_back(fmt::format("{}: no index; taking all {} .safetensors files together",
                                   printable(path), shards.size()));
  }
}

void Checkpoint::State::read_config() {
  const std::string config_path = join_path(path, kConfigName);
  config = read_file_bounded(config_path, kMaxConfigBytes);
  check_json_object(config, printable(config_path));
}

void Checkpoint::State::open_directory(const std::string& named_index,
                                       const SafetensorsOptions& options) {
  is_directory = true;
  Listing listing = list_directory(path);
  if (named_index.empty() && listing.indexes.size() > 1) {
    throw_error(ErrorKind::kCorruptData, "{}: more than one index: {}; name the one to use",
                printable(path), joined(listing.indexes));
  }
  if (!named_index.empty()) {
    open_indexed(named_index, listing, options);
  } else if (listing.indexes.size() == 1) {
    open_indexed(listing.indexes[0], listing, options);
  } else {
    open_unindexed(listing, options);
  }
  if (listing.has_config) read_config();
  if (!listing.foreign.empty()) {
    warnings.push_back(fmt::format("{}: pickle and GGUF files are not read: {}", printable(path),
                                   joined(listing.foreign)));
  }
  auxiliary = std::move(listing.others);
}

Checkpoint::Checkpoint(const std::string& path, const SafetensorsOptions& options) {
  auto state = std::make_shared<State>();
  state->path = path;
  std::error_code error;
  if (path.ends_with(kIndexSuffix)) {
    // An index named by the user chooses among several of its directory.
    const fs::path index_path(path);
    state->path = index_path.has_parent_path() ? index_path.parent_path().string() : ".";
    state->open_directory(index_path.filename().string(), options);
  } else if (fs::is_directory(path, error)) {
    state->open_directory("", options);
  } else {
    state->open_shard(path, options);
    state->gather_tensors();
  }
  state_ = std::move(state);
}

const std::string& Checkpoint::path() const { return state_->path; }
bool Checkpoint::is_directory() const { return state_->is_directory; }
std::span<const SafetensorsReader> Checkpoint::shards() const { return state_->shards; }
std::span<const CheckpointTensor> Checkpoint::tensors() const { return state_->tensors; }
const CheckpointTensor* Checkpoint::find(std::string_view name) const { return state_->find(name); }

void Checkpoint::read(const CheckpointTensor& tensor, uint64_t begin,
                      std::span<std::byte> out) const {
  if (tensor.shard >= state_->shards.size()) {
    throw_invalid("{}: tensor '{}' is not one of this checkpoint", printable(path()),
                  printable(tensor.info.name));
  }
  state_->shards[tensor.shard].read(tensor.info, begin, out);
}

const std::string& Checkpoint::config_text() const { return state_->config; }
const std::vector<std::string>& Checkpoint::auxiliary_files() const { return state_->auxiliary; }
const std::vector<std::string>& Checkpoint::warnings() const { return state_->warnings; }

}  // namespace narrowfloat
