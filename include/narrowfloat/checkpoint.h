// Checkpoints: a safetensors file, or a directory with config.json and shards. Open, recognise how
// tensors are quantized, quantize, dequantize, convert, compare. Streams tensor by tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/export.h"
#include "narrowfloat/format.h"
#include "narrowfloat/quantize.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat {

struct CheckpointTensor {
  TensorInfo info;
  size_t shard = 0;  // Index into Checkpoint::shards().
};

// A file or a directory (index and shards, or one file), opened and validated: every indexed tensor
// is in its file and nowhere else. Throws kIo or kCorruptData.
class NARROWFLOAT_API Checkpoint {
 public:
  explicit Checkpoint(const std::string& path, const SafetensorsOptions& options = {});

  [[nodiscard]] const std::string& path() const;
  [[nodiscard]] bool is_directory() const;
  [[nodiscard]] std::span<const SafetensorsReader> shards() const;
  // All tensors, by name.
  [[nodiscard]] std::span<const CheckpointTensor> tensors() const;
  [[nodiscard]] const CheckpointTensor* find(std::string_view name) const;
  void read(const CheckpointTensor& tensor, uint64_t begin, std::span<std::byte> out) const;
  // Text of config.json; empty for a single file or where there is none.
  [[nodiscard]] const std::string& config_text() const;
  // Names of the directory's other files (tokenizer, licence, ...), without caches, hidden files,
  // indexes, shards and config.json.
  [[nodiscard]] const std::vector<std::string>& auxiliary_files() const;
  [[nodiscard]] const std::vector<std::string>& warnings() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

// How other software stores quantized weights: names, dtypes and config of the tensors.
enum class Convention : int {
  kNvfp4CompressedTensors = 0,  // nvfp4-ct: nvfp4-pack-quantized
  kNvfp4ModelOpt = 1,           // nvfp4-modelopt
  kMxfp4CompressedTensors = 2,  // mxfp4-ct: mxfp4-pack-quantized
  kMxfp8CompressedTensors = 3,  // mxfp8-ct: mxfp8-quantized
  kFp8Block = 4,                // fp8-block: DeepSeek's weight_scale_inv
  // Not written by quantize_checkpoint:
  kMxfp4GptOss = 5,            // mxfp4-gpt-oss: experts together, _blocks and _scales
  kMxfp4DeepSeek = 6,          // mxfp4-deepseek: DeepSeek-V4's experts, I8 codes
  kInt4CompressedTensors = 7,  // int4-ct: pack-quantized, as Kimi-K2's experts
  // Written:
  kFp8Channel = 8,           // fp8-channel: a scale for each row (FP8_DYNAMIC)
  kFp8Tensor = 9,            // fp8-tensor: one scale
  kFp8ChannelModelOpt = 10,  // fp8-channel-modelopt: FP8_PER_CHANNEL_PER_TOKEN
  kFp8TensorModelOpt = 11,   // fp8-tensor-modelopt: FP8
};

// The elements that share a stored block scale.
enum class ScaleExtent : int {
  kBlock = 0,   // Blocks of the format.
  kRow = 1,     // Rows, the output channels.
  kTensor = 2,  // All.
};

struct ConventionInfo {
  Convention id;
  std::string_view name;         // "nvfp4-ct": the FORMAT of the command line.
  std::string_view description;  // One line for listings.
  FormatId format;
  // Codes are integers, and none of the library's formats: only decoded. `format` has codes and
  // blocks of the same size.
  bool is_integer = false;
  bool is_written = true;         // Whether quantize_checkpoint writes it.
  bool is_convert_target = true;  // Whether convert_checkpoint writes it.
  // In memory, blocks of `format` repeat scales that are of rows or of the tensor.
  ScaleExtent scale_extent = ScaleExtent::kBlock;
};
NARROWFLOAT_API std::span<const ConventionInfo> all_conventions();
NARROWFLOAT_API const ConventionInfo& convention_info(Convention convention);
// "nvfp4", or what is none of the library's formats: "int4", "fp8_channel", "fp8_tensor".
NARROWFLOAT_API std::string_view stored_format(const ConventionInfo& info);
// Also takes "nvfp4", "mxfp4" and "mxfp8" for the compressed-tensors convention. Throws
// kInvalidArgument that lists the accepted names.
NARROWFLOAT_API Convention parse_convention(std::string_view text);

// One tensor as a model sees it: unquantized, or codes and scales together.
struct LogicalTensor {
  std::string name;            // "....gate_proj.weight"
  std::vector<int64_t> shape;  // Unquantized weight: [N, K]; stacked experts: [E, N, K].
  // Unquantized tensors.
  DType dtype = DType::kBF16;
  // Quantized tensors: the convention and the stored parts.
  std::optional<Convention> convention;
  std::vector<std::string> parts;  // Names of the stored tensors: values, scales, global scale.
  // The unquantized weight of stacked experts is [E, K, N], while codes are stored as rows of K.
  bool is_transposed = false;
  uint64_t size_bytes = 0;  // All parts.

