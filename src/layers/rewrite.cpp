// Order of writing a directory's files: shards, other files, configs, index last of all. They get
// their final names only when everything is on disk (checkpoint_target.h).
#include "layers/rewrite.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "checkpoint/partial_file.h"
#include "checkpoint/safetensors_layout.h"
#include "layers/checkpoint_target.h"
#include "layers/source_facts.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigName = "config.json";
// This file is written again where the target's convention has one; a stale one would contradict
// it.
constexpr const char* kModelOptFile = "hf_quant_config.json";
constexpr uint64_t kCopyBytes = uint64_t{1} << 20;
constexpr std::string_view kOwnKeyPrefix = "narrowfloat.";

class Rewriter {
 public:
  explicit Rewriter(RewriteJob job) : job_(std::move(job)) {}

  RewriteResult run() {
    CheckpointTarget target(job_.source, job_.target, job_.force);
    plan();
    uint64_t needed_bytes = result_.target_bytes;
    for (const std::string& name : auxiliary_) {
      needed_bytes += fs::file_size(join_path(job_.source.path(), name));
    }
    if (job_.dry_run) {
      target.check_room(needed_bytes);
      return std::move(result_);
    }
    target.begin(needed_bytes);
    if (!write_files(target)) {
      result_.files.clear();
      result_.file_bytes.clear();
      result_.cancelled = true;
    }
    return std::move(result_);
  }

 private:
  void plan() {
    std::stable_sort(job_.items.begin(), job_.items.end(),
                     [](const RewriteItem& a, const RewriteItem& b) {
                       return std::pair(a.source_shard, a.source_offset) <
                              std::pair(b.source_shard, b.source_offset);
                     });
    std::vector<TensorGroup> groups;
    for (const RewriteItem& item : job_.items) {
      groups.push_back(item.tensors);
      total_bytes_ += item.source_bytes;
    }
    const bool is_directory = job_.source.is_directory();
    const uint64_t no_limit = std::numeric_limits<uint64_t>::max();
    shards_ = plan_shards(groups, {is_directory ? job_.max_shard_bytes : no_limit, job_.metadata});
    if (!is_directory && shards_.size() != 1) {
      throw_invalid("target: {} tensors do not fit into one file; make the source a directory",
                    job_.items.size());
    }
    for (const SafetensorsReader& shard : job_.source.shards()) {
      result_.source_bytes += shard.file_size();
    }
    for (const PlannedShard& shard : shards_) {
      result_.target_bytes += shard_bytes(shard);
    }
    list_files(is_directory);
  }

  void list_files(bool is_directory) {
    if (!is_directory) {
      add_file(fs::path(job_.target).filename().string(), result_.target_bytes);
      return;
    }
    for (const PlannedShard& shard : shards_) add_file(shard.file_name, shard_bytes(shard));
    for (const std::string& name : job_.source.auxiliary_files()) {
      if (name == kModelOptFile) continue;
      auxiliary_.push_back(name);
      add_file(name, fs::file_size(join_path(job_.source.path(), name)));
    }
    for (const ConfigFile& config : job_.extra_configs) add_file(config.name, config.text.size());
    if (!job_.config_text.empty()) add_file(kConfigName, job_.config_text.size());
    if (shards_.size() > 1) add_file(kIndexFileName, index_json(shards_).size());
  }

  void add_file(const std::string& name, uint64_t bytes) {
    result_.files.push_back(name);
    result_.file_bytes.push_back(bytes);
  }

  [[nodiscard]] uint64_t shard_bytes(const PlannedShard& shard) const {
    return plan_layout(shard.tensors, job_.metadata).file_size;
  }

  [[nodiscard]] bool is_cancelled() const { return job_.cancelled && job_.cancelled(); }

  // False if the work was cancelled: `cancelled` is asked a last time right before anything
  // appears.
  bool write_files(CheckpointTarget& target) {
    if (!write_shards(target)) return false;
    if (!target.is_directory()) return true;
    write_other_files(target);
    if (is_cancelled()) return false;
    target.commit(result_.files);
    return true;
  }

