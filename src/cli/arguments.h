// What the user asked for: one struct for each command, filled and checked by parse_arguments().
// arguments.cpp is the only file that knows CLI11. A new command adds a struct here, its options
// there, and a run() in commands.h.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "cli/exit_code.h"
#include "narrowfloat/checkpoint.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {

enum class ColorMode : int { kAuto, kAlways, kNever };
enum class DataFormat : int { kTable, kJson, kCsv };
enum class ProgressMode : int { kAuto, kJson, kNone };

// How results are printed; every command has these.
struct OutputArguments {
  DataFormat data = DataFormat::kTable;
  ColorMode color = ColorMode::kAuto;
  bool is_quiet = false;    // Errors only; a document asked for with --json is still printed.
  bool is_verbose = false;  // More rows and columns, progress without a terminal.
};

struct QuantizeArguments {
  OutputArguments output;
  ProgressMode progress = ProgressMode::kAuto;
  int num_threads = 0;
  std::string source;
  std::string target;
  QuantizeCheckpointOptions options;
};

struct DequantizeArguments {
  OutputArguments output;
  ProgressMode progress = ProgressMode::kAuto;
  int num_threads = 0;
  std::string source;
  std::string target;
  DequantizeCheckpointOptions options;
};

struct InspectArguments {
  OutputArguments output;
  std::string path;
  std::vector<std::string> tensor_globs;  // Empty: all tensors.
};

struct DiffArguments {
  OutputArguments output;
  int num_threads = 0;
  std::string a;
  std::string b;
};

struct ExplainArguments {
  OutputArguments output;
  std::string op;
  ExplainRequest request;
};

struct DoctorArguments {
  OutputArguments output;
};

// What a fused quantizer reads.
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
  bool has_bf16_input = false;  // Else FP8 with 1x128 scales.
  bool has_inverse_map = true;  // From rows to slots, beside that from slots to rows.
};

// `bench --device`: sweeps over shapes, on the CPU or a GPU.
struct SweepArguments {
  std::optional<Device> device;
  SweepMode mode = SweepMode::kBandwidth;
  std::vector<int64_t> rows;  // Empty: those of BenchArguments.
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
  double replay_ms = 3;
  int replays = 9;
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
  double min_seconds = 0.5;  // Of timed runs, for each case.
};

struct EvalArguments {
  OutputArguments output;
  std::string model;
  std::string text;  // Empty: calibration/heldout.txt of the model.
  std::vector<MoeMode> modes;
  bool has_fp32 = false;
  bool is_all_modes = false;   // As where no mode is named.
  uint64_t num_bytes = 32768;  // Of the text; 0: all.
  int num_threads = 0;
};

struct MoeRunArguments {
  OutputArguments output;
  Device device;
  std::string model;
  int64_t layer = 0;
  std::vector<MoeMode> modes;  // Empty: one that fits the stored weights.
  bool is_all_modes = false;   // That the stored weights can be computed in.
  std::string activations;     // Empty: calibration/activations.safetensors of the model.
  std::string reference;       // The unquantized model, where `model` is quantized.
  std::string routing_target;  // File for the experts of every token; empty: none.
  int64_t max_tokens = 0;      // 0: all.
  int num_threads = 0;
  double min_seconds = 0.5;
};

struct MoeBenchArguments {
  OutputArguments output;
  Device device;
  std::string shape;
  std::vector<int64_t> tokens = {1, 8, 64, 512};
  std::vector<MoeMode> modes;  // Empty: the shape's own.
  bool is_all_modes = false;
  std::string routing = "uniform";  // Or "zipf", or a file.
  int32_t rank = 0;                 // Of `num_ranks` that share the experts.
  int32_t num_ranks = 1;
  uint64_t max_memory_bytes = 0;  // 0: six tenths of what is available.
  std::optional<int32_t> token_tile;
  std::string tuning;  // A file; empty: the rule.
  bool has_stages = false;
  int num_threads = 0;
  double min_seconds = 0.5;
  std::string commit;
};

// One grouped GEMM: rows [M, K] times weights [G, N, K].
struct MoeGemmArguments {
  OutputArguments output;
  Device device;
  int64_t n = 0;
  int64_t k = 0;
  int32_t groups = 0;
  std::vector<int64_t> rows;
  MoeMode mode = MoeMode::kFp8Block;
  std::optional<int32_t> token_tile;
  int num_threads = 0;
  double min_seconds = 0.5;
  std::string commit;
};

struct MoeTuneArguments {
  OutputArguments output;
  Device device;
  std::string shape;
  std::vector<int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
  std::vector<MoeMode> modes;  // Empty: the shape's own.
  bool is_all_modes = false;
  std::string routing = "uniform";
  int32_t rank = 0;
  int32_t num_ranks = 1;
  uint64_t max_memory_bytes = 0;
  std::string target;      // Empty: nothing is written.
  bool is_forced = false;  // An existing target is replaced.
  int num_threads = 0;
  double min_seconds = 0.5;
};

struct MoeExplainArguments {
  OutputArguments output;
  Device device;
  std::string shape;
  std::vector<int64_t> tokens = {1};
  std::vector<MoeMode> modes;  // Empty: the shape's own.
  bool is_all_modes = false;
  int32_t rank = 0;
  int32_t num_ranks = 1;
  std::optional<int32_t> token_tile;
  std::string tuning;  // A file; empty: the rule.
};

using Command =
    std::variant<QuantizeArguments, DequantizeArguments, InspectArguments, DiffArguments,
                 ExplainArguments, DoctorArguments, BenchArguments, EvalArguments, MoeRunArguments,
                 MoeBenchArguments, MoeGemmArguments, MoeTuneArguments, MoeExplainArguments>;

// The answer to --help, --version or a wrong command line: nothing is left to run.
struct Reply {
  ExitCode code = ExitCode::kDone;
  std::string to_stdout;
  std::string to_stderr;
};

std::variant<Command, Reply> parse_arguments(int argc, const char* const* argv);

}  // namespace narrowfloat::cli
