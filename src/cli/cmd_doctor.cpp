// doctor says what belongs into a bug report: build, CPU, GPUs and what connects them, NCCL,
// environment variables, and for a typical matrix the choice of every operation.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/explanation_json.h"
#include "cli_common/command_line.h"
#include "cli_common/output.h"
#include "narrowfloat/allreduce.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kDoctorExamples = R"(Examples:
  narrowfloat doctor --json > bug-report.json
)";

struct DoctorArguments {
  OutputArguments output;
};

// Large enough for every implementation to be worth its while, and a multiple of every block.
constexpr int64_t kTypicalExtent = 4096;

// The implementation that an operation on a format would use on a device.
struct DoctorChoice {
  std::string_view op;
  std::string_view format;  // Empty for operations without formats.
  std::string device;
  Explanation explanation;
};

// The CPU, then every GPU that this build can see.
std::vector<Device> devices() {
  std::vector<Device> devices = {Device{}};
  const auto num_gpus = static_cast<int>(gpu_info().size());
  for (int i = 0; i < num_gpus; ++i) devices.push_back({DeviceType::kCuda, i});
  return devices;
}

// doctor is asked to find what keeps explain() from answering, such as a wrong NARROWFLOAT_FORCE:
// it becomes the answer.
Explanation explain_or_reason(std::string_view op, const ExplainRequest& request) {
  try {
    return explain(op, request);
  } catch (const Error& error) {
    Explanation explanation;
    explanation.op = op;
    explanation.candidates.push_back({.name = "error", .supported = false, .reason = error.what()});
    return explanation;
  }
}

std::vector<DoctorChoice> all_choices() {
  std::vector<DoctorChoice> choices;
  for (const Device device : devices()) {
    for (const std::string_view op : operations()) {
      ExplainRequest request{
          .scale_layout = {}, .rows = kTypicalExtent, .cols = kTypicalExtent, .device = device};
      if (!has_formats(op)) {
        choices.push_back({op, {}, to_string(device), explain_or_reason(op, request)});
        continue;
      }
      for (const FormatInfo& format : all_formats()) {
        request.format = format.id;
        choices.push_back({op, format.name, to_string(device), explain_or_reason(op, request)});
      }
    }
  }
  return choices;
}

Json to_json(const DoctorChoice& choice) {
  return Json{{"op", choice.op},
              {"format", choice.format.empty() ? Json(nullptr) : Json(choice.format)},
              {"device", choice.device},
              {"chosen", chosen_json(choice.explanation)},
              {"candidates", candidates_json(choice.explanation)}};
}

void print_doctor_document() {
  const BuildInfo build = build_info();
  const CpuInfo cpu = cpu_info();
  Json document = json_document("doctor");
  document["version"] = build.version;
  document["build"] = Json{{"compiler", build.compiler},
                           {"type", build.build_type},
                           {"cuda", build.cuda_enabled},
                           {"cuda_architectures", build.cuda_architectures}};
  document["cpu"] =
      Json{{"model", cpu.model}, {"logical_cores", cpu.logical_cores}, {"features", cpu.features}};
  document["gpus"] = Json::array();
  for (const GpuInfo& gpu : gpu_info()) {
    document["gpus"].push_back(Json{{"name", gpu.name},
                                    {"compute_capability", gpu.compute_capability},
                                    {"memory_bytes", gpu.memory_bytes},
                                    {"architecture", gpu.architecture}});
  }
  const NcclInfo nccl = nccl_info();
  document["nccl"] = Json{{"found", nccl.found},
                          {"version", nccl.version},
                          {"path", nccl.path},
                          {"reason", nccl.reason}};
  document["gpu_links"] = Json::array();
  for (const GpuLink& link : gpu_links()) {
    document["gpu_links"].push_back(Json{{"from", link.from},
                                         {"to", link.to},
                                         {"peer_access", link.peer_access},
                                         {"native_atomics", link.native_atomics},
                                         {"performance_rank", link.performance_rank}});
  }
  document["environment"] = environment_settings();
  document["implementations"] = Json::array();
  for (const DoctorChoice& choice : all_choices())
    document["implementations"].push_back(to_json(choice));
  print_json(document);
}

std::string or_none(const std::vector<std::string>& words, std::string_view separator) {
  return words.empty() ? "none" : escaped(fmt::format("{}", fmt::join(words, separator)));
}

// Which code of the build runs on a GPU.
std::string code_text(const std::string& architecture) {
  if (architecture.empty()) return "no code in this build";
  if (architecture.starts_with("compute_")) {
    return fmt::format("portable code, which the driver compiles from the PTX for {} and caches",
                       architecture);
  }
  return fmt::format("{} for sm_{}", architecture.ends_with('a') ? "code" : "portable code",
                     architecture);
}

