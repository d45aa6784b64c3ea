// The common part of quantizing and dequantizing a checkpoint: a list of items, each some tensors
// of the source that become some tensors of the target, streamed one after another into shards;
// then the configs and the other files.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/conventions/convention.h"
#include "checkpoint/shard_plan.h"
#include "layers/memory_plan.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

struct RewriteItem {
  std::string name;
  TensorGroup tensors;  // Written; they stay in one shard.
  uint64_t source_bytes = 0;
  // Place of the item in the source, for the order of work: each input shard is read sequentially.
  size_t source_shard = 0;
  uint64_t source_offset = 0;
  std::function<void(SafetensorsWriter&)> write;
};

struct RewriteJob {
  const Checkpoint& source;
  std::string target;
  std::vector<RewriteItem> items;
  std::map<std::string, std::string> metadata = {};
  std::string config_text = {};  // Empty: none is written.
  std::vector<ConfigFile> extra_configs = {};
  // Files that the target depends on besides the source. They outlive the job.
  std::vector<const SafetensorsReader*> more_sources = {};
  std::vector<std::string> kept_files = {};  // The target may not be or hold them.
  uint64_t max_shard_bytes = 0;
  bool dry_run = false;
  bool force = false;
  bool resume = false;
  std::function<void(const ProgressEvent&)> progress = {};
  std::function<bool()> cancelled = {};
};

struct RewriteResult {
  std::vector<std::string> files;
  std::vector<uint64_t> file_bytes;  // The size of each.
  uint64_t source_bytes = 0;         // Sizes of the safetensors files.
  uint64_t target_bytes = 0;
  bool cancelled = false;
  size_t kept_files = 0;     // As in CheckpointReport.
  std::string warning = {};  // Says what the figures leave out; may be empty.
};

RewriteResult rewrite_checkpoint(RewriteJob job);

// Sets what all functions that write checkpoints have options for.
template <typename Options>
void set_options(const Options& options, RewriteJob& job) {
  job.max_shard_bytes = options.max_shard_bytes;
  job.dry_run = options.dry_run;
  job.force = options.force;
  job.resume = options.resume;
  job.progress = options.progress;
  job.cancelled = options.cancelled;
}
// Throws kInvalidArgument for 0.
void check_max_shard_bytes(uint64_t max_shard_bytes);

double seconds_since(std::chrono::steady_clock::time_point start);
// Completes the report of a function that has written a checkpoint and began at `start`.
void complete_report(RewriteResult written, const MemoryPlan& memory,
                     std::chrono::steady_clock::time_point start, CheckpointReport& report);

// Makes an item that copies a tensor byte by byte, `buffer_bytes()` at a time.
RewriteItem copy_item(const Checkpoint& source, const CheckpointTensor& tensor,
                      const std::function<uint64_t()>& buffer_bytes);

// The metadata of the source without our keys, if it is a single file; "format" always.
std::map<std::string, std::string> base_metadata(const Checkpoint& source);

}  // namespace narrowfloat
