// The facts of the report page and the model card, computed from a check: tensors by type and
// layer, sizes, and what was kept.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "narrowfloat/check.h"

namespace narrowfloat::cli {

// Smallest, largest and mean of some numbers.
struct Spread {
  int64_t count = 0;
  double least = 0;
  double most = 0;
  double sum = 0;

  void add(double value);
  [[nodiscard]] double mean() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

// The tensors of one type, "mlp.experts.gate_proj".
struct TypeFacts {
  int64_t tensors = 0;
  int64_t elements = 0;
  uint64_t size_bytes = 0;
  std::string kind;                           // "nvfp4-ct", "BF16", or "several".
  Spread sqnr_db;                             // Tensors with a finite one count.
  std::map<int64_t, Spread> by_layer;         // SQNR; key: layer.
  std::map<int64_t, Spread> scales_by_layer;  // log2 of the global scale as it multiplies.

  [[nodiscard]] double bits_per_weight() const;
};

struct SizeFacts {
  int64_t tensors = 0;
  int64_t elements = 0;
  uint64_t size_bytes = 0;

  void add(const LogicalTensor& tensor);
  [[nodiscard]] double bits_per_weight() const;
};

struct StoredFile {
  std::string name;
  uint64_t size_bytes = 0;
  size_t tensors = 0;
};

struct ReportData {
  std::string path;     // As typed.
  std::string against;  // Empty: none.
  std::string title;    // The last component of the path.
  CheckpointCheck check;
  std::vector<StoredFile> files;
  std::string declared;                        // The text of quantization_config; may be empty.
  uint64_t source_bytes = 0;                   // Size of the source's files; 0: unknown.
  std::map<std::string, SizeFacts> kinds;      // Key: "nvfp4-ct", "BF16", ...
  std::map<std::string, TypeFacts> quantized;  // Key: type.
  std::map<std::string, TypeFacts> kept;       // Plain tensors, by type.
  SizeFacts all;
  SizeFacts quantized_total;
  int64_t num_quantized_again = 0;
  int64_t num_identical = 0;

  [[nodiscard]] bool has_errors() const { return check.total.elements > 0; }
  // The quantized tensors with figures, worst first.
  [[nodiscard]] std::vector<const CheckedTensor*> worst() const;
};

// Checks and opens the checkpoint (and the source, for its size).
ReportData gather_report(const std::string& path, const CheckCheckpointOptions& options);

// The name of a tensor without numbers and without what stands before its layer.
std::string type_of(const std::string& tensor);
// The number of the layer; empty for tensors of none.
std::optional<int64_t> layer_of(const std::string& tensor);
// "nvfp4-ct" or "BF16".
std::string kind_of_tensor(const LogicalTensor& tensor);

}  // namespace narrowfloat::cli
