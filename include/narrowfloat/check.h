// Finds what is wrong with a checkpoint before somebody loads it, measures how its codes and scales
// use their range, and repairs what can be repaired without the source.
//
// The rules, their causes and what to do about them: docs/checkpoints.md, "Checking".
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/checkpoint.h"
#include "narrowfloat/export.h"

namespace narrowfloat {

enum class Severity : int {
  kError = 0,    // Loaders fail, or compute something else.
  kWarning = 1,  // Some loaders do, or quality is lost.
  kNote = 2,     // A fact to know; it is no finding of a check that passes.
};
NARROWFLOAT_API std::string_view name(Severity severity);

struct Finding {
  std::string id;  // "NF-C009", which never changes its meaning.
  Severity severity = Severity::kError;
  std::string tensor;   // Empty: about the checkpoint as a whole.
  std::string message;  // Says what was found, what was expected, and the likely cause.
};

// How the codes and block scales of a quantized weight use their range.
struct CodeStatistics {
  int64_t codes = 0;
  int64_t codes_at_maximum = 0;  // The largest finite magnitude.
  int64_t nan_codes = 0;         // FP8 only.
  // FP4: by code, 0 to 15, bit 3 the sign. FP8: by exponent field.
  std::vector<int64_t> code_counts = std::vector<int64_t>(16);

  int64_t blocks = 0;  // Each has one scale.
  int64_t zero_blocks = 0;
  int64_t low_blocks = 0;  // Nonzero blocks whose largest code is below a third of the maximum.
  int64_t vanished_blocks = 0;  // Scale zero, codes not.

  int64_t nonfinite_scales = 0;
  int64_t negative_scales = 0;
  int64_t zero_scales = 0;
  int64_t denormal_scales = 0;   // UE8M0: byte 0.
  int64_t saturated_scales = 0;  // E4M3 448, UE8M0 2^127.
  int64_t uneven_scales = 0;     // Not a power of two.
  // These count finite positive scales, without the global scale. 0: there is none.
  double smallest_scale = 0;
  double largest_scale = 0;
  std::map<int, int64_t> scale_exponents;  // Number of scales by floor(log2(scale)).
  double global_scale = 1;                 // As stored; 1 where the convention has none.

  // Rows and columns at the end that are zero throughout, unless everything is.
  int64_t zero_rows = 0;
  int64_t zero_cols = 0;
};

// The weight of the source, quantized again, beside what is stored.
struct Requantization {
  int64_t different_codes = 0;
  int64_t different_scales = 0;
  bool has_other_global_scale = false;

  [[nodiscard]] bool is_identical() const {
    return different_codes == 0 && different_scales == 0 && !has_other_global_scale;
  }
};

struct CheckedTensor {
  LogicalTensor tensor;
  std::optional<CodeStatistics> statistics;  // Set for a quantized tensor that was read.
  std::optional<ErrorFigures> figures;       // Its distance from the source.
  std::optional<Requantization> requantization;
};

struct CheckCheckpointOptions {
  std::string against;       // The unquantized checkpoint that it was made from; may be empty.
  bool scales_only = false;  // Read no codes and no unquantized tensors; not with `against`.
  std::function<void(const ProgressEvent&)> progress;
  std::function<bool()> cancelled;  // Asked between tensors; true ends the check.
};

struct CheckpointCheck {
  std::vector<Finding> findings;  // Errors first, then warnings, then notes; within, by tensor.
  std::vector<CheckedTensor> tensors;           // Sorted by name.
  ErrorFigures total;                           // Over the tensors with figures.
  std::map<std::string, std::string> metadata;  // Ours, of the files: version, settings, ...
  bool is_calibrated = false;  // They record that statistics of calibration were used.
  // "xxh64:0123456789abcdef" of the headers, as quantize_checkpoint() records its source's; the
  // second is empty without a source.
  std::string fingerprint;
  std::string source_fingerprint;
  uint64_t read_bytes = 0;  // Tensor data, on both sides.
  bool cancelled = false;

  [[nodiscard]] NARROWFLOAT_API int64_t count(Severity severity) const;
  // No error and no warning.
  [[nodiscard]] NARROWFLOAT_API bool passed() const;
};

// Reads a checkpoint tensor by tensor, in bounded memory. What cannot be opened throws as
// Checkpoint does, and a quantization method that is not readable as recognise() does; everything
// else is a finding.
NARROWFLOAT_API CheckpointCheck check_checkpoint(const std::string& path,
                                                 const CheckCheckpointOptions& options = {});

// Writes a report: PATH appears complete and on disk, or not at all. Replaces a file that is there.
NARROWFLOAT_API void write_report(const std::string& path, std::string_view text);

struct FixCheckpointOptions {
  uint64_t max_memory_bytes = 0;  // As in QuantizeCheckpointOptions.
  uint64_t max_shard_bytes = 5'000'000'000;
  bool dry_run = false;
  bool force = false;
  bool resume = false;
  std::function<void(const ProgressEvent&)> progress;
  std::function<bool()> cancelled;
};

// Writes a copy of the checkpoint `source` in which weights that consumers merge (gate and up;
// q, k and v) share a global scale: the largest decode scale of each group. Block scales and codes
// of the others are rescaled, which TensorReport::figures measures; everything else is copied, and
// the index is new. Throws kInvalidArgument where no global scale differs.
NARROWFLOAT_API CheckpointReport fix_checkpoint(const std::string& source,
                                                const std::string& target,
                                                const FixCheckpointOptions& options = {});

}  // namespace narrowfloat
