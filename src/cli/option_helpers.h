// Helpers to declare options with CLI11. Only the files that declare options include this: CLI11 is
// slow to compile.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/arguments.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {

// Of the commands of `moe`.
struct MoeArguments {
  MoeRunArguments run;
  MoeBenchArguments bench;
  MoeGemmArguments gemm;
  MoeTuneArguments tune;
  MoeExplainArguments explain;
};

// Declare one command each; what is parsed ends up in the arguments, which must outlive `app`.
void add_quantize(CLI::App& app, QuantizeArguments& arguments);
void add_dequantize(CLI::App& app, DequantizeArguments& arguments);
void add_inspect(CLI::App& app, InspectArguments& arguments);
void add_diff(CLI::App& app, DiffArguments& arguments);
void add_explain(CLI::App& app, ExplainArguments& arguments);
void add_doctor(CLI::App& app, DoctorArguments& arguments);
void add_bench(CLI::App& app, BenchArguments& arguments);
void add_eval(CLI::App& app, EvalArguments& arguments);
void add_moe(CLI::App& app, MoeArguments& arguments);

// A command with its help text; the exit codes are added.
CLI::App& add_command(CLI::App& app, const std::string& name, const std::string& description,
                      const std::string& examples);

CLI::Option* add_path(CLI::App& app, const std::string& name, std::string& path,
                      const std::string& help);
void add_globs(CLI::App& app, const std::string& flag, std::vector<std::string>& globs,
               const std::string& help);
void add_threads(CLI::App& app, int& num_threads);

enum class CsvSupport : int { kNo, kYes };
// --json, --csv, --color, --quiet, --verbose.
void add_output(CLI::App& app, OutputArguments& output, CsvSupport csv);

// Readers of option values, with size_text.h and the library's own; all throw kInvalidArgument.
DType parse_target_dtype(const std::string& text);

// "nvfp4, nvfp4_per_token, ...".
std::string format_list();

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

// An option that takes one of a few words.
template <typename Value>
struct Choice {
  std::string_view word;
  Value value;
};
template <typename Value, typename Target>
CLI::Option* add_choice(CLI::App& app, const std::string& flag, std::vector<Choice<Value>> choices,
                        Target& target, const std::string& help) {
  const auto parse = [choices = std::move(choices)](const std::string& text) {
    std::string words;
    for (const Choice<Value>& choice : choices) {
      if (choice.word == text) return choice.value;
      words += (words.empty() ? "" : ", ") + std::string(choice.word);
    }
    throw Error(ErrorKind::kInvalidArgument, "got '" + text + "', expected one of " + words);
  };
  return add_parsed_into(app, flag, parse, target, help);
}

}  // namespace narrowfloat::cli