  // False if the work was cancelled.
  bool write_shards(const CheckpointTarget& target) {
    size_t next = 0;
    for (const PlannedShard& shard : shards_) {
      // Files of a directory are new, since its staging directory is.
      SafetensorsWriter writer(target.file_path(shard.file_name), shard.tensors, job_.metadata,
                               {.replace = target.is_directory() || target.force()});
      for (size_t written = 0; written < shard.tensors.size(); ++next) {
        if (is_cancelled()) return false;
        RewriteItem& item = job_.items[next];
        item.write(writer);
        written += item.tensors.size();
        report_progress(item);
      }
      if (is_cancelled()) return false;
      writer.finish();  // The sync takes long.
      if (is_cancelled()) return false;
      writer.commit();
    }
    return true;
  }

  void report_progress(const RewriteItem& item) {
    done_bytes_ += item.source_bytes;
    if (job_.progress) job_.progress({item.name, done_bytes_, total_bytes_});
  }

  void write_other_files(const CheckpointTarget& target) {
    for (const std::string& name : auxiliary_) {
      copy_file(join_path(job_.source.path(), name), target.file_path(name));
    }
    for (const ConfigFile& config : job_.extra_configs) {
      write_file_atomically(target.file_path(config.name), config.text);
    }
    if (!job_.config_text.empty()) {
      write_file_atomically(target.file_path(kConfigName), job_.config_text);
    }
    if (shards_.size() > 1) {
      write_file_atomically(target.file_path(kIndexFileName), index_json(shards_));
    }
  }

  // Reads the file as the shards are read: what changes while it is copied is an error.
  static void copy_file(const std::string& from, const std::string& to) {
    const OpenedFile source = open_regular_file(from);
    PartialFile target(to);
    target.reserve(source.size);
    std::vector<std::byte> buffer(std::min(kCopyBytes, source.size));
    for (uint64_t at = 0; at < source.size; at += buffer.size()) {
      const auto piece =
          std::span(buffer).first(std::min<uint64_t>(buffer.size(), source.size - at));
      read_exact(source.fd, from, at, piece);
      target.write(at, piece);
    }
    require_unchanged(source.fd, from, source.stamp);
    target.sync();
    target.publish();
  }

  RewriteJob job_;
  RewriteResult result_;
  std::vector<PlannedShard> shards_;
  std::vector<std::string> auxiliary_;
  uint64_t total_bytes_ = 0;
  uint64_t done_bytes_ = 0;
};

}  // namespace

RewriteResult rewrite_checkpoint(RewriteJob job) { return Rewriter(std::move(job)).run(); }

RewriteItem copy_item(const Checkpoint& source, const CheckpointTensor& tensor,
                      const std::function<uint64_t()>& buffer_bytes) {
  RewriteItem item;
  item.name = tensor.info.name;
  item.tensors = {{tensor.info.name, tensor.info.dtype, tensor.info.shape}};
  item.source_bytes = tensor.info.size_bytes;
  item.source_shard = tensor.shard;
  item.source_offset = tensor.info.offset;
  item.write = [&source, &tensor, buffer_bytes](SafetensorsWriter& writer) {
    std::vector<std::byte> buffer(std::min(buffer_bytes(), tensor.info.size_bytes));
    for (uint64_t at = 0; at < tensor.info.size_bytes; at += buffer.size()) {
      const auto piece =
          std::span(buffer).first(std::min<uint64_t>(buffer.size(), tensor.info.size_bytes - at));
      source.read(tensor, at, piece);
      writer.write(tensor.info.name, at, piece);
    }
  };
  return item;
}

std::map<std::string, std::string> base_metadata(const Checkpoint& source) {
  std::map<std::string, std::string> metadata;
  if (!source.is_directory()) {
    for (const auto& [key, value] : source.shards().front().metadata()) {
      if (!key.starts_with(kOwnKeyPrefix)) metadata.emplace(key, value);
    }
  }
  metadata["format"] = "pt";
  metadata["narrowfloat.source"] = source_fingerprint(source);
  metadata["narrowfloat.version"] = std::string(version());
  return metadata;
}

}  // namespace narrowfloat
