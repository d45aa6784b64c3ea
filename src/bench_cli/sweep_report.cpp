// Three forms of the same numbers. Names of columns and fields carry the units; a time without
// further word is the median, of programmatic edges where those were measured.
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "bench_cli/measure.h"
#include "cli_common/output.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

std::string shape_text(const SweepCase& what) {
  if (what.op == BenchOp::kActivation) {
    return fmt::format("{} tokens x {}", what.tokens, what.cols);
  }
  return fmt::format("{}x{}", what.rows, what.cols);
}

// "given" or "amax"; empty where the format has no scale of the whole tensor.
std::string_view scale_text(const SweepCase& what) {
  if (what.op != BenchOp::kQuantize || !has_tensor_scale(what.format)) return "";
  return what.is_scale_given ? "given" : "amax";
}

double floor_us(const SweepResult& result, const MachineRates& rates) {
  return rates.copy_gb_per_s > 0
             ? static_cast<double>(result.total_bytes()) / rates.copy_gb_per_s / 1e3
             : 0;
}

double percent_of_copy(const SweepResult& result, const MachineRates& rates) {
  return percent_of(result.gb_per_s(), rates.copy_gb_per_s);
}

Json optional_json(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json time_json(const std::optional<CallTime>& time) {
  if (!time) return nullptr;
  return Json{{"median_us", time->median_us},
              {"p10_us", time->p10_us},
              {"p90_us", time->p90_us},
              {"calls", time->calls},
              {"replays", time->replays}};
}

Json what_json(const SweepCase& what) {
  const bool is_activation = what.op == BenchOp::kActivation;
  Json json{{"op", name(what.op)}};
  json["format"] = what.has_format() ? Json(name(what.format)) : Json(nullptr);
  json["layout"] = what.has_format() ? Json(name(what.layout)) : Json(nullptr);
  json["math"] = name(what.math);
  json["dtype"] = name(what.dtype);
  json["source"] = name(what.source);
  json["encode_scale"] = scale_text(what).empty() ? Json(nullptr) : Json(scale_text(what));
  json["four_over_six"] = what.has_four_over_six;
  json["rows"] = is_activation ? Json(nullptr) : Json(what.rows);
  json["cols"] = what.cols;
  if (is_activation) {
    json["tokens"] = what.tokens;
    json["top_k"] = what.activation.top_k;
    json["experts"] = what.activation.experts;
    json["tile"] = what.activation.tile;
    json["input"] = what.activation.has_bf16_input ? "bf16" : "fp8";
    json["maps"] = what.activation.has_inverse_map ? "both" : "slots";
  }
  return json;
}

Json case_json(const Measured& measured, const MachineRates& rates) {
  const SweepResult& result = measured.result;
  Json json = what_json(measured.what);
  json["implementation"] = result.implementation;
  json["read_bytes"] = result.read_bytes;
  json["write_bytes"] = result.write_bytes;
  json["buffer_sets"] = result.buffer_sets;
  json["plain"] = time_json(result.plain);
  json["programmatic"] = time_json(result.programmatic);
  json["memory_only_us"] = optional_json(result.memory_only_us);
  json["memory_only_programmatic_us"] = optional_json(result.memory_only_programmatic_us);
  json["floor_us"] = floor_us(result, rates);
  json["gb_per_s"] = result.gb_per_s();
  json["percent_of_copy"] = percent_of_copy(result, rates);
  json["checked_with"] = result.checked_with;
  json["correct"] = result.is_correct();
  json["message"] = result.wrong;
  json["note"] = result.note;
  return json;
}

void print_document(const BenchArguments& arguments, const Machine& machine,
                    const MachineRates& rates, const std::vector<Measured>& cases) {
  Json document = json_document("bench");
  document["version"] = version();
  document["commit"] = arguments.sweep.commit;
  document["machine"] = machine_json(machine.facts(), machine.device());
  document["cpu"] = cpu_info().model;
  document["threads"] = num_threads();
  document["l2"] = arguments.sweep.is_cache_warm ? "warm" : "cold";
  document["rates"] = rates_json(rates);
  document["environment"] = environment_settings();
  document["cases"] = Json::array();
  for (const Measured& measured : cases) document["cases"].push_back(case_json(measured, rates));
  print_json(document);
}

std::string us_text(double us) { return fmt::format("{:.{}f}", us, us < 100 ? 2 : 1); }

std::string us_text(const std::optional<double>& us) { return us ? us_text(*us) : "-"; }

std::string us_text(const std::optional<CallTime>& time) {
  return time ? us_text(time->median_us) : "-";
}

std::string result_text(const SweepResult& result) {
  if (result.is_correct()) return "correct";
  if (result.error == ErrorKind::kUnsupported) return "unsupported";
  return result.error ? "ERROR" : "WRONG";
}

std::string spread_text(const CallTime* time) {
  return time == nullptr ? "-" : us_text(time->p10_us) + "-" + us_text(time->p90_us);
}

// The table is printed as text and as CSV.
Table case_table(const std::vector<Measured>& cases, const MachineRates& rates) {
  using enum Table::Align;
  Table table({{"op"},
               {"format"},
               {"layout"},
               {"math"},
               {"dtype"},
               {"source"},
               {"scale"},
               {"shape", kRight},
               {"plain_us", kRight},
               {"pdl_us", kRight},
               {"p10_p90_us", kRight},
               {"memory_only_us", kRight},
               {"memory_only_pdl_us", kRight},
               {"floor_us", kRight},
               {"gb_per_s", kRight},
               {"percent_of_copy", kRight},
               {"implementation"},
               {"result"}});
  for (const auto& [what, result] : cases) {
    const bool has_format = what.has_format();
    std::string scale(scale_text(what));
    if (what.has_four_over_six) scale += "+4/6";
    table.add_row(
        {std::string(name(what.op)), has_format ? std::string(name(what.format)) : "-",
         has_format ? std::string(name(what.layout)) : "-", std::string(name(what.math)),
         std::string(name(what.dtype)), std::string(name(what.source)), scale.empty() ? "-" : scale,
         shape_text(what), us_text(result.plain), us_text(result.programmatic),
         spread_text(result.headline()), us_text(result.memory_only_us),
         us_text(result.memory_only_programmatic_us), us_text(floor_us(result, rates)),
         fmt::format("{:.0f}", result.gb_per_s()),
         fmt::format("{:.1f}", percent_of_copy(result, rates)),
         result.implementation.empty() ? "-" : result.implementation, result_text(result)},
        result.is_correct() ? Tone::kPlain : Tone::kBad);
  }
  return table;
}

// Formats side by side: "us (percent of copy)".
std::string cell_text(const Measured& measured, const MachineRates& rates) {
  const SweepResult& result = measured.result;
  const CallTime* const time = result.headline();
  if (!result.is_correct() || time == nullptr) return result_text(result);
  return fmt::format("{} us ({:.0f} %)", us_text(time->median_us), percent_of_copy(result, rates));
}

// A line of the comparison names what its cells have in common. Layouts are named where they were
// asked for: otherwise every format has its own.
std::string line_text(const SweepArguments& sweep, const SweepCase& what) {
  std::string line = fmt::format("{}  {}", shape_text(what), name(what.op));
  const bool has_layouts = !sweep.layouts.empty() || sweep.is_all_layouts;
  if (what.has_format() && has_layouts) line += fmt::format(" {}", name(what.layout));
  if (what.source != QuantizeSource::kPlain) line += fmt::format(" {}", name(what.source));
  return line;
}

Table comparison_table(const SweepArguments& sweep, const std::vector<Measured>& cases,
                       const MachineRates& rates) {
  std::vector<std::string> formats;
  std::vector<std::string> lines;
  std::map<std::pair<std::string, std::string>, std::string> cells;
  const auto add_once = [](std::vector<std::string>& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const Measured& measured : cases) {
    const SweepCase& what = measured.what;
    const std::string format(what.has_format() ? name(what.format) : "all");
    const std::string line = line_text(sweep, what);
    add_once(formats, format);
    add_once(lines, line);
    cells[{line, format}] = cell_text(measured, rates);
  }
  std::vector<Table::Column> columns = {{"case"}};
  for (const std::string& format : formats) columns.push_back({format, Table::Align::kRight});
  Table table(columns);
  for (const std::string& line : lines) {
    std::vector<std::string> row = {line};
    for (const std::string& format : formats) {
      const auto cell = cells.find({line, format});
      row.push_back(cell == cells.end() ? "-" : cell->second);
    }
    table.add_row(row);
  }
  return table;
}

std::string heading(const BenchArguments& arguments, const Machine& machine,
                    const MachineRates& rates) {
  const MachineFacts& facts = machine.facts();
  std::string text = fmt::format("{}: {}", to_string(machine.device()), facts.name);
  if (!facts.driver.empty()) {
    text += fmt::format(", driver {}, CUDA {}", facts.driver, facts.cuda_runtime);
  }
  text += fmt::format(
      "\ncopy {:.0f} GB/s (kernel {:.0f}, own {:.0f}), 2 reads : 1 write {:.0f}, read only {:.0f}; "
      "{} cache\n",
      rates.copy_gb_per_s, rates.kernel_copy_gb_per_s, rates.own_copy_gb_per_s,
      rates.mixed_gb_per_s, rates.read_gb_per_s, arguments.sweep.is_cache_warm ? "warm" : "cold");
  return text;
}

// One line for each different message.
std::string messages(const std::vector<Measured>& cases) {
  std::vector<std::string> seen;
  std::string text;
  for (const Measured& measured : cases) {
    const std::string& message = measured.result.wrong;
    if (message.empty() || std::find(seen.begin(), seen.end(), message) != seen.end()) continue;
    seen.push_back(message);
    text += fmt::format("{}: {} {}: {}\n", program_name(), name(measured.what.op),
                        shape_text(measured.what), message);
  }
  return text;
}

}  // namespace

void print_sweep(const BenchArguments& arguments, const Machine& machine, const MachineRates& rates,
                 const std::vector<Measured>& cases) {
  write_stderr(messages(cases));
  const bool colored = is_colored(arguments.output.color);
  const Table table = arguments.sweep.mode == SweepMode::kComparison
                          ? comparison_table(arguments.sweep, cases, rates)
                          : case_table(cases, rates);
  switch (arguments.output.data) {
    case DataFormat::kJson:
      return print_document(arguments, machine, rates, cases);
    case DataFormat::kCsv:
      return write_stdout(table.to_csv());
    case DataFormat::kTable:
      if (arguments.output.is_quiet) return;
      write_stdout(heading(arguments, machine, rates));
      return write_stdout(table.to_text(colored));
  }
}

}  // namespace narrowfloat::cli
