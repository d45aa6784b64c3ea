// narrowfloat quantize SRC DST --to FORMAT, and the way back, dequantize SRC DST --dtype DTYPE: the
// library's quantize_checkpoint() and dequantize_checkpoint(). The texts of options are read by the
// library's own parse functions, so that the names an error lists are those that are accepted.
#include <memory>
#include <optional>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/writing_command.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kQuantizeExamples = R"(Examples:
  narrowfloat quantize model-bf16 model-nvfp4 --to nvfp4
  narrowfloat quantize model-bf16 out --to mxfp4 --exclude '*.self_attn.*' --dry-run
  narrowfloat quantize layer.safetensors layer-fp8.safetensors --to fp8-block --json
  narrowfloat quantize model-bf16 out --to nvfp4 --rule '*.self_attn.*=mxfp8'
)";
constexpr const char* kDequantizeExamples = R"(Examples:
  narrowfloat dequantize model-nvfp4 model-bf16 --dtype bf16
)";

struct QuantizeArguments : WritingArguments<QuantizeCheckpointOptions> {
  std::string recipe;  // Files; empty: none.
  std::string activation_amax;
};
using DequantizeArguments = WritingArguments<DequantizeCheckpointOptions>;

// Options whose values are settled once all of them are known.
struct QuantizeChoices {
  std::optional<Ue8m0Rounding> mx_scale;
  std::optional<ScaleSearch> scale_search;
};

std::string convention_list() {
  std::string list;
  for (const ConventionInfo& info : all_conventions()) {
    if (!info.is_written) continue;
    list += fmt::format("{}{}", list.empty() ? "" : ", ", info.name);
  }
  return list;
}

// Options that the chosen format has no use for are errors: ignoring one would leave the user with
// a file that is not what was asked for.
void check_conflicts(const QuantizeChoices& choices, bool has_rules,
                     QuantizeCheckpointOptions& options) {
  const ConventionInfo& target = convention_info(options.to);
  const bool is_mx = format_info(target.format).scale_type == ScaleType::kUE8M0;
  const bool is_nvfp4 = target.format == FormatId::kNvfp4;
  options.mx_scale = choices.mx_scale.value_or(options.mx_scale);
  options.scale_search = choices.scale_search.value_or(options.scale_search);
  if (has_rules) return;  // The options are about the weights that have a use for them.
  if (choices.mx_scale && !is_mx) {
    throw CLI::ValidationError(
        "--mx-scale", fmt::format("{} has no power-of-two scales; leave the option out, or use "
                                  "--to mxfp4-ct or mxfp8-ct",
                                  target.name));
  }
  if (choices.scale_search == ScaleSearch::kFourOverSix && !is_nvfp4) {
    throw CLI::ValidationError(
        "--scale-search", fmt::format("4over6 is for NVFP4 only, and the target is {}; leave the "
                                      "option out, or use --to nvfp4-ct or nvfp4-modelopt",
                                      target.name));
  }
}

// The rules of the command line come before those of the recipe.
void read_files(const QuantizeArguments& arguments, QuantizeCheckpointOptions& options) {
  if (!arguments.recipe.empty()) {
    const QuantizeRecipe recipe = read_recipe(arguments.recipe);
    options.kept_files.push_back(arguments.recipe);
    const auto append = [](const auto& from, auto& to) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(recipe.include, options.include);
    append(recipe.exclude, options.exclude);
    append(recipe.rules, options.rules);
  }
  if (!arguments.activation_amax.empty()) {
    options.activation_amax = read_activation_amax(arguments.activation_amax);
    options.kept_files.push_back(arguments.activation_amax);
  }
}

ExitCode run_quantize(const QuantizeArguments& arguments) {
  const auto quantize = [&](const std::string& source, const std::string& target,
                            QuantizeCheckpointOptions& options) {
    read_files(arguments, options);
    return quantize_checkpoint(source, target, options);
  };
  return write_checkpoint(arguments, "quantize", convention_info(arguments.options.to).name,
                          quantize);
}

ExitCode run_dequantize(const DequantizeArguments& arguments) {
  return write_checkpoint(arguments, "dequantize", name(arguments.options.dtype),
                          dequantize_checkpoint);
}

}  // namespace

