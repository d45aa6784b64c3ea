// Decides how each weight of a conversion is converted, before anything is written: from the block
// scales of the source and, where these do not suffice, from its codes.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layers/convert_plan.h"
#include "layers/exact_conversion.h"
#include "layers/memory_plan.h"
#include "layers/scale_originals.h"

namespace narrowfloat {

enum class Mapping : int {
  kKeep = 0,        // The same format: codes and block scales stay.
  kPowers = 1,      // MXFP4 to NVFP4.
  kMerge = 2,       // NVFP4 to MXFP4.
  kWiden = 3,       // MXFP4 to MXFP8.
  kSpread = 4,      // FP8 blocks of 128x128 to MXFP8.
  kRequantize = 5,  // Anything else.
};

// A global scale as the target stores it.
struct ConvertedScale {
  float value = 1;
  double change = 0;  // Relative, of the reciprocal's rounding.
};

struct WeightConversion {
  TargetWeight weight;
  Mapping mapping = Mapping::kRequantize;
  bool is_exact = false;
  std::string reason;  // Why not.
  std::string scale_key;
  PowerWindow window;
  int exponent = 0;  // kPowers: of the largest block scale. kMerge: of the global scale.
  ConvertedScale global;
  std::optional<float> input_scale;  // As the target stores it.

  [[nodiscard]] const LogicalTensor& source() const { return *weight.sources.front().tensor; }
  // Errors are measured where there may be some.
  [[nodiscard]] bool has_values() const { return !is_exact && mapping != Mapping::kKeep; }
  [[nodiscard]] int64_t num_blocks() const {
    const FormatInfo& format = format_info(weight.spec->info.format);
    return weight.all_rows() * ((weight.cols + format.block_cols - 1) / format.block_cols);
  }
};

struct Conversions {
  std::vector<std::unique_ptr<WeightConversion>> weights;
  // Those that share a global scale which follows from all of them. Key: scale_key.
  std::map<std::string, std::vector<WeightConversion*>> groups;
  ScaleOriginals originals;  // They belong into the target.
  std::vector<std::string> warnings;
};

// Reads of the source within the budget of `memory`. Throws kCorruptData for bad scales of tensors,
// kUnsupported for those that the target cannot hold. `keep_formats`: as in
// ConvertCheckpointOptions; each weight keeps its activation scale, too.
Conversions decide_conversions(const Checkpoint& source, std::vector<TargetWeight> weights,
                               bool keep_formats, MemoryPlan& memory);

// Rows of `row_bytes` of a stored tensor, without those between them.
std::vector<std::byte> read_rows(const Checkpoint& source, const SourceRows& rows,
                                 const std::string& part, uint64_t row_bytes, int64_t count,
                                 int64_t first = 0);

}  // namespace narrowfloat
