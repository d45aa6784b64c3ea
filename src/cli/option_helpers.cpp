// Options that several commands share.
#include "cli/option_helpers.h"

#include <fmt/format.h>

#include "cli/size_text.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 done; 1 findings (a difference, a failed check); 2 usage; 3 I/O or malformed "
    "input;\n4 unsupported; 5 device fault or internal error; 130 interrupted.";

}  // namespace

CLI::App& add_command(CLI::App& app, const std::string& name, const std::string& description,
                      const std::string& examples) {
  CLI::App& command = *app.add_subcommand(name, description);
  command.footer(examples + "\n" + kExitCodes);
  return command;
}

CLI::Option* add_path(CLI::App& app, const std::string& name, std::string& path,
                      const std::string& help) {
  // A blank text hides CLI11's "TEXT REQUIRED": the usage line says it already.
  return app.add_option(name, path, help)->required()->option_text(" ");
}

void add_globs(CLI::App& app, const std::string& flag, std::vector<std::string>& globs,
               const std::string& help) {
  // Without this CLI11 takes every following word, SRC and DST included.
  app.add_option(flag, globs, help)->option_text("GLOB ...")->allow_extra_args(false);
}

void add_threads(CLI::App& app, int& num_threads) {
  app.add_option("--threads", num_threads,
                 "Worker threads; 0, the default, uses all cores. Results do not depend on it")
      ->option_text("N")
      ->check(CLI::Range(0, 65536));
}

void add_output(CLI::App& app, OutputArguments& output, CsvSupport csv) {
  CLI::Option* json = app.add_flag_callback(
      "--json", [&output] { output.data = DataFormat::kJson; }, "Print one JSON document");
  if (csv == CsvSupport::kYes) {
    app.add_flag_callback(
           "--csv", [&output] { output.data = DataFormat::kCsv; }, "Print comma-separated values")
        ->excludes(json)
        ->option_text(" ");
  }
  add_choice<ColorMode>(
      app, "--color",
      {{"auto", ColorMode::kAuto}, {"always", ColorMode::kAlways}, {"never", ColorMode::kNever}},
      output.color, "Colour: auto (default), always or never. auto obeys NO_COLOR and TERM")
      ->option_text("WHEN");
  CLI::Option* quiet =
      app.add_flag("-q,--quiet", output.is_quiet, "Print errors only")->option_text(" ");
  app.add_flag("-v,--verbose", output.is_verbose, "Print more")->excludes(quiet)->option_text(" ");
}

DType parse_target_dtype(const std::string& text) {
  const DType dtype = parse_dtype_option(text);
  if (dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32) return dtype;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("got '{}', expected bf16, fp16 or fp32", text));
}

std::string format_list() {
  std::string list;
  for (const FormatInfo& info : all_formats()) {
    list += fmt::format("{}{}", list.empty() ? "" : ", ", info.name);
  }
  return list;
}

}  // namespace narrowfloat::cli
