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
#include "layers/resume_manifest.h"
#include "layers/scale_originals.h"
#include "layers/source_facts.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigName = "config.json";
// This file is written again where the target's convention has one, and so is the one of
// scale_originals.h; stale ones would contradict it.
constexpr const char* kModelOptFile = "hf_quant_config.json";
constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;
constexpr uint64_t kCopyBytes = uint64_t{1} << 20;
constexpr uint64_t kReadAheadBytes = uint64_t{32} << 20;
constexpr std::string_view kOwnKeyPrefix = "narrowfloat.";

class Rewriter {
 public:
  explicit Rewriter(RewriteJob job) : job_(std::move(job)) {}

  RewriteResult run() {
    std::vector<std::string> kept_files = job_.kept_files;
    for (const SafetensorsReader* file : job_.more_sources) kept_files.push_back(file->path());
    CheckpointTarget target(job_.source, job_.target, job_.force, kept_files);
    plan();
    uint64_t needed_bytes = result_.target_bytes;
    for (const std::string& name : auxiliary_) {
      needed_bytes += fs::file_size(join_path(job_.source.path(), name));
    }
    if (job_.dry_run) {
      target.check_room(needed_bytes);
      return std::move(result_);
    }
    target.begin(needed_bytes, job_.resume);
    if (target.is_directory()) begin_manifest(target);
    try {
      if (!write_files(target)) {
        record_last(target);
        result_.files.clear();
        result_.file_bytes.clear();
        result_.cancelled = true;
        result_.kept_files = manifest_.files.size();
      }
    } catch (const Error& error) {
      // Another disk may have more room; other errors come again.
      if (error.kind() == ErrorKind::kIo) {
        record_last(target);
      } else {
        target.keep_staging(false);
      }
      throw;
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
      if (name == kModelOptFile || name == kScalesFileName) continue;
      auxiliary_.push_back(name);
      add_file(name, fs::file_size(join_path(job_.source.path(), name)));
    }
    for (const ConfigFile& config : job_.extra_configs) add_file(config.name, config.text.size());
    if (!job_.config_text.empty()) add_file(kConfigName, job_.config_text.size());
    if (shards_.size() > 1) add_file(kIndexFileName, index_json(shards_).size());
  }

  // Takes over the finished shards of the run to resume.
  void begin_manifest(CheckpointTarget& target) {
    manifest_.version = std::string(version());
    manifest_.settings = settings_hash();
    manifest_.sources = source_files(job_.source);
    for (const SafetensorsReader* file : job_.more_sources) {
      manifest_.sources.push_back(source_file(*file));
    }
    const std::string path = target.own_path(kManifestName);
    if (!job_.resume || !fs::exists(path)) return;
    ResumeManifest found =
        ResumeManifest::parse(read_file_bounded(path, kMaxManifestBytes), printable(path));
    const auto refuse = [&](const char* what) {
      throw_invalid("option resume: {} was made {}; leave out the option to start again",
                    printable(path), what);
    };
    if (found.version != manifest_.version) refuse("by another version");
    if (found.sources != manifest_.sources) refuse("from another source, or it has changed");
    if (found.settings != manifest_.settings) refuse("with other options");
    for (const PlannedShard& shard : shards_) {
      const auto file = found.files.find(shard.file_name);
      if (file != found.files.end() && is_intact(target, shard.file_name, file->second)) {
        manifest_.files.insert(*file);
      }
    }
    target.keep_only(manifest_.files);
    if (manifest_.files.empty()) return;
    result_.warning = fmt::format(
        "{} of {} shards are of the run before (option resume); figures leave out their tensors",
        manifest_.files.size(), shards_.size());
  }

  // A commit may have given the file its final name.
  static bool is_intact(const CheckpointTarget& target, const std::string& name,
                        const ResumeManifest::FinishedFile& expected) {
    const std::string staged = target.file_path(name);
    const std::string named = target.own_path(name);
    if (!fs::exists(staged) && fs::exists(named)) rename_new(named, staged);
    return fs::exists(staged) && hash_file(staged) == expected;
  }

  // Hashes what the files will be, less the tensors' data, and the names of the options that
  // determine that (in the metadata).
  [[nodiscard]] std::string settings_hash() const {
    std::string text = job_.config_text;
    for (const PlannedShard& shard : shards_) {
      text += shard.file_name + plan_layout(shard.tensors, job_.metadata).header;
    }
    for (const ConfigFile& config : job_.extra_configs) text += config.name + config.text;
    return hash_of(text);
  }

