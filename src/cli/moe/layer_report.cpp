// For people, a table under a few lines about the layer; --csv is that table, --json has
// everything.
#include "cli/moe/layer_report.h"

#include <fmt/format.h>

#include "cli/json_output.h"
#include "cli/output.h"

namespace narrowfloat::cli {
namespace {

Json distance_json(const Distance& distance) {
  return Json{{"rel", json_number(distance.rel)}, {"row", json_number(distance.row)}};
}

void print_document(const MoeRunArguments& arguments, const LayerReport& report) {
  const MoeConfig& config = report.config;
  const LoadSummary load = summarise(report.load);
  Json document = json_document("moe run");
  document["version"] = version();
  document["cpu"] = cpu_info().model;
  document["threads"] = num_threads();
  document["device"] = to_string(arguments.device);
  document["machine"] = report.machine;
  document["model"] = arguments.model;
  document["layer"] = arguments.layer;
  document["hidden"] = config.hidden;
  document["inter"] = config.inter;
  document["experts"] = config.routing.experts;
  document["top_k"] = config.routing.top_k;
  document["routing"] = name(config.routing.method);
  document["activation"] = name(config.activation.kind);
  document["stored_format"] = report.stored_format;
  document["activations"] = report.activations.path;
  document["stored_logits"] = report.activations.has_stored_logits;
  document["tokens"] = report.activations.tokens;
  document["load"] = Json{{"hit", load.num_hit},
                          {"min", load.smallest},
                          {"mean", load.mean},
                          {"max", load.largest},
                          {"tokens_per_expert", report.load}};
  document["modes"] = Json::array();
  for (const LayerResult& result : report.modes) {
    const double seconds = result.timing.median_seconds;
    document["modes"].push_back(
        Json{{"mode", name(result.mode)},
             {"bits_per_weight", moe_mode_info(result.mode).bits_per_weight},
             {"error_to_unquantized",
              result.to_unquantized ? distance_json(*result.to_unquantized) : Json(nullptr)},
             {"error_to_fp64", distance_json(result.to_same_inputs)},
             {"runs", result.timing.num_runs},
             {"median_seconds", seconds},
             {"spread_percent", result.timing.spread_percent()},
             {"weight_bytes", result.work.weight_bytes},
             {"flops", result.work.flops},
             {"weight_gb_per_second", billions_per_second(result.work.weight_bytes, seconds)},
             {"gflop_per_second", billions_per_second(result.work.flops, seconds)}});
  }
  print_json(document);
}

std::string distance_text(double value) { return fmt::format("{:.2e}", value); }

Table mode_table(const LayerReport& report) {
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"bits_per_weight", kRight},
               {"rel_unquantized", kRight},
               {"row_unquantized", kRight},
               {"rel_fp64", kRight},
               {"row_fp64", kRight},
               {"median_ms", kRight},
               {"spread_percent", kRight},
               {"weights_gb_per_s", kRight},
               {"gflop_per_s", kRight}});
  for (const LayerResult& result : report.modes) {
    const double seconds = result.timing.median_seconds;
    const auto& exact = result.to_unquantized;
    table.add_row({std::string(name(result.mode)),
                   fmt::format("{:.3f}", moe_mode_info(result.mode).bits_per_weight),
                   exact ? distance_text(exact->rel) : "-", exact ? distance_text(exact->row) : "-",
                   distance_text(result.to_same_inputs.rel),
                   distance_text(result.to_same_inputs.row), fmt::format("{:.3f}", seconds * 1e3),
                   fmt::format("{:.0f}", result.timing.spread_percent()),
                   fmt::format("{:.2f}", billions_per_second(result.work.weight_bytes, seconds)),
                   fmt::format("{:.2f}", billions_per_second(result.work.flops, seconds))});
  }
  return table;
}

void print_table(const MoeRunArguments& arguments, const LayerReport& report) {
  const MoeConfig& config = report.config;
  const LoadSummary load = summarise(report.load);
  std::string text = fmt::format(
      "layer        {} of {}: {} experts, top {}, hidden {}, intermediate {}, {}, {}\n",
      arguments.layer, escaped(arguments.model), config.routing.experts, config.routing.top_k,
      config.hidden, config.inter, name(config.activation.kind), name(config.routing.method));
  text += fmt::format("weights      stored as {}\n", report.stored_format);
  text += fmt::format("activations  {} tokens of {}, router logits {}\n", report.activations.tokens,
                      escaped(report.activations.path),
                      report.activations.has_stored_logits ? "from there" : "computed");
  if (report.has_static_scales) text += "calibration  static scales from these activations\n";
  text +=
      fmt::format("load         {} of {} experts hit; tokens per expert: {} to {}, mean {:.1f}\n",
                  load.num_hit, report.load.size(), load.smallest, load.largest, load.mean);
  text += fmt::format("             experts by tokens: {}\n", load_histogram(report.load));
  const bool is_on_cpu = arguments.device.type == DeviceType::kCpu;
  text += fmt::format(
      "machine      {}, {}\n\n",
      is_on_cpu ? fmt::format("{} threads", num_threads()) : to_string(arguments.device),
      report.machine);
  text += mode_table(report).to_text(is_colored(arguments.output.color));
  text += "\nrel, row: relative error of all rows and of the worst one, against fp64 on ";
  text += "the unquantized weights\nand against fp64 on the same quantized weights and inputs.\n";
  if (!report.modes.empty() && !report.modes.front().to_unquantized) {
    text += "unquantized: not available; name the original model with --reference\n";
  }
  write_stdout(text);
}

}  // namespace

void print_report(const MoeRunArguments& arguments, const LayerReport& report) {
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, report);
  } else if (arguments.output.data == DataFormat::kCsv) {
    write_stdout(mode_table(report).to_csv());
  } else if (!arguments.output.is_quiet) {
    print_table(arguments, report);
  }
}

}  // namespace narrowfloat::cli