std::string machine_text() {
  const BuildInfo build = build_info();
  const CpuInfo cpu = cpu_info();
  std::string text = fmt::format("narrowfloat  {}\n", build.version);
  text += fmt::format("build        {}, {}\n", build.build_type, build.compiler);
  const std::string architectures = or_none(build.cuda_architectures, ", ");
  text += fmt::format("CUDA         {}\n",
                      build.cuda_enabled ? "code for " + architectures : "not in this build");
  text += fmt::format("CPU          {}, {} logical cores\n", cpu.model, cpu.logical_cores);
  text += fmt::format("features     {}\n", or_none(cpu.features, " "));
  std::vector<std::string> gpus;
  for (const GpuInfo& gpu : gpu_info()) {
    gpus.push_back(fmt::format("{} ({}, {}, {})", gpu.name, gpu.compute_capability,
                               format_bytes(static_cast<uint64_t>(gpu.memory_bytes)),
                               code_text(gpu.architecture)));
  }
  text += fmt::format("GPUs         {}\n", or_none(gpus, "; "));
  const NcclInfo nccl = nccl_info();
  text += fmt::format("NCCL         {}\n",
                      escaped(nccl.found ? fmt::format("{}, {}", nccl.version, nccl.path)
                                         : fmt::format("not found: {}", nccl.reason)));
  text += fmt::format("environment  {}\n", or_none(environment_settings(), " "));
  return text;
}

std::string link_text(const GpuLink& link) {
  if (!link.peer_access) return "no peer access";
  return fmt::format("peer access, {}atomics, rank {}", link.native_atomics ? "" : "no ",
                     link.performance_rank);
}

// From a row's GPU to a column's; empty with fewer than two GPUs.
std::string links_text(bool colored) {
  const std::vector<GpuLink> links = gpu_links();
  if (links.empty()) return "";
  int num_gpus = 0;
  for (const GpuLink& link : links) num_gpus = std::max(num_gpus, link.from + 1);
  const auto gpu_name = [](int index) { return to_string(Device{DeviceType::kCuda, index}); };
  std::vector<Table::Column> columns = {{"from"}};
  for (int to = 0; to < num_gpus; ++to) columns.push_back({"to " + gpu_name(to)});
  Table table(columns);
  for (int from = 0; from < num_gpus; ++from) {
    std::vector<std::string> cells(columns.size(), "-");
    cells.front() = gpu_name(from);
    for (const GpuLink& link : links) {
      if (link.from == from) cells[static_cast<size_t>(link.to) + 1] = link_text(link);
    }
    table.add_row(cells);
  }
  return "\nLinks between GPUs, with the performance rank (0 is the best of this machine):\n" +
         table.to_text(colored);
}

// "name (reason); name (reason)" of the candidates that would not run.
std::string others_text(const Explanation& explanation) {
  std::string text;
  for (const Candidate& candidate : explanation.candidates) {
    if (candidate.name == explanation.chosen) continue;
    text += fmt::format("{}{} ({})", text.empty() ? "" : "; ", candidate.name,
                        escaped(candidate.reason));
  }
  return text;
}

// One row for all formats that get the same answer.
std::string choices_text(bool colored) {
  struct Group {
    DoctorChoice choice;
    std::vector<std::string_view> formats;
  };
  std::vector<Group> groups;
  std::map<std::string, size_t> group_of_answer;
  for (DoctorChoice& choice : all_choices()) {
    const std::string answer =
        fmt::format("{}|{}|{}|{}", choice.device, choice.op, choice.explanation.chosen,
                    others_text(choice.explanation));
    const auto [entry, is_new] = group_of_answer.try_emplace(answer, groups.size());
    if (is_new) groups.push_back({choice, {}});
    groups[entry->second].formats.push_back(choice.format);
  }
  Table table({{"device"}, {"operation"}, {"runs"}, {"formats"}, {"others"}});
  for (const Group& group : groups) {
    const Explanation& explanation = group.choice.explanation;
    const bool is_for_all =
        group.formats.size() == all_formats().size() || !has_formats(group.choice.op);
    table.add_row({group.choice.device, std::string(group.choice.op),
                   explanation.chosen.empty() ? "nothing" : explanation.chosen,
                   is_for_all ? "all" : fmt::format("{}", fmt::join(group.formats, " ")),
                   others_text(explanation)});
  }
  return fmt::format("What runs for {0}x{0} BF16, exact:\n{1}", kTypicalExtent,
                     table.to_text(colored));
}

ExitCode run_doctor(const DoctorArguments& arguments) {
  if (arguments.output.data == DataFormat::kJson) {
    print_doctor_document();
  } else if (!arguments.output.is_quiet) {
    const bool colored = is_colored(arguments.output.color);
    write_stdout(machine_text() + links_text(colored) + "\n" + choices_text(colored));
  }
  return ExitCode::kDone;
}

}  // namespace

void add_doctor(const Commands& commands) {
  CLI::App& command = add_command(commands, "doctor",
                                  "Show what this build and this machine can do", kDoctorExamples);
  DoctorArguments& arguments = arguments_of(command, commands, run_doctor);
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace narrowfloat::cli
