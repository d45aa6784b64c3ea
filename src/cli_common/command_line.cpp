// Numbers are read with from_chars, which knows no locale and reports overflow.
#include "cli_common/command_line.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <csignal>
#include <exception>
#include <new>
#include <system_error>
#include <variant>

#include <fmt/format.h>

#include "narrowfloat/format.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 done; 1 findings (a difference, a failed check); 2 usage; 3 I/O or malformed "
    "input; 4 unsupported; 5 device fault or internal error; 130 interrupted.";
constexpr std::string_view kBugHint =
    "this is a device fault or a bug of narrowfloat: please report it with the output of "
    "`narrowfloat doctor`";

// The answer to --help, --version or a wrong command line: no command is left to run.
struct Reply {
  ExitCode code = ExitCode::kDone;
  std::string to_stdout;
  std::string to_stderr;
};

// Three lines; the first has nothing but the name and the version, for scripts.
std::string version_text(const std::string& program) {
  const BuildInfo info = build_info();
  std::string backends = "cpu";
  if (info.cuda_enabled) {
    backends += fmt::format(", cuda ({})", fmt::join(info.cuda_architectures, ", "));
  }
  return fmt::format("{} {}\nbuild: {}, {}\nbackends: {}", program, info.version, info.build_type,
                     info.compiler, backends);
}

std::string command_list(const CLI::App& app) {
  std::string list;
  for (const CLI::App* command : app.get_subcommands({})) {
    list += (list.empty() ? "" : ", ") + command->get_name();
  }
  return list;
}

// The words of the chosen command, "moe run", and the command without one where words are missing.
struct ChosenCommand {
  std::string words;
  const CLI::App* incomplete = nullptr;
};
ChosenCommand chosen_words(const CLI::App& app) {
  ChosenCommand chosen;
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    chosen.words += (chosen.words.empty() ? "" : " ") + command->get_name();
  }
  if (!command->get_subcommands({}).empty()) chosen.incomplete = command;
  return chosen;
}

// CLI11's message names the option; what is added says where to look for the right one. Messages
// may quote what the user typed.
Reply usage_error(const CLI::App& app, const std::string& words, const std::string& message) {
  const std::string command = words.empty() ? app.get_name() : app.get_name() + " " + words;
  return {
      ExitCode::kUsage, "",
      fmt::format("{}: error: {}\nTry: {} --help\n", app.get_name(), escaped(message), command)};
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string closest = closest_word(word, candidates);
  return closest.empty() ? "" : fmt::format("; did you mean '{}'?", closest);
}

// The message for a first word that is no command; empty if it is one, or none is there.
std::optional<Reply> wrong_command(const CLI::App& app, int argc, const char* const* argv) {
  const CLI::App* command = &app;
  for (int i = 1; i < argc && !command->get_subcommands({}).empty(); ++i) {
    const std::string_view word = argv[i];
    if (word.starts_with('-')) return std::nullopt;
    std::vector<std::string> names;
    const CLI::App* next = nullptr;
    for (const CLI::App* sub : command->get_subcommands({})) {
      names.push_back(sub->get_name());
      if (sub->get_name() == word) next = sub;
    }
    if (next == nullptr) {
      const std::string closest = did_you_mean(to_lower(word), names);
      return usage_error(app, command_words(*command),
                         fmt::format("there is no command '{}'{}; the commands are {}", word,
                                     closest, command_list(*command)));
    }
    command = next;
  }
  return std::nullopt;
}

// The command that was chosen, and the options that its words are not.
std::string wrong_option(const CLI::App& app, int argc, const char* const* argv) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  std::vector<std::string> names;
  for (const CLI::Option* option : command->get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = std::string_view(argv[i]).substr(
        0, std::min(std::string_view(argv[i]).find('='), std::string_view(argv[i]).size()));
    if (!word.starts_with("--") || word == "--") continue;
    if (std::find(names.begin(), names.end(), word) != names.end()) continue;
    return did_you_mean(word, names);
  }
  return "";
}

