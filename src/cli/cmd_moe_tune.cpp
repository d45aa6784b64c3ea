// narrowfloat moe tune: measures token tiles of a layer with made-up weights, and writes those that
// are faster than the rule by a margin into a file that layers can take. A result outside of its
// tolerance is exit code 1.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/json_output.h"
#include "cli/moe/bench_config.h"
#include "cli/moe/gpu_layer.h"
#include "cli/moe/tune_case.h"
#include "cli/output.h"
#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

struct TuneReport {
  MoeShape shape;
  std::string machine;
  std::vector<std::string> notes;
  std::vector<std::pair<MoeConfig, std::vector<TuneResult>>> modes;
  std::vector<MoeTuningEntry> entries;
};

bool is_tuned(const TuneResult& result) { return result.best_tile != result.rule_tile; }

Json case_json(const MoeConfig& config, const TuneResult& result) {
  Json tiles = Json::array();
  for (const TileTime& time : result.tiles) {
    tiles.push_back(Json{{"token_tile", time.token_tile}, {"us", time.us}, {"gain", time.gain}});
  }
  return Json{{"mode", name(config.mode)},
              {"tokens", result.tokens},
              {"experts", config.routing.experts},
              {"local_experts", config.local_experts},
              {"rule_tile", result.rule_tile},
              {"rule_us", result.rule_us},
              {"tiles", tiles},
              {"best_tile", result.best_tile},
              {"best_us", result.best_us},
              {"tuned", is_tuned(result)},
              {"correct", result.verdict == Verdict::kNotChecked
                              ? Json(nullptr)
                              : Json(result.verdict == Verdict::kCorrect)}};
}

void print_document(const MoeTuneArguments& arguments, const TuneReport& report) {
  Json document = json_document("moe tune");
  document["version"] = version();
  document["device"] = to_string(arguments.device);
  document["machine"] = report.machine;
  document["threads"] = num_threads();
  document["environment"] = environment_settings();
  document["shape"] = report.shape.name;
  document["routing"] = arguments.routing;
  document["rank"] = arguments.rank;
  document["ranks"] = arguments.num_ranks;
  document["min_gain"] = MoeTuning::kMinGain;
  document["target"] = arguments.target;
  document["entries"] = report.entries.size();
  document["notes"] = report.notes;
  document["cases"] = Json::array();
  for (const auto& [config, results] : report.modes) {
    for (const TuneResult& result : results) document["cases"].push_back(case_json(config, result));
  }
  print_json(document);
}

std::string us_text(double us) { return fmt::format("{:.{}f}", us, us < 1000 ? 2 : 0); }

void print_table(const MoeTuneArguments& arguments, const TuneReport& report) {
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"tokens", kRight},
               {"rule_tile", kRight},
               {"rule_us", kRight},
               {"best_tile", kRight},
               {"best_us", kRight},
               {"all_us", kLeft},
               {"result", kLeft}});
  for (const auto& [config, results] : report.modes) {
    for (const TuneResult& result : results) {
      std::string all;
      for (const TileTime& time : result.tiles) {
        all += fmt::format("{}{}: {}", all.empty() ? "" : ", ", time.token_tile, us_text(time.us));
      }
      const bool is_wrong = result.verdict == Verdict::kWrong;
      table.add_row({std::string(name(config.mode)), std::to_string(result.tokens),
                     std::to_string(result.rule_tile), us_text(result.rule_us),
                     std::to_string(result.best_tile), us_text(result.best_us), all,
                     is_wrong           ? "WRONG"
                     : is_tuned(result) ? "tuned"
                                        : "rule"},
                    is_wrong           ? Tone::kBad
                    : is_tuned(result) ? Tone::kGood
                                       : Tone::kPlain);
    }
  }
  std::string text =
      fmt::format("{} on {}, {}\n", report.shape.name, to_string(arguments.device), report.machine);
  for (const std::string& note : report.notes) text += note + "\n";
  text += '\n';
  text += table.to_text(is_colored(arguments.output.color));
  if (!arguments.target.empty()) {
    text += fmt::format("\n{} entries in {}\n", report.entries.size(), escaped(arguments.target));
  }
  write_stdout(text);
}

