// The text report is a few lines about the layer, then a table of the cases and one of the stages.
// --csv prints the first table, --json everything.
#include "bench_cli/moe_bench_report.h"

#include <fmt/format.h>

#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

bool is_checked(const MoeBenchResult& result) { return result.check.tokens > 0; }

std::string verdict_text(Verdict verdict) {
  switch (verdict) {
    case Verdict::kCorrect:
      return "correct";
    case Verdict::kWrong:
      return "WRONG";
    case Verdict::kNotChecked:
      return "not checked";
  }
  return "";
}

Json verdict_json(Verdict verdict) {
  return verdict == Verdict::kNotChecked ? Json(nullptr) : Json(verdict == Verdict::kCorrect);
}

Json error_json(const MoeBenchResult& result) {
  if (!is_checked(result)) return nullptr;
  const Distance& error = result.check.error;
  return Json{{"rel", json_number(error.rel)}, {"row", json_number(error.row)}};
}

std::string error_text(const MoeBenchResult& result, double error) {
  return is_checked(result) ? fmt::format("{:.2e}", error) : "-";
}

double floor_of(const MoeBenchReport& report, const MoeConfig& config, const LayerWork& work) {
  WorkRates rates{.gb_per_s = report.rates.read_gb_per_s};
  if (report.is_on_gpu) {
    rates.gb_per_s = report.rates.copy_gb_per_s;
    rates.tflop_per_s = fastest_tflop_per_s(config.mode, report.machine.compute_capability);
  }
  return floor_seconds(work, rates);
}

// The part of a layer's weights and operations that a stage has.
double gemm_share(const MoeConfig& config, MoeStage stage) {
  const bool is_gated = activation_info(config.activation.kind).is_gated;
  if (stage == MoeStage::kFirstGemm) return is_gated ? 2.0 / 3 : 0.5;
  if (stage == MoeStage::kSecondGemm) return is_gated ? 1.0 / 3 : 0.5;
  return 0;
}

Json stages_json(const MoeConfig& config, const MoeBenchResult& result) {
  Json stages = Json::array();
  for (const StageTime& stage : result.stages) {
    const double share = gemm_share(config, stage.stage);
    const double seconds = stage.median_us * 1e-6;
    stages.push_back(Json{
        {"stage", name(stage.stage)},
        {"median_seconds", seconds},
        {"launches", stage.launches},
        {"weight_gb_per_second", billions_per_second(share * result.work.weight_bytes, seconds)},
        {"gflop_per_second", billions_per_second(share * result.work.flops, seconds)}});
  }
  return stages;
}

Json case_json(const ModeResults& mode, const MoeBenchResult& result,
               const MoeBenchReport& report) {
  const MoeConfig& config = mode.config;
  const double mean = result.time.mean_us() * 1e-6;
  const double floor = floor_of(report, config, result.work);
  return Json{{"mode", name(config.mode)},
              {"implementation", mode.implementation},
              {"tokens", result.tokens},
              {"token_tile", result.token_tile},
              {"experts", config.routing.experts},
              {"local_experts", config.local_experts},
              {"expert_offset", config.expert_offset},
              {"experts_hit", result.experts_hit},
              {"local_slots", result.local_slots},
              {"largest_load", result.largest_load},
              {"runs", result.time.num_calls()},
              {"total_seconds", result.time.total_us * 1e-6},
              {"median_seconds", result.time.median_us * 1e-6},
              {"lower_quartile_seconds", result.time.lower_quartile_us * 1e-6},
              {"upper_quartile_seconds", result.time.upper_quartile_us * 1e-6},
              {"p10_seconds", result.time.p10_us * 1e-6},
              {"p90_seconds", result.time.p90_us * 1e-6},
              {"processor_seconds",
               report.is_on_gpu ? Json(nullptr) : Json(result.time.processor_us * 1e-6)},
              {"launches", report.is_on_gpu ? Json(result.launches) : Json(nullptr)},
              {"weight_bytes", result.work.weight_bytes},
              {"bytes", result.work.weight_bytes + result.work.other_bytes},
              {"flops", result.work.flops},
              {"floor_seconds", floor},
              {"percent_of_floor", percent_of(floor, mean)},
              {"weight_gb_per_second", billions_per_second(result.work.weight_bytes, mean)},
              {"read_gb_per_second", report.rates.read_gb_per_s},
              {"gflop_per_second", billions_per_second(result.work.flops, mean)},
              {"stages", stages_json(config, result)},
              {"checked_tokens", result.check.tokens},
              {"error_to_fp64", error_json(result)},
              {"correct", verdict_json(result.check.verdict)}};
}

void print_document(const MoeBenchArguments& arguments, const MoeBenchReport& report) {
  const MoeShape& shape = report.shape;
  Json document = json_document("moe bench");
  document["version"] = version();
  document["commit"] = arguments.commit;
  document["cpu"] = cpu_info().model;
  document["threads"] = num_threads();
  document["device"] = to_string(arguments.device);
  // Both kinds of devices have this field beside the name, because fields of documents stay.
  document["machine"] = report.machine.name;
  if (report.is_on_gpu) {
    document["gpu"] = machine_json(report.machine, arguments.device);
    document["rates"] = rates_json(report.rates);
  }
  document["environment"] = environment_settings();
  document["shape"] = shape.name;
  document["hidden"] = shape.hidden;
  document["inter"] = shape.inter;
  document["experts"] = shape.routing.experts;
  document["top_k"] = shape.routing.top_k;
  document["routing_method"] = name(shape.routing.method);
  document["activation"] = name(shape.activation.kind);
  document["gate_order"] = name(shape.gate_order);
  document["bias"] = shape.has_bias;
  document["routing"] = arguments.routing;
  document["rank"] = arguments.layer.shard.rank;
  document["ranks"] = arguments.layer.shard.num_ranks;
  document["min_seconds"] = arguments.min_seconds;
  document["rest_seconds"] = arguments.rest_seconds;
  document["fast_sums"] = arguments.fast_sums;
  document["notes"] = report.notes;
  document["cases"] = Json::array();
  for (const ModeResults& mode : report.modes) {
    for (const MoeBenchResult& result : mode.cases) {
      document["cases"].push_back(case_json(mode, result, report));
    }
  }
  print_json(document);
}