void add_quantize(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "quantize", "Quantize a checkpoint: weights of linear layers, experts included",
      kQuantizeExamples);
  QuantizeArguments& arguments = arguments_of(command, commands, run_quantize);
  QuantizeCheckpointOptions& options = arguments.options;
  const auto choices = std::make_shared<QuantizeChoices>();
  add_source_and_target(command, arguments);
  with_words(add_parsed_into(command, "--to", in_any_case(parse_convention), options.to,
                             fmt::format("What to write: {}; nvfp4, mxfp4 and mxfp8 mean the "
                                         "compressed-tensors convention",
                                         convention_list()))
                 ->required()
                 ->option_text("FORMAT REQUIRED"),
             convention_list() + ", nvfp4, mxfp4, mxfp8");
  add_globs(command, "--include", options.include,
            "Also quantize tensors with such a name; may be repeated");
  add_globs(command, "--exclude", options.exclude,
            "Never quantize tensors with such a name; wins over --include; may be repeated");
  add_repeated(
      command, "--rule",
      [&options](const std::string& text) { options.rules.push_back(parse_rule(text)); },
      "Weights with such names get FORMAT, or 'keep'; the first that matches counts; may be "
      "repeated")
      ->option_text("GLOB=FORMAT");
  command
      .add_option("--recipe", arguments.recipe,
                  "A JSON or YAML file of globs to include and exclude, and rules with their own "
                  "settings")
      ->option_text("FILE");
  command
      .add_option("--target-bits", options.target_bits,
                  "Better formats, or none, where they gain most, up to so many bits on average")
      ->option_text("B")
      ->check(number_in(1, 32));
  command
      .add_option(
          "--activation-amax", arguments.activation_amax,
          "Static activation scales of NVFP4, and of FP8 with one scale: a file that the Python "
          "package's calibrate() wrote, or JSON")
      ->option_text("FILE");
  command
      .add_option("--gptq", options.gptq,
                  "Round so that columns of a weight make up for the errors of others: a file of "
                  "calibrate() with Hessians")
      ->option_text("FILE");
  command
      .add_option("--activation-moments", options.activation_moments,
                  "Weigh the errors of --scale-search full: a file of calibrate() with second "
                  "moments or Hessians")
      ->option_text("FILE");
  add_parsed_into(command, "--math", in_any_case(parse_math_mode), options.math,
                  "Arithmetic: exact (default) or fast, bit for bit as common GPU kernels")
      ->option_text("MODE");
  add_parsed_into(command, "--mx-scale", in_any_case(parse_ue8m0_rounding), choices->mx_scale,
                  "Rounding of MX block scales: up (default), floor or even")
      ->option_text("RULE");
  add_choice<ScaleSearch>(
      command, "--scale-search",
      {{"amax", ScaleSearch::kAmax},
       {"4over6", ScaleSearch::kFourOverSix},
       {"full", ScaleSearch::kFull}},
      choices->scale_search,
      "Block scales: amax (default); NVFP4 4over6; NVFP4 and MX full, the least error")
      ->option_text("METHOD");
  add_choice<bool>(command, "--nonfinite", {{"error", false}, {"keep", true}},
                   options.keep_nonfinite, "NaN or infinity in a weight: error (default) or keep")
      ->option_text("WHAT");
  add_writer(command, arguments);
  add_output(command, arguments.output, CsvSupport::kNo);
  // Runs once all options of the command are known, in whatever order they came.
  command.parse_complete_callback([&arguments, choices] {
    const bool has_rules = !arguments.options.rules.empty() || !arguments.recipe.empty();
    check_conflicts(*choices, has_rules, arguments.options);
  });
}

void add_dequantize(const Commands& commands) {
  CLI::App& command =
      add_command(commands, "dequantize", "Turn a quantized checkpoint back into plain tensors",
                  kDequantizeExamples);
  DequantizeArguments& arguments = arguments_of(command, commands, run_dequantize);
  add_source_and_target(command, arguments);
  with_words(add_parsed_into(command, "--dtype", parse_target_dtype, arguments.options.dtype,
                             "Type of the weights: bf16, fp16 or fp32")
                 ->required()
                 ->option_text("DTYPE REQUIRED"),
             "bf16, fp16, fp32");
  add_writer(command, arguments);
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace narrowfloat::cli
