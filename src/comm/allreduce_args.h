// A rank's arguments as kernels and CPU ranks take them: plain pointers and numbers that were
// checked before.
#pragma once

#include <cstdint>

#include "comm/moe_value.h"
#include "comm/workspace_layout.h"
#include "formats/block_format.h"
#include "tensor/layouts/scale_extents.h"

namespace narrowfloat {

enum class AllReduceSource : int { kInput = 0, kMoeReduction = 1, kMoeFinalize = 2 };

struct SourceArgs {
  AllReduceSource kind = AllReduceSource::kInput;
  const void* input = nullptr;  // E [tokens, hidden]
  MoeReductionArgs reduction;
  MoeFinalizeArgs finalize;
};

// The arguments of what follows the sum. Outputs that are not wanted are null.
struct EpilogueArgs {
  bool has_norm = false;
  AllReduceQuantization quantization = AllReduceQuantization::kNone;
  int64_t tokens = 0;
  int64_t hidden = 0;
  void* ar_out = nullptr;  // E [tokens, hidden], as all tensors but the quantized ones.
  const void* residual_in = nullptr;
  void* residual_out = nullptr;
  const void* gamma = nullptr;  // E [hidden]
  void* norm_out = nullptr;
  float eps = 0.0F;
  float weight_bias = 0.0F;

  uint8_t* quant_out = nullptr;  // hidden or hidden / 2 bytes a row.
  void* scale_out = nullptr;
  float* row_scale_out = nullptr;       // kNvfp4PerToken, and scale_out of kFp8Token.
  const float* global_scale = nullptr;  // kFp8Tensor: decode scale; kNvfp4: encode scale.
  ScaleLayoutId scale_layout = ScaleLayoutId::kLinear;
  ScaleExtents scale_extents;  // Logical: tokens x blocks.
  BlockRules rules;            // kFp8Block1x128, kMxfp4, kMxfp8.
  int32_t group = 0;           // kFp8GroupUe8m0.
  int64_t scale_words = 0;     // Words of four bytes that scale_out holds.
};

// The host reads here how far calls on a GPU have come. A kernel writes both words at once.
struct alignas(8) CallProgress {
  uint32_t is_running = 0;
  uint32_t ended = 0;  // Calls; wraps.
};

// Where a kernel tells that the exchange of a call has ended. Null: nowhere.
struct EndOfExchange {
  uint32_t* ended = nullptr;         // CallProgress::ended, in device memory.
  CallProgress* progress = nullptr;  // In memory that the host reads.
};

struct RankArgs {
  RankMemory memory;
  SourceArgs source;
  EpilogueArgs epilogue;
  AllReduceAccumulation accumulation = AllReduceAccumulation::kFp32;
  EndOfExchange end_of_exchange;  // Calls whose exchange is NCCL's use it.
};

}  // namespace narrowfloat