using Call = std::function<ExitCode()>;

// Commands that every program has.
void add_own_commands(CLI::App& app, Call& chosen) {
  CLI::App& completion =
      add_command({app, chosen}, "completion", "Print a completion script for bash, zsh or fish",
                  fmt::format("Examples:\n  {0} completion bash "
                              "> ~/.local/share/bash-completion/completions/{0}\n",
                              app.get_name()));
  struct Completion {
    std::string (*script)(const CLI::App& app) = nullptr;
  };
  const auto shell = std::make_shared<Completion>();
  using Script = std::string (*)(const CLI::App&);
  add_choice<Script>(
      completion, "SHELL",
      {{"bash", bash_completion}, {"zsh", zsh_completion}, {"fish", fish_completion}},
      shell->script, "bash, zsh or fish")
      ->required()
      ->option_text(" ");
  completion.final_callback([&app, shell, &chosen] {
    chosen = [text = shell->script(app)] {
      write_stdout(text);
      return ExitCode::kDone;
    };
  });
  CLI::App& manual =
      add_command({app, chosen}, "man", "Print the manual page, for man(1)",
                  fmt::format("Examples:\n  {0} man > {0}.1 && man -l {0}.1\n", app.get_name()));
  manual.final_callback([&app, &chosen] {
    chosen = [text = manual_page(app, version())] {
      write_stdout(text);
      return ExitCode::kDone;
    };
  });
}

std::variant<Call, Reply> parse(const Program& program, int argc, const char* const* argv) {
  CLI::App app(program.description, program.name);
  app.formatter(make_help_formatter(help_width()));
  app.footer(program.footer);
  app.set_version_flag(
      "-V,--version", [&program] { return version_text(program.name); },
      "Print version, build and backends");
  // At most one: otherwise the second word of `bench quantize` would start a second command.
  app.require_subcommand(0, 1);
  Call chosen;
  program.add_commands({app, chosen});
  add_own_commands(app, chosen);
  if (std::optional<Reply> reply = wrong_command(app, argc, argv)) return *std::move(reply);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Reply{ExitCode::kDone, app.help(), ""};
  } catch (const CLI::CallForVersion& version) {
    return Reply{ExitCode::kDone, std::string(version.what()) + "\n", ""};
  } catch (const CLI::ExtrasError& error) {
    return usage_error(app, chosen_words(app).words, error.what() + wrong_option(app, argc, argv));
  } catch (const CLI::ParseError& error) {
    return usage_error(app, chosen_words(app).words, error.what());
  }
  const ChosenCommand words = chosen_words(app);
  if (words.incomplete != nullptr) {
    return usage_error(
        app, words.words,
        fmt::format("no command given; the commands are {}", command_list(*words.incomplete)));
  }
  return chosen;
}

ExitCode answer(const Reply& reply) {
  write_stdout(reply.to_stdout);
  write_stderr(reply.to_stderr);
  return reply.code;
}

// The word "error" in the line tells messages that end the program from warnings.
ExitCode fail(ExitCode code, std::string_view message) {
  write_stderr(fmt::format("{}: error: {}\n", program_name(), message));
  if (code == ExitCode::kInternal) write_stderr(fmt::format("{}: {}\n", program_name(), kBugHint));
  return code;
}

// Exceptions other than Error come from the standard library: memory, threads, or a bug.
ExitCode run(const Program& program, int argc, const char* const* argv) {
  try {
    const std::variant<Call, Reply> parsed = parse(program, argc, argv);
    if (const Reply* reply = std::get_if<Reply>(&parsed)) return answer(*reply);
    return std::get<Call>(parsed)();
  } catch (const Error& error) {
    return fail(exit_code(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(ExitCode::kInput,
                "out of memory: free some, or ask for less (--max-memory, --tokens, --bytes)");
  } catch (const std::system_error& error) {
    return fail(ExitCode::kInput, error.what());
  } catch (const std::exception& error) {
    return fail(ExitCode::kInternal, error.what());
  }
}

// The text is quoted as it is: whoever prints the message escapes it.
[[noreturn]] void refuse(std::string_view text, std::string_view expected) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("got '{}', expected {}", text, expected));
}