// Microseconds count on a GPU.
std::string ms_text(double seconds) {
  return fmt::format("{:.{}f}", seconds * 1e3, seconds < 0.01 ? 4 : 3);
}

// The table is printed as text and as CSV: the names of the columns carry the units.
Table case_table(const MoeBenchReport& report) {
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"implementation", kLeft},
               {"tokens", kRight},
               {"experts", kRight},
               {"local_experts", kRight},
               {"hit", kRight},
               {"slots", kRight},
               {"tile", kRight},
               {"launches", kRight},
               {"median_ms", kRight},
               {"spread_percent", kRight},
               {"floor_ms", kRight},
               {"percent_of_floor", kRight},
               {"weights_gb_per_s", kRight},
               {"percent_of_read", kRight},
               {"gflop_per_s", kRight},
               {"rel_fp64", kRight},
               {"row_fp64", kRight},
               {"result", kLeft}});
  for (const auto& [config, implementation, cases] : report.modes) {
    for (const MoeBenchResult& result : cases) {
      const double mean = result.time.mean_us() * 1e-6;
      const double rate = billions_per_second(result.work.weight_bytes, mean);
      const double floor = floor_of(report, config, result.work);
      table.add_row(
          {std::string(name(config.mode)), implementation, std::to_string(result.tokens),
           std::to_string(config.routing.experts), std::to_string(config.local_experts),
           fmt::format("{:.4g}", result.experts_hit), fmt::format("{:.6g}", result.local_slots),
           std::to_string(result.token_tile),
           report.is_on_gpu ? std::to_string(result.launches) : "-",
           ms_text(result.time.median_us * 1e-6),
           fmt::format("{:.0f}", result.time.spread_percent()), ms_text(floor),
           fmt::format("{:.0f}", percent_of(floor, mean)), fmt::format("{:.2f}", rate),
           fmt::format("{:.0f}", percent_of(rate, report.rates.read_gb_per_s)),
           fmt::format("{:.2f}", billions_per_second(result.work.flops, mean)),
           error_text(result, result.check.error.rel), error_text(result, result.check.error.row),
           verdict_text(result.check.verdict)},
          result.check.verdict == Verdict::kWrong ? Tone::kBad : Tone::kPlain);
    }
  }
  return table;
}

Table stage_table(const MoeBenchReport& report) {
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"tokens", kRight},
               {"stage", kLeft},
               {"launches", kRight},
               {"median_ms", kRight},
               {"percent_of_layer", kRight},
               {"weights_gb_per_s", kRight},
               {"gflop_per_s", kRight}});
  for (const ModeResults& mode : report.modes) {
    for (const MoeBenchResult& result : mode.cases) {
      for (const StageTime& stage : result.stages) {
        const double share = gemm_share(mode.config, stage.stage);
        const double seconds = stage.median_us * 1e-6;
        const auto rate = [&](double amount) {
          return share > 0 ? fmt::format("{:.2f}", billions_per_second(share * amount, seconds))
                           : "-";
        };
        table.add_row({std::string(name(mode.config.mode)), std::to_string(result.tokens),
                       std::string(name(stage.stage)),
                       report.is_on_gpu ? std::to_string(stage.launches) : "-", ms_text(seconds),
                       fmt::format("{:.0f}", percent_of(stage.median_us, result.time.median_us)),
                       rate(result.work.weight_bytes), rate(result.work.flops)});
      }
    }
  }
  return table;
}

void print_table(const MoeBenchArguments& arguments, const MoeBenchReport& report) {
  const MoeShape& shape = report.shape;
  std::string text =
      fmt::format("{}: hidden {}, intermediate {}, {} experts, top {}, {}, {}{}; routing {}\n",
                  shape.name, shape.hidden, shape.inter, shape.routing.experts, shape.routing.top_k,
                  name(shape.routing.method), name(shape.activation.kind),
                  shape.has_bias ? ", bias" : "", escaped(arguments.routing));
  if (arguments.layer.shard.num_ranks > 1) {
    text +=
        fmt::format("rank {} of {}\n", arguments.layer.shard.rank, arguments.layer.shard.num_ranks);
  }
  for (const std::string& note : report.notes) text += note + "\n";
  const std::string where =
      report.is_on_gpu ? to_string(arguments.device) : fmt::format("{} threads", num_threads());
  text += fmt::format("{}, {}, memory is read at {:.2f} GB/s\n\n", where, report.machine.name,
                      report.rates.read_gb_per_s);
  const bool colored = is_colored(arguments.output.color);
  text += case_table(report).to_text(colored);
  if (arguments.has_stages) text += '\n' + stage_table(report).to_text(colored);
  write_stdout(text);
}

}  // namespace

void print_report(const MoeBenchArguments& arguments, const MoeBenchReport& report) {
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, report);
  } else if (arguments.output.data == DataFormat::kCsv) {
    // This is no column, because CSV files of several runs are put together.
    if (!arguments.output.is_quiet) {
      for (const std::string& note : report.notes) warn(note);
    }
    write_stdout(case_table(report).to_csv());
  } else if (!arguments.output.is_quiet) {
    print_table(arguments, report);
  }
}

}  // namespace narrowfloat::cli
