// The options of `narrowfloat-bench bench`, and the cases that it measures with --device: every
// combination of what was asked for, without those that a format does not have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli_common/output.h"
#include "cli_common/timing/machine.h"
#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

// The rows that a fused quantizer reads.
enum class QuantizeSource : int { kPlain, kSiluMul, kSmooth, kRmsNorm, kAddRmsNorm };
enum class SweepMode : int { kBandwidth, kComparison };
// Edges of the CUDA graph that calls are timed in.
enum class EdgeChoice : int { kBoth, kPlain, kProgrammatic };

// The block-FP8 activation of a MoE layer.
struct ActivationShape {
  int64_t top_k = 8;
  int64_t experts = 256;
  int64_t inter = 2048;
  int32_t tile = 8;
  bool has_bf16_input = false;  // Otherwise FP8 with 1x128 scales.
  bool has_inverse_map = true;  // A map from rows to slots, beside that from slots to rows.
};

// Sweeps over shapes, on the CPU or a GPU.
struct SweepArguments {
  std::optional<Device> device;
  SweepMode mode = SweepMode::kBandwidth;
  std::vector<int64_t> rows;  // Empty: the one of BenchArguments.
  std::vector<int64_t> cols;
  std::vector<ScaleLayoutId> layouts;  // Empty: the format's default.
  bool is_all_layouts = false;
  std::vector<QuantizeSource> sources;  // Empty: plain.
  bool is_scale_given = true;
  bool has_four_over_six = false;
  ActivationShape activation;
  std::vector<int64_t> tokens = {1, 32, 256, 1024, 4096, 16384};
  bool is_cache_warm = false;
  EdgeChoice edges = EdgeChoice::kBoth;
  double replay_ms = kReplayMs;
  int replays = 9;
  // Replaces the two above: calls are timed one by one for so long, without traffic beside them.
  std::optional<double> min_seconds;
  std::string commit;
};

struct BenchArguments {
  OutputArguments output;
  SweepArguments sweep;
  std::string op;                 // Empty: quantize and dequantize.
  std::vector<FormatId> formats;  // Empty: all.
  int64_t rows = 4096;
  int64_t cols = 4096;
  DType dtype = DType::kBF16;
  MathMode math = MathMode::kExact;
  int num_threads = 0;
  double min_seconds = 0.5;  // Without --device: seconds of timed runs for each case.
};

enum class BenchOp : int {
  kQuantize,
  kDequantize,
  kAmax,
  kRowAmax,
  kRelayout,
  kActivation,
  kGroupQuantize,
  kKvQuantize,
  kKvDequantize,
  kKvAppend,
  kShuffle,
  kPackBits
};
std::string_view name(BenchOp op);
std::string_view name(QuantizeSource source);

struct SweepCase {
  BenchOp op = BenchOp::kQuantize;
  FormatId format = FormatId::kNvfp4;  // Counts if has_format().
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  MathMode math = MathMode::kExact;
  DType dtype = DType::kBF16;  // The type of the high-precision side.
  QuantizeSource source = QuantizeSource::kPlain;
  bool is_scale_given = true;  // Counts where has_tensor_scale(format).
  bool has_four_over_six = false;
  int64_t rows = 0;  // kActivation: 0, the routing says how many.
  int64_t cols = 0;  // Columns of the quantized matrix; kActivation: of the result.
  ActivationShape activation;
  int64_t tokens = 0;  // kActivation only.

  [[nodiscard]] bool has_format() const {
    return op == BenchOp::kQuantize || op == BenchOp::kDequantize || op == BenchOp::kRelayout;
  }
};

// NVFP4 and FP8 per tensor have one scale of the whole tensor, given or computed.
bool has_tensor_scale(FormatId format);

// The layout that relayout() reads, so that `layout` is another one.
ScaleLayoutId source_layout(FormatId format, ScaleLayoutId layout);

// Whether the library takes the shape and the type, for the operations from kGroupQuantize on.
bool is_small_case_possible(const SweepCase& what);

// Throws kInvalidArgument where nothing is left.
std::vector<SweepCase> cases_of(const BenchArguments& arguments);

}  // namespace narrowfloat::cli