// Suffixes in lower case and what they multiply by.
struct Unit {
  std::string_view suffix;
  double factor;
};
constexpr double kKi = 1024;
constexpr std::array<Unit, 14> kUnits = {{{"", 1},
                                          {"b", 1},
                                          {"k", 1e3},
                                          {"kb", 1e3},
                                          {"kib", kKi},
                                          {"m", 1e6},
                                          {"mb", 1e6},
                                          {"mib", kKi* kKi},
                                          {"g", 1e9},
                                          {"gb", 1e9},
                                          {"gib", kKi* kKi* kKi},
                                          {"t", 1e12},
                                          {"tb", 1e12},
                                          {"tib", kKi* kKi* kKi* kKi}}};

// False for a text that is not one number in whole, or a number that does not fit.
template <typename Number>
bool reads_all(std::string_view text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number);
  return result.ec == std::errc{} && result.ptr == end;
}

// CLI11 takes a number with a leading zero for an octal one, so that 010 would become 8.
bool starts_as_octal(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  return text.size() > 1 && text[0] == '0' &&
         std::isdigit(static_cast<unsigned char>(text[1])) != 0;
}

template <typename Number>
Check check_of_range(Number low, Number high, const char* what) {
  return [=](const std::string& text) {
    Number number = 0;
    const bool is_in_range = reads_all(text, number) && number >= low && number <= high;
    if (!is_in_range) {
      return fmt::format("got '{}', expected {} from {} to {}", text, what, low, high);
    }
    if (starts_as_octal(text)) {
      return fmt::format("got '{}', expected {} without leading zeros", text, what);
    }
    return std::string();
  };
}

// Above every real matrix, and far below where sizes in bits overflow.
constexpr int64_t kMaxShapeElements = int64_t{1} << 40;

int64_t parse_extent(std::string_view digits, std::string_view whole) {
  int64_t value = 0;
  if (!reads_all(digits, value) || value < 0) {
    refuse(whole, "rows x columns such as 4096x4096");
  }
  return value;
}

}  // namespace

int run_program(const Program& program, int argc, const char* const* argv) {
  set_program_name(program.name);
  reserve_standard_streams();
  // A reader that closes its end shows up as EPIPE, which write_stdout() knows, instead of killing
  // the program in the middle of a file.
  std::signal(SIGPIPE, SIG_IGN);
  // Likewise a file that grows over the limit of the shell (ulimit -f) is EFBIG, which is reported.
  std::signal(SIGXFSZ, SIG_IGN);
  return static_cast<int>(run(program, argc, argv));
}

CLI::App& add_command(const Commands& commands, const std::string& name,
                      const std::string& description, const std::string& examples) {
  CLI::App& command = *commands.app.add_subcommand(name, description);
  command.footer(examples + "\n" + kExitCodes);
  return command;
}

Commands add_group(const Commands& commands, const std::string& name,
                   const std::string& description) {
  CLI::App& group = *commands.app.add_subcommand(name, description);
  group.require_subcommand(0, 1);
  return {group, commands.chosen};
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
      ->check(whole_number_in(0, 65536));
}

CLI::Option* add_min_time(CLI::App& app, double& min_seconds, const std::string& help) {
  return app.add_option("--min-time", min_seconds, help)
      ->option_text("S")
      ->check(number_in(0, 3600));
}

Check whole_number_in(int64_t low, int64_t high) {
  return check_of_range(low, high, "a whole number");
}

Check number_in(double low, double high) { return check_of_range(low, high, "a number"); }