// Nobody loses a tuning that took minutes.
void check_target(const MoeTuneArguments& arguments) {
  if (arguments.target.empty() || arguments.is_forced) return;
  if (!std::filesystem::exists(arguments.target)) return;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("--out {}: it exists; --force replaces it", printable(arguments.target)));
}

// The file that --out names: TARGET.partial until it is complete. Made before the first run, so
// that a missing folder shows then, and what stood in TARGET stays until it can be replaced.
class TargetFile {
 public:
  // Without a path nothing is made or written.
  explicit TargetFile(const std::string& path) : path_(path), partial_(path + ".partial") {
    if (path_.empty()) return;
    if (std::filesystem::exists(path_) && !std::filesystem::is_regular_file(path_)) {
      refuse("it is not a regular file");
    }
    file_.open(partial_, std::ios::binary | std::ios::trunc);
    if (!file_) refuse("it cannot be made");
  }
  TargetFile(const TargetFile&) = delete;
  TargetFile& operator=(const TargetFile&) = delete;
  ~TargetFile() {
    if (path_.empty()) return;
    std::error_code ignored;
    std::filesystem::remove(partial_, ignored);
  }

  void write(const MoeTuning& tuning) {
    if (path_.empty()) return;
    file_ << tuning.to_json();
    file_.close();
    std::error_code error;
    if (file_) std::filesystem::rename(partial_, path_, error);
    if (!file_ || error) refuse("it cannot be written");
  }

 private:
  [[noreturn]] void refuse(const char* what) const {
    throw Error(ErrorKind::kIo, fmt::format("--out {}: {}", printable(path_), what));
  }

  std::string path_;
  std::string partial_;
  std::ofstream file_;
};

void check_room(const MoeConfig& config, const MoeShape& shape) {
  if (config.routing.experts == shape.routing.experts) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      fmt::format("--shape {}: only {} of {} experts fit into memory in mode {}, and a "
                  "tuning is for all of them; see --max-memory, --ep",
                  shape.name, config.routing.experts, shape.routing.experts, name(config.mode)));
}

}  // namespace

ExitCode run(const MoeTuneArguments& arguments) {
  set_num_threads(arguments.num_threads);
  check_target(arguments);
  std::vector<int64_t> tokens = arguments.tokens;
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  TuneReport report;
  report.shape = parse_moe_shape(arguments.shape);
  const std::unique_ptr<Machine> gpu = open_layer_machine(arguments.device);
  report.machine = gpu == nullptr ? cpu_info().model : gpu->facts().name;
  const uint64_t memory = memory_limit(arguments.max_memory_bytes, gpu.get());
  const ExpertShard shard{arguments.rank, arguments.num_ranks};
  // All of them before the first run: no mistake shows after minutes.
  for (const MoeMode mode :
       bench_modes(report.shape, arguments.modes, arguments.is_all_modes, report.notes)) {
    const MoeConfig config = bench_config(report.shape, mode, shard, tokens.back(), memory);
    check_room(config, report.shape);
    report.modes.emplace_back(config, std::vector<TuneResult>{});
  }
  TargetFile target(arguments.target);
  ExitCode code = ExitCode::kDone;
  for (auto& [config, results] : report.modes) {
    results = tune_tiles({.config = config,
                          .has_bias = report.shape.has_bias,
                          .shape_experts = report.shape.routing.experts,
                          .routing = arguments.routing,
                          .min_seconds = arguments.min_seconds,
                          .gpu = gpu.get()},
                         tokens);
    for (const TuneResult& result : results) {
      if (result.verdict == Verdict::kWrong) code = ExitCode::kFindings;
    }
    const std::vector<MoeTuningEntry> entries =
        tuning_entries(moe_tuning_key(config, arguments.device), results);
    report.entries.insert(report.entries.end(), entries.begin(), entries.end());
  }
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, report);
  } else if (!arguments.output.is_quiet) {
    print_table(arguments, report);
  }
  // Behind the output: whoever cannot write has the results.
  target.write(MoeTuning(report.entries));
  return code;
}

}  // namespace narrowfloat::cli
