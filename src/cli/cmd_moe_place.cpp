// narrowfloat moe place: which experts each rank of an expert-parallel layer should hold, from
// recorded loads, as a file.
#include <algorithm>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli_common/command_line.h"
#include "cli_common/output.h"
#include "narrowfloat/expert_placement.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kPlaceExamples = R"(Examples:
  narrowfloat moe place --loads loads.json --ranks 8
  narrowfloat moe place --loads loads.json --ranks 8 --redundant 32 --out places.json
)";

struct MoePlaceArguments {
  OutputArguments output;
  std::string loads;
  int64_t ranks = 0;
  int64_t redundant = 0;
  std::string target;      // Empty: nothing is written.
  bool is_forced = false;  // An existing target is replaced.
};

struct PlacedLayer {
  std::string name;
  double before = 1;  // The imbalance without a placement.
  double after = 1;
};

Json document_of(const MoePlaceArguments& arguments, const ExpertPlacement& placement,
                 const std::vector<PlacedLayer>& layers) {
  Json document = json_document("moe place");
  document["loads"] = arguments.loads;
  document["experts"] = placement.experts;
  document["ranks"] = placement.ranks;
  document["redundant"] = arguments.redundant;
  document["target"] = arguments.target.empty() ? Json(nullptr) : Json(arguments.target);
  document["layers"] = Json::array();
  for (const PlacedLayer& layer : layers) {
    document["layers"].push_back(Json{{"layer", layer.name},
                                      {"imbalance_before", layer.before},
                                      {"imbalance", layer.after},
                                      {"places", placement.layers.at(layer.name)}});
  }
  return document;
}

void print_table(const MoePlaceArguments& arguments, const ExpertPlacement& placement,
                 const std::vector<PlacedLayer>& layers) {
  using enum Table::Align;
  Table table({{"layer", kLeft}, {"largest/mean before", kRight}, {"after", kRight}});
  for (const PlacedLayer& layer : layers) {
    table.add_row(
        {escaped(layer.name), format_fixed(layer.before, 3), format_fixed(layer.after, 3)});
  }
  std::string text = fmt::format("{} experts and {} copies on {} ranks\n\n{}", placement.experts,
                                 arguments.redundant, placement.ranks,
                                 table.to_text(is_colored(arguments.output.color)));
  if (!arguments.target.empty()) text += fmt::format("\nplaces: {}\n", escaped(arguments.target));
  write_stdout(text);
}

ExitCode run_moe_place(const MoePlaceArguments& arguments) {
  if (!arguments.target.empty()) {
    check_output_file("--out", arguments.target, arguments.is_forced);
  }
  const auto loads = load_expert_loads(arguments.loads);
  const int ranks = static_cast<int>(arguments.ranks);
  ExpertPlacement placement;
  placement.experts = static_cast<int32_t>(loads.begin()->second.size());
  placement.ranks = ranks;
  ExpertPlaces as_they_are;
  for (int32_t expert = 0; expert < placement.experts; ++expert) as_they_are.push_back(expert);
  std::vector<PlacedLayer> layers;
  for (const auto& [layer, counts] : loads) {
    ExpertPlaces places = place_experts(counts, ranks, static_cast<int32_t>(arguments.redundant));
    layers.push_back({.name = layer,
                      .before = load_imbalance(rank_loads(as_they_are, counts, ranks)),
                      .after = load_imbalance(rank_loads(places, counts, ranks))});
    placement.layers[layer] = std::move(places);
  }
  if (!arguments.target.empty()) placement.save(arguments.target, arguments.is_forced);
  if (arguments.output.data == DataFormat::kJson) {
    print_json(document_of(arguments, placement, layers));
  } else if (!arguments.output.is_quiet) {
    print_table(arguments, placement, layers);
  }
  return ExitCode::kDone;
}

}  // namespace

void add_moe_place(const Commands& commands) {
  constexpr int64_t kMost = 1 << 20;
  CLI::App& command = add_command(
      commands, "place", "Choose the experts of each rank from recorded loads", kPlaceExamples);
  MoePlaceArguments& arguments = arguments_of(command, commands, run_moe_place);
  command
      .add_option("--loads", arguments.loads,
                  R"(JSON: {"loads": {LAYER: [tokens of expert 0, of expert 1, ...]}})")
      ->option_text("FILE")
      ->required();
  add_parsed_into(
      command, "--ranks",
      [](const std::string& text) {
        return parse_count(text, 1, kMost, "a number of ranks, at least 1");
      },
      arguments.ranks, "Ranks that share the experts")
      ->option_text("N")
      ->required();
  add_parsed_into(
      command, "--redundant",
      [](const std::string& text) {
        return parse_count(text, 0, kMost, "a number of places, at least 0");
      },
      arguments.redundant, "Copies of experts with much load; default 0")
      ->option_text("R");
  command.add_option("-o,--out", arguments.target, "File for the places")->option_text("FILE");
  command.add_flag("--force", arguments.is_forced, "Replace FILE")->option_text(" ");
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace narrowfloat::cli