CLI::Option* add_commit(CLI::App& app, std::string& commit) {
  return app.add_option("--commit", commit, "Text for the document: what was measured")
      ->option_text("TEXT");
}

void add_checked_device(CLI::App& app, Device& device) {
  add_parsed_into(app, "--device", parse_device, device,
                  "cpu (default), cuda or cuda:N; results are checked on the CPU")
      ->option_text("DEVICE");
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

uint64_t parse_bytes(std::string_view text) {
  constexpr std::string_view kExpected =
      "a size such as 500M (powers of 1000: K, M, G, T) or 2GiB (powers of 1024: KiB, MiB, GiB, "
      "TiB)";
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  if (result.ec != std::errc{} || std::signbit(value)) refuse(text, kExpected);
  std::string_view suffix(result.ptr, static_cast<size_t>(end - result.ptr));
  while (suffix.starts_with(' ')) suffix.remove_prefix(1);
  const std::string lower = to_lower(suffix);
  const auto unit = std::find_if(kUnits.begin(), kUnits.end(),
                                 [&](const Unit& candidate) { return candidate.suffix == lower; });
  if (unit == kUnits.end()) refuse(text, kExpected);
  const double size = value * unit->factor;
  // Also refuses "inf" and "nan", which from_chars reads.
  if (!(size < 0x1p63)) refuse(text, "a size below 2^63 bytes");
  return static_cast<uint64_t>(std::llround(size));
}

MatrixShape parse_shape(std::string_view text) {
  const size_t cross = text.find_first_of("xX");
  if (cross == std::string_view::npos) refuse(text, "rows x columns such as 4096x4096");
  const MatrixShape shape = {parse_extent(text.substr(0, cross), text),
                             parse_extent(text.substr(cross + 1), text)};
  if (std::max(shape.rows, shape.cols) > kMaxShapeElements ||
      (shape.cols > 0 && shape.rows > kMaxShapeElements / shape.cols)) {
    refuse(text, "at most 2^40 elements");
  }
  return shape;
}

MatrixShape parse_nonempty_shape(std::string_view text) {
  const MatrixShape shape = parse_shape(text);
  if (shape.rows == 0 || shape.cols == 0) refuse(text, "at least one row and one column");
  return shape;
}

int64_t parse_count(std::string_view text, int64_t low, int64_t high, std::string_view expected) {
  int64_t value = 0;
  if (!reads_all(text, value) || value < low || value > high) refuse(text, expected);
  return value;
}

std::vector<int64_t> parse_count_list(std::string_view text, int64_t high,
                                      std::string_view expected) {
  std::vector<int64_t> counts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    counts.push_back(parse_count(text.substr(begin, comma - begin), 1, high, expected));
    begin = comma + 1;
  }
  return counts;
}

DType parse_dtype_option(std::string_view text) {
  const std::string lower = to_lower(text);
  if (lower == "bf16") return DType::kBF16;
  if (lower == "fp16") return DType::kF16;
  if (lower == "fp32") return DType::kF32;
  if (const std::optional<DType> dtype = parse_dtype(text)) return *dtype;
  refuse(text, "bf16, fp16 or fp32");
}

DType parse_target_dtype(std::string_view text) {
  const DType dtype = parse_dtype_option(text);
  if (dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32) return dtype;
  refuse(text, "bf16, fp16 or fp32");
}

Device parse_device(std::string_view text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceType::kCuda, 0};
  constexpr std::string_view kCuda = "cuda:";
  if (text.starts_with(kCuda)) {
    Device device{DeviceType::kCuda, 0};
    if (reads_all(text.substr(kCuda.size()), device.index) && device.index >= 0) return device;
  }
  refuse(text, "cpu or cuda:N, N counted from 0");
}

std::string to_lower(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

std::string format_list() {
  std::string list;
  for (const FormatInfo& info : all_formats()) {
    list += fmt::format("{}{}", list.empty() ? "" : ", ", info.name);
  }
  return list;
}

}  // namespace narrowfloat::cli
