// narrowfloat doctor: what belongs into a bug report. Build, CPU, GPUs, environment variables, and
// for a typical matrix which implementation every operation would use and why the others would not.
#include <map>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/size_text.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

// Large enough for every implementation to be worth its while, and a multiple of every block.
constexpr int64_t kTypicalExtent = 4096;

// What an operation on a format would use on a device.
struct Choice {
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

// What keeps explain() from answering, such as a wrong NARROWFLOAT_FORCE, is what doctor is asked
// to find: it becomes the answer.
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

std::vector<Choice> all_choices() {
  std::vector<Choice> choices;
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

// All candidates: a bug report has to say why the expected one did not run.
Json to_json(const Choice& choice) {
  Json candidates = Json::array();
  for (const Candidate& candidate : choice.explanation.candidates) {
    candidates.push_back(Json{{"name", candidate.name},
                              {"supported", candidate.supported},
                              {"reason", candidate.reason}});
  }
  const std::string& chosen = choice.explanation.chosen;
  return Json{{"op", choice.op},
              {"format", choice.format.empty() ? Json(nullptr) : Json(choice.format)},
              {"device", choice.device},
              {"chosen", chosen.empty() ? Json(nullptr) : Json(chosen)},
              {"candidates", candidates}};
}

void print_document() {
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
                                    {"memory_bytes", gpu.memory_bytes}});
  }
  document["environment"] = environment_settings();
  document["implementations"] = Json::array();
  for (const Choice& choice : all_choices()) document["implementations"].push_back(to_json(choice));
  print_json(document);
}

std::string or_none(const std::vector<std::string>& words, std::string_view separator) {
  return words.empty() ? "none" : escaped(fmt::format("{}", fmt::join(words, separator)));
}

std::string machine_text() {
  const BuildInfo build = build_info();
  const CpuInfo cpu = cpu_info();
  std::string text = fmt::format("narrowfloat  {}\n", build.version);
  text += fmt::format("build        {}, {}\n", build.build_type, build.compiler);
  const std::string architectures = or_none(build.cuda_architectures, ", ");
  text += fmt::format("CUDA         {}\n",
                      build.cuda_enabled ? "code for sm_" + architectures : "not in this build");
  text += fmt::format("CPU          {}, {} logical cores\n", cpu.model, cpu.logical_cores);
  text += fmt::format("features     {}\n", or_none(cpu.features, " "));
  std::vector<std::string> gpus;
  for (const GpuInfo& gpu : gpu_info()) {
    gpus.push_back(fmt::format("{} ({}, {})", gpu.name, gpu.compute_capability,
                               format_bytes(static_cast<uint64_t>(gpu.memory_bytes))));
  }
  text += fmt::format("GPUs         {}\n", or_none(gpus, "; "));
  text += fmt::format("environment  {}\n", or_none(environment_settings(), " "));
  return text;
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
    Choice choice;
    std::vector<std::string_view> formats;
  };
  std::vector<Group> groups;
  std::map<std::string, size_t> group_of_answer;
  for (Choice& choice : all_choices()) {
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

}  // namespace

ExitCode run(const DoctorArguments& arguments) {
  if (arguments.output.data == DataFormat::kJson) {
    print_document();
  } else if (!arguments.output.is_quiet) {
    write_stdout(machine_text() + "\n" + choices_text(is_colored(arguments.output.color)));
  }
  return ExitCode::kDone;
}

}  // namespace narrowfloat::cli