  [[nodiscard]] NARROWFLOAT_API int64_t num_elements() const;
  [[nodiscard]] NARROWFLOAT_API double bits_per_element() const;
};

// Decides by the declared quantization together with dtypes and shapes, never by a name alone.
// Throws kCorruptData where they contradict each other, a companion is missing or has a wrong
// shape; kUnsupported for a declared method that is not readable.
NARROWFLOAT_API std::vector<LogicalTensor> recognise(const Checkpoint& checkpoint);

// Shell-style patterns over tensor names: `*` any run of characters (dots and slashes too), `?` any
// one character, `[abc]`, `[a-z]`, `[!a-z]` one of a set. There is no escape character: `[*]` is a
// star, and a `[` without its `]` stands for itself. True if all of `text` matches. Time is at most
// pattern times text, whatever the pattern.
NARROWFLOAT_API bool glob_matches(std::string_view pattern, std::string_view text);

enum class ScaleSearch : int {
  kAmax = 0,         // The scale that maps the largest element of a block to the largest code.
  kFourOverSix = 1,  // NVFP4: the better of two scales.
  kFull = 2,         // NVFP4, MXFP4, MXFP8: of all scales the one with the least squared error.
};

struct ProgressEvent {
  std::string_view tensor;
  uint64_t done_bytes = 0;  // Input bytes.
  uint64_t total_bytes = 0;
};

struct ErrorFigures;

// How weights whose names match are quantized, instead of QuantizeCheckpointOptions.
struct QuantizeRule {
  std::string glob;
  // "nvfp4", "mxfp4", "mxfp8", "fp8-block", "fp8-channel" or the name of another convention: one
  // that may be in one checkpoint with options.to. "keep": not quantized.
  std::string format;
  std::optional<MathMode> math;
  std::optional<Ue8m0Rounding> mx_scale;
  std::optional<ScaleSearch> scale_search;
};
// "GLOB=FORMAT". Throws kInvalidArgument for another text.
NARROWFLOAT_API QuantizeRule parse_rule(std::string_view text);

struct QuantizeRecipe {
  std::vector<std::string> include;
  std::vector<std::string> exclude;
  std::vector<QuantizeRule> rules;
};
// A JSON file: {"include": [GLOB...], "exclude": [GLOB...], "rules": [{"match": GLOB, "format":
// FORMAT, "math": ..., "mx_scale": ..., "scale_search": ...}...]}, all of whose members may be
// missing but "match" and "format"; or the same as YAML in a file *.yaml or *.yml. Throws kIo,
// kCorruptData for other content, or kUnsupported for what is read of no YAML: anchors, tags and
// the like.
NARROWFLOAT_API QuantizeRecipe read_recipe(const std::string& path);
// The same from the text of a JSON file.
NARROWFLOAT_API QuantizeRecipe parse_recipe(std::string_view text);

// Reads module -> largest magnitude of its input from a JSON object of numbers, or from the
// safetensors file of the Python function narrowfloat.transformers.calibrate, of whose experts
// those without tokens get the largest magnitude of their layer; other modules without are left
// out. Throws kIo or kCorruptData.
NARROWFLOAT_API std::map<std::string, float> read_activation_amax(const std::string& path);

struct QuantizeCheckpointOptions {
  Convention to = Convention::kNvfp4CompressedTensors;
  // Globs over tensor names. Includes add tensors to the default choice (they must be
  // quantizable); excludes win.
  std::vector<std::string> include;
  std::vector<std::string> exclude;
  // The first rule that matches a weight counts; without one, `to`. Rules choose among the weights
  // that are quantized, and add none.
  std::vector<QuantizeRule> rules;
  // Above 0: give weights better formats than `to`, those first that gain most for a bit, as long
  // as the quantizable ones have this many bits on average. Reads them twice.
  double target_bits = 0;
  // The largest magnitude of what comes into a module. Weights of NVFP4, and of FP8 with one scale,
  // of modules that are named get static activation scales, and the config says that their
  // activations are quantized.
  std::map<std::string, float> activation_amax;
  // Files that these options come from, which the target may not be or hold.
  std::vector<std::string> kept_files;
  // Files that narrowfloat.transformers.calibrate wrote; empty: none. gptq: with Hessians: weights
  // of NVFP4, MXFP4 and MXFP8 whose inputs have one are rounded so that columns make up for the
  // errors of others. activation_moments: with second moments or Hessians: the errors of the full
  // scale search count by the mean square of what they multiply.
  std::string gptq;
  std::string activation_moments;
  MathMode math = MathMode::kExact;
  Ue8m0Rounding mx_scale = Ue8m0Rounding::kUp;
  ScaleSearch scale_search = ScaleSearch::kAmax;
  bool keep_nonfinite = false;    // Otherwise a NaN or infinity in a weight is an error.
  uint64_t max_memory_bytes = 0;  // Buffers; 0: three quarters of what is available.
  uint64_t max_shard_bytes = 5'000'000'000;
  bool dry_run = false;  // Plan and validate only; write nothing.
  bool force = false;    // Replace what is at the target.
  // Continue where a run with the same source, target and options was interrupted: shards that it
  // finished are kept if their hashes are right. Without such a run: start.
  bool resume = false;
  bool measure = true;  // Fill TensorReport::figures.
  std::function<void(const ProgressEvent&)> progress;
  // Asked between tensors; true abandons the work, leaving no target.
  std::function<bool()> cancelled;
};

// Spec of the figures: docs/howto/read_the_error_report.md.
struct ErrorFigures {
  int64_t elements = 0;
  double mse = 0;
  double relative_error = 0;  // Frobenius.
  double sqnr_db = 0;         // Infinite for no error.
  double cosine = 1;
  double norm_ratio = 1;
  double max_abs = 0;
  int64_t max_abs_index = 0;
  std::optional<double> clipped_percent;  // Known only where the compared side is quantized.
  double flushed_percent = 0;
  int64_t nonfinite = 0;  // Elements left out of the sums.
};

// How much of a weight a conversion left as it was. A block is a run of columns of one row that
// share a scale in the target.
struct ConversionFigures {
  bool is_exact = true;  // Codes, block scales and the global scale mean the same as before.
  int64_t blocks = 0;
  std::optional<int64_t> exact_blocks;  // Whose values are the same; not known by a dry run.
  // Relative: the rounding of the reciprocal where the conventions store inverse global scales.
  double global_scale_change = 0;
};

struct TensorReport {
  std::string name;
  std::string action;  // "quantize", "dequantize", "convert", "requantize" or "copy".
  std::string reason;  // Why it is copied, not converted exactly, or in another format than asked.
  std::string format;  // The convention of a weight that is quantized: "nvfp4-ct".
  std::vector<int64_t> shape;
  uint64_t source_bytes = 0;
  uint64_t target_bytes = 0;
  std::optional<ErrorFigures> figures;
  std::optional<ConversionFigures> conversion;
};

struct CheckpointReport {
  std::vector<TensorReport> tensors;
  uint64_t source_bytes = 0;
  uint64_t target_bytes = 0;
  uint64_t peak_buffer_bytes = 0;  // The most that was (or, for a dry run, would be) allocated.
  ErrorFigures total;              // Over the quantized tensors.
  double seconds = 0;
  double quantize_seconds = 0;  // Inside the quantizer.
  uint64_t quantized_source_bytes = 0;
  std::vector<std::string> files;    // Written (or planned), in order.
  std::vector<uint64_t> file_bytes;  // The size of each.
  std::vector<std::string> notes;    // How formats were chosen.
  // Warnings of the source's reader, and tensors that deserve a second look. Messages name options
  // as "option force", with the names of the fields above.
  std::vector<std::string> warnings;
  bool cancelled = false;  // Stopped by options.cancelled; nothing was left at the target.
  size_t kept_files = 0;   // Shards of a cancelled run that wait for option resume.
};

// SRC and DST: a .safetensors file each, or a directory each. Throws before anything is written, or
// leaves no file that loads.
NARROWFLOAT_API CheckpointReport quantize_checkpoint(const std::string& source,
                                                     const std::string& target,
                                                     const QuantizeCheckpointOptions& options);

struct DequantizeCheckpointOptions {
  DType dtype = DType::kBF16;  // BF16, F16 or F32.
  uint64_t max_memory_bytes = 0;
  uint64_t max_shard_bytes = 5'000'000'000;
  bool dry_run = false;
  bool force = false;
  bool resume = false;  // As in QuantizeCheckpointOptions.
  std::function<void(const ProgressEvent&)> progress;
  std::function<bool()> cancelled;
};
NARROWFLOAT_API CheckpointReport dequantize_checkpoint(const std::string& source,
                                                       const std::string& target,
                                                       const DequantizeCheckpointOptions& options);

struct ConvertCheckpointOptions {
  Convention to = Convention::kNvfp4CompressedTensors;
  // Throw kInvalidArgument, before anything is written, if a weight would change at all: also where
  // only the reciprocal of a global scale is rounded.
  bool exact_only = false;
  // Quantize weights again whose values the target cannot hold; otherwise they are an error.
  bool lossy = false;
  // Weights of other formats than that of `to` keep theirs, in the convention that may be in one
  // checkpoint with it; otherwise they get that of `to`. Throws kUnsupported where there is none.
  bool keep_formats = false;
  // How weights are quantized again; as in QuantizeCheckpointOptions.
  MathMode math = MathMode::kExact;
  Ue8m0Rounding mx_scale = Ue8m0Rounding::kUp;
  ScaleSearch scale_search = ScaleSearch::kAmax;
  uint64_t max_memory_bytes = 0;
  uint64_t max_shard_bytes = 5'000'000'000;
  bool dry_run = false;
  bool force = false;
  bool resume = false;
  std::function<void(const ProgressEvent&)> progress;
  std::function<bool()> cancelled;
};
// Converts the quantized weights of SRC to another convention, keeping codes and scales wherever
// the target can hold the same values. Stacked experts become one weight for each matrix of each
// expert, and the way back.
NARROWFLOAT_API CheckpointReport convert_checkpoint(const std::string& source,
                                                    const std::string& target,
                                                    const ConvertCheckpointOptions& options);

// Two quantized weights of one format, compared as they are stored.
struct StoredDiff {
  int64_t codes = 0;
  int64_t different_codes = 0;
  int64_t scales = 0;
  int64_t different_scales = 0;
  // The factor of the whole tensor, however it is stored; 1 where the convention has none.
  double a_global_scale = 1;
  double b_global_scale = 1;
};

// How well one side quantizes the original.
struct OriginalDiff {
  ErrorFigures figures;
  // Codes that are not the nearest ones to the original for the scales they are stored with.
  int64_t misrounded_codes = 0;
};

struct TensorDiff {
  std::string name;
  std::string status;  // "identical", "same values", "different", "only in A", "only in B",
                       // "shape differs"
  std::string detail;
  ErrorFigures figures;  // A is the reference.
  std::optional<StoredDiff> stored;
  // Both are set, or neither: the original has such a tensor, and both sides are quantized.
  std::optional<OriginalDiff> a_original;
  std::optional<OriginalDiff> b_original;
};

struct CheckpointDiff {
  std::vector<TensorDiff> tensors;
  ErrorFigures total;
  bool equal = true;                  // No tensor differs in its values.
  std::vector<std::string> warnings;  // Warnings of the readers of A and B.
};

struct DiffCheckpointsOptions {
  std::string original;  // The source of both A and B; may be empty.
};
// Compares logical tensors: quantized ones are dequantized. Non-tensor files are not compared.
NARROWFLOAT_API CheckpointDiff diff_checkpoints(const std::string& a, const std::string& b,
                                                const DiffCheckpointsOptions& options = {});

}  // namespace narrowfloat
