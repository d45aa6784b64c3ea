// The command line as a whole: commands, --version, --help, and the answer to a wrong one.
#include "cli/arguments.h"

#include <string_view>

#include <fmt/format.h>

#include "cli/option_helpers.h"
#include "cli/output.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kDescription =
    "Quantize checkpoints to block-scaled 4-bit and 8-bit floating point, look into them, and "
    "measure\nwhat it cost.";
constexpr const char* kFooter = R"(Start here:
  narrowfloat quantize MODEL OUT --to nvfp4    quantize a directory with config.json and shards
  narrowfloat inspect OUT                      what is in it now
  narrowfloat diff MODEL OUT                   how much accuracy it cost
Every command has --help with examples and exit codes. Documentation: docs/cli.md)";

// Three lines; the first has nothing but the name and the version, for scripts.
std::string version_text() {
  const BuildInfo info = build_info();
  std::string backends = "cpu";
  if (info.cuda_enabled) {
    backends += fmt::format(", cuda ({})", fmt::join(info.cuda_architectures, ", "));
  }
  return fmt::format("narrowfloat {}\nbuild: {}, {}\nbackends: {}", info.version, info.build_type,
                     info.compiler, backends);
}

// All commands' arguments; the parser fills the chosen one.
struct AllArguments {
  QuantizeArguments quantize;
  DequantizeArguments dequantize;
  InspectArguments inspect;
  DiffArguments diff;
  ExplainArguments explain;
  DoctorArguments doctor;
  BenchArguments bench;
  EvalArguments eval;
  MoeArguments moe;
};

void add_all(CLI::App& app, AllArguments& all) {
  add_quantize(app, all.quantize);
  add_dequantize(app, all.dequantize);
  add_inspect(app, all.inspect);
  add_diff(app, all.diff);
  add_explain(app, all.explain);
  add_doctor(app, all.doctor);
  add_bench(app, all.bench);
  add_eval(app, all.eval);
  add_moe(app, all.moe);
}

// REQUIRES: exactly one command was parsed.
Command chosen_command(const CLI::App& app, AllArguments& all) {
  if (app.got_subcommand("quantize")) return all.quantize;
  if (app.got_subcommand("dequantize")) return all.dequantize;
  if (app.got_subcommand("inspect")) return all.inspect;
  if (app.got_subcommand("diff")) return all.diff;
  if (app.got_subcommand("explain")) return all.explain;
  if (app.got_subcommand("doctor")) return all.doctor;
  if (app.got_subcommand("bench")) return all.bench;
  if (app.got_subcommand("eval")) return all.eval;
  const CLI::App& moe = *app.get_subcommand("moe");
  if (moe.got_subcommand("run")) return all.moe.run;
  if (moe.got_subcommand("gemm")) return all.moe.gemm;
  if (moe.got_subcommand("tune")) return all.moe.tune;
  if (moe.got_subcommand("explain")) return all.moe.explain;
  return all.moe.bench;
}

std::string command_list(const CLI::App& app) {
  std::string list;
  for (const CLI::App* command : app.get_subcommands({})) {
    list += (list.empty() ? "" : ", ") + command->get_name();
  }
  return list;
}

// The words of the chosen command, " moe run", and the command without one where words are missing.
struct ChosenCommand {
  std::string words;
  const CLI::App* incomplete = nullptr;
};
ChosenCommand chosen_words(const CLI::App& app) {
  ChosenCommand chosen;
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    chosen.words += " " + command->get_name();
  }
  if (!command->get_subcommands({}).empty()) chosen.incomplete = command;
  return chosen;
}

// CLI11's message names the option; what is added says where to look for the right one. Messages
// may quote what the user typed.
Reply usage_error(const CLI::App& app, std::string message) {
  const ChosenCommand chosen = chosen_words(app);
  if (chosen.incomplete != nullptr) {
    message += fmt::format("; the commands are {}", command_list(*chosen.incomplete));
  }
  return {ExitCode::kUsage, "",
          fmt::format("narrowfloat{}: {}\nTry: narrowfloat{} --help\n", chosen.words,
                      escaped(message), chosen.words)};
}

}  // namespace

std::variant<Command, Reply> parse_arguments(int argc, const char* const* argv) {
  CLI::App app(kDescription, "narrowfloat");
  app.footer(kFooter);
  app.set_version_flag("--version", version_text, "Print version, build and backends");
  // At most one: otherwise the second word of `bench quantize` would start a second command.
  app.require_subcommand(0, 1);
  AllArguments all;
  add_all(app, all);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Reply{ExitCode::kDone, app.help(), ""};
  } catch (const CLI::CallForVersion& version) {
    return Reply{ExitCode::kDone, std::string(version.what()) + "\n", ""};
  } catch (const CLI::ParseError& error) {
    return usage_error(app, error.what());
  }
  if (chosen_words(app).incomplete != nullptr) return usage_error(app, "no command given");
  return chosen_command(app, all);
}

}  // namespace narrowfloat::cli
