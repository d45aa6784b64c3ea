// The two programs share this part of their command lines: commands and options are declared with
// CLI11, values of options are read, and the command that was asked for is run.
// Only files that declare commands include this, because CLI11 is slow to compile.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli_common/help.h"
#include "cli_common/output.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

// A program or a group of its commands, such as `moe`, while its commands are declared.
struct Commands {
  CLI::App& app;
  std::function<ExitCode()>& chosen;  // The call of the command that was parsed.
};

struct Program {
  std::string name;
  std::string description;
  std::string footer;
  void (*add_commands)(const Commands& commands);
};

// Reads the command line, runs one command, and turns whatever went wrong into a message on stderr
// and an exit code. Nothing escapes it: main() returns what it returns.
int run_program(const Program& program, int argc, const char* const* argv);

// Declares a command with its help text; the exit codes are added to the examples.
CLI::App& add_command(const Commands& commands, const std::string& name,
                      const std::string& description, const std::string& examples);
// Declares a command that only has commands of its own.
Commands add_group(const Commands& commands, const std::string& name,
                   const std::string& description);

// The arguments that the options of `command` fill. They live as long as it does, and run() gets
// them if the command is chosen.
template <typename Arguments>
Arguments& arguments_of(CLI::App& command, const Commands& commands,
                        ExitCode (*run)(const Arguments&)) {
  const auto arguments = std::make_shared<Arguments>();
  command.final_callback([arguments, run, &chosen = commands.chosen] {
    chosen = [arguments, run] { return run(*arguments); };
  });
  return *arguments;
}

// Options that several commands have.
CLI::Option* add_path(CLI::App& app, const std::string& name, std::string& path,
                      const std::string& help);
void add_globs(CLI::App& app, const std::string& flag, std::vector<std::string>& globs,
               const std::string& help);
void add_threads(CLI::App& app, int& num_threads);
// Checks of an option's text, for CLI11's check(): what is wrong with it, or nothing. CLI::Range
// would take NaN, which is neither below nor above it, and says "not in range" of words.
using Check = std::function<std::string(const std::string& text)>;
Check whole_number_in(int64_t low, int64_t high);
Check number_in(double low, double high);
CLI::Option* add_min_time(
    CLI::App& app, double& min_seconds,
    const std::string& help = "Seconds of timed runs for each case; default 0.5");
// --commit, a text for the document.
CLI::Option* add_commit(CLI::App& app, std::string& commit);
// --device of results that are checked on the CPU.
void add_checked_device(CLI::App& app, Device& device);
enum class CsvSupport : int { kNo, kYes };
// --json, --csv, --color, --quiet, --verbose.
void add_output(CLI::App& app, OutputArguments& output, CsvSupport csv);

// Readers of values. All throw kInvalidArgument with what was expected, as the library's own do.
//
// "1500000", "1.5M", "2 GB" are powers of 1000, "2GiB" of 1024. Case does not matter.
uint64_t parse_bytes(std::string_view text);
struct MatrixShape {
  int64_t rows = 0;
  int64_t cols = 0;
};
// "4096x4096".
MatrixShape parse_shape(std::string_view text);
// The same with at least one row and one column.
MatrixShape parse_nonempty_shape(std::string_view text);
// A whole number in [low, high].
int64_t parse_count(std::string_view text, int64_t low, int64_t high, std::string_view expected);
// "1,8,64": each from 1 to `high`.
std::vector<int64_t> parse_count_list(std::string_view text, int64_t high,
                                      std::string_view expected);
// "bf16", "fp16" or "fp32", and the spellings of safetensors files ("BF16", "F8_E4M3", ...).
DType parse_dtype_option(std::string_view text);
// "bf16", "fp16" or "fp32" only.
DType parse_target_dtype(std::string_view text);
// "cpu", "cuda" (that is cuda:0) or "cuda:N".
Device parse_device(std::string_view text);

// "nvfp4, nvfp4_per_token, ...".
std::string format_list();

std::string to_lower(std::string_view text);

// `parse` of names that are all in lower case, for text in any case.
template <typename Parse>
auto in_any_case(Parse parse) {
  return [parse](const std::string& text) { return parse(to_lower(text)); };
}

// Calls take() for each word of "a,b,c".
template <typename Take>
void for_each_word(std::string_view text, Take take) {
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    take(std::string(text.substr(begin, comma - begin)));
    begin = comma + 1;
  }
}

// An option whose text `parse` reads; what it throws becomes a usage error that names the option.
template <typename Parse, typename Store>
CLI::Option* add_parsed(CLI::App& app, const std::string& flag, Parse parse, Store store,
                        const std::string& help) {
  return app.add_option_function<std::string>(
      flag,
      [flag, parse, store](const std::string& text) {
        try {
          store(parse(text));
        } catch (const Error& error) {
          throw CLI::ValidationError(flag, error.what());
        }
      },
      help);
}

// The common case: the value goes into one variable.
template <typename Parse, typename Value>
CLI::Option* add_parsed_into(CLI::App& app, const std::string& flag, Parse parse, Value& value,
                             const std::string& help) {
  return add_parsed(
      app, flag, parse, [&value](auto parsed) { value = std::move(parsed); }, help);
}

// An option of names that may be repeated, or list several with commas between: `take` reads and
// stores each of them. Case does not matter.
template <typename Take>
CLI::Option* add_repeated(CLI::App& app, const std::string& flag, Take take,
                          const std::string& help) {
  const auto parse = [take](const std::string& text) {
    for_each_word(to_lower(text), take);
    return text;
  };
  return add_parsed(
             app, flag, parse, [](const std::string& /*taken*/) {}, help)
      ->trigger_on_parse();
}

// An option that takes one of a few words.
template <typename Value>
struct Choice {
  std::string_view word;
  Value value;
};
template <typename Value, typename Target>
CLI::Option* add_choice(CLI::App& app, const std::string& flag, std::vector<Choice<Value>> choices,
                        Target& target, const std::string& help) {
  std::string all_words;
  for (const Choice<Value>& choice : choices) {
    all_words += (all_words.empty() ? "" : ", ") + std::string(choice.word);
  }
  const auto parse = [choices = std::move(choices), all_words](const std::string& text) {
    for (const Choice<Value>& choice : choices) {
      if (choice.word == to_lower(text)) return choice.value;
    }
    throw Error(ErrorKind::kInvalidArgument, "got '" + text + "', expected one of " + all_words);
  };
  return with_words(add_parsed_into(app, flag, parse, target, help), all_words);
}

}  // namespace narrowfloat::cli