  void record(CheckpointTarget& target, const std::string& shard) {
    manifest_.files[shard] = hash_file(target.file_path(shard));
    write_file_atomically(target.own_path(kManifestName), manifest_.to_json());
    target.keep_staging(true);
  }

  // Records the last shard for the next run, which writes it again if this fails.
  void record_last(CheckpointTarget& target) {
    if (unrecorded_.empty()) return;
    try {
      record(target, unrecorded_);
    } catch (const Error&) {
      manifest_.files.erase(unrecorded_);
    }
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
  bool write_shards(CheckpointTarget& target) {
    size_t next = 0;
    for (const PlannedShard& shard : shards_) {
      if (manifest_.files.contains(shard.file_name)) {
        for (size_t written = 0; written < shard.tensors.size(); ++next) {
          written += job_.items[next].tensors.size();
          report_progress(job_.items[next]);
        }
        continue;
      }
      // Files of a directory are new, since its staging directory is.
      SafetensorsWriter writer(target.file_path(shard.file_name), shard.tensors, job_.metadata,
                               {.replace = target.is_directory() || target.force()});
      for (size_t written = 0; written < shard.tensors.size(); ++next) {
        if (is_cancelled()) return false;
        read_ahead(next);
        RewriteItem& item = job_.items[next];
        item.write(writer);
        written += item.tensors.size();
        report_progress(item);
      }
      if (is_cancelled()) return false;
      writer.finish();  // The sync takes long.
      if (is_cancelled()) return false;
      writer.commit();
      if (!target.is_directory()) continue;
      // Little is left to do after the last one, so it is hashed only where that fails.
      if (&shard == &shards_.back()) {
        unrecorded_ = shard.file_name;
      } else {
        record(target, shard.file_name);
      }
    }
    return true;
  }

  // Keeps the disk reading what comes after the item that is worked on.
  void read_ahead(size_t current) {
    if (ahead_ <= current) {
      ahead_ = current + 1;
      ahead_bytes_ = done_bytes_ + job_.items[current].source_bytes;
    }
    for (; ahead_ < job_.items.size() && ahead_bytes_ < done_bytes_ + kReadAheadBytes; ++ahead_) {
      const RewriteItem& item = job_.items[ahead_];
      const uint64_t bytes = std::min(item.source_bytes, kReadAheadBytes);
      job_.source.shards()[item.source_shard].will_read(item.source_offset, bytes);
      ahead_bytes_ += item.source_bytes;
    }
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
  ResumeManifest manifest_;
  std::string unrecorded_;  // A finished shard that the manifest does not have.
  std::vector<std::string> auxiliary_;
  uint64_t total_bytes_ = 0;
  uint64_t done_bytes_ = 0;
  // The first item that the disk is not told of, and the bytes of those before it.
  size_t ahead_ = 0;
  uint64_t ahead_bytes_ = 0;
};

}  // namespace

RewriteResult rewrite_checkpoint(RewriteJob job) { return Rewriter(std::move(job)).run(); }

void check_max_shard_bytes(uint64_t max_shard_bytes) {
  if (max_shard_bytes == 0) throw_invalid("option max_shard_bytes: must be at least 1, got 0");
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void complete_report(RewriteResult written, const MemoryPlan& memory,
                     std::chrono::steady_clock::time_point start, CheckpointReport& report) {
  report.files = std::move(written.files);
  report.file_bytes = std::move(written.file_bytes);
  report.source_bytes = written.source_bytes;
  report.target_bytes = written.target_bytes;
  report.cancelled = written.cancelled;
  report.kept_files = written.kept_files;
  if (!written.warning.empty()) report.warnings.push_back(std::move(written.warning));
  report.peak_buffer_bytes = memory.peak_bytes();
  report.seconds = seconds_since(start);
}

RewriteItem copy_item(const Checkpoint& source, const CheckpointTensor& tensor,
                      const std::function<uint64_t()>& buffer_bytes) {
  RewriteItem item;
  item.name = tensor.info.name;
  item.tensors = {{tensor.info.name, tensor.info.dtype, tensor.info.shape}};
  item.source_bytes = tensor.info.size_bytes;
  item.source_shard = tensor.shard;
  item.source_offset = tensor.info.offset;
  item.write = [&source, &tensor, buffer_bytes](SafetensorsWriter& writer) {
    uint64_t at = writer.copy(tensor.info.name, source.shards()[tensor.shard], tensor.info);
    if (at == tensor.info.size_bytes) return;
    std::vector<std::byte> buffer(std::min(buffer_bytes(), tensor.info.size_bytes));
    for (; at < tensor.info.size_bytes; at += buffer.size()) {
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
