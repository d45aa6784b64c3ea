// narrowfloat moe explain: the token tile and the implementation of every stage of a layer, who
// chose them, and why the others do not run. Exit code 4 where a stage has none.
#include <algorithm>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/json_output.h"
#include "cli/moe/bench_config.h"
#include "cli/output.h"
#include "narrowfloat/moe_tuning.h"

namespace narrowfloat::cli {
namespace {

struct ExplainedLayer {
  MoeMode mode = MoeMode::kBf16;
  int64_t tokens = 0;
  int32_t token_tile = 0;
  std::vector<Explanation> stages;  // The choice of the token tile comes first.
};

std::vector<ExplainedLayer> explain_layers(const MoeExplainArguments& arguments,
                                           const MoeShape& shape) {
  constexpr uint64_t kAnyMemory = uint64_t{1} << 62U;
  MoeTuning tuning;
  if (!arguments.tuning.empty()) tuning = MoeTuning::load(arguments.tuning);
  std::vector<std::string> notes;
  std::vector<ExplainedLayer> layers;
  for (const MoeMode mode : bench_modes(shape, arguments.modes, arguments.is_all_modes, notes)) {
    for (const int64_t tokens : arguments.tokens) {
      MoeConfig config =
          bench_config(shape, mode, {arguments.rank, arguments.num_ranks}, tokens, kAnyMemory);
      config.token_tile = arguments.token_tile;
      const TokenTileChoice choice = choose_token_tile(config, tokens, arguments.device, tuning);
      config.token_tile = choice.token_tile;
      ExplainedLayer layer{mode, tokens, choice.token_tile, {choice.explanation}};
      for (Explanation& stage : explain_moe(config, tokens, arguments.device)) {
        layer.stages.push_back(std::move(stage));
      }
      layers.push_back(std::move(layer));
    }
  }
  return layers;
}

Json stage_json(const Explanation& stage) {
  Json candidates = Json::array();
  for (const Candidate& candidate : stage.candidates) {
    candidates.push_back(Json{{"name", candidate.name},
                              {"supported", candidate.supported},
                              {"reason", candidate.reason}});
  }
  return Json{{"op", stage.op},
              {"problem", stage.problem},
              {"chosen", stage.chosen.empty() ? Json(nullptr) : Json(stage.chosen)},
              {"candidates", candidates}};
}

void print_document(const MoeExplainArguments& arguments, const MoeShape& shape,
                    const std::vector<ExplainedLayer>& layers) {
  Json document = json_document("moe explain");
  document["device"] = to_string(arguments.device);
  document["shape"] = shape.name;
  document["rank"] = arguments.rank;
  document["ranks"] = arguments.num_ranks;
  document["cases"] = Json::array();
  for (const ExplainedLayer& layer : layers) {
    Json stages = Json::array();
    for (const Explanation& stage : layer.stages) stages.push_back(stage_json(stage));
    document["cases"].push_back(Json{{"mode", name(layer.mode)},
                                     {"tokens", layer.tokens},
                                     {"token_tile", layer.token_tile},
                                     {"stages", stages}});
  }
  print_json(document);
}

// In the order in which the layer asks.
void print_tables(const MoeExplainArguments& arguments, const MoeShape& shape,
                  const std::vector<ExplainedLayer>& layers) {
  const bool colored = is_colored(arguments.output.color);
  for (const ExplainedLayer& layer : layers) {
    Table table({{"stage"}, {"implementation"}, {"verdict"}});
    for (const Explanation& stage : layer.stages) {
      for (const Candidate& candidate : stage.candidates) {
        const bool is_chosen = candidate.name == stage.chosen;
        table.add_row({stage.op, candidate.name, is_chosen ? "runs" : candidate.reason},
                      is_chosen ? Tone::kGood : Tone::kPlain);
      }
      if (stage.chosen.empty())
        table.add_row({stage.op, "-", "no implementation fits"}, Tone::kBad);
    }
    write_stdout(fmt::format("{} {}, {} tokens on {}: {} rows a tile\n", shape.name,
                             name(layer.mode), layer.tokens, to_string(arguments.device),
                             layer.token_tile));
    write_stdout(table.to_text(colored));
    if (&layer != &layers.back()) write_stdout("\n");
  }
}

bool is_complete(const ExplainedLayer& layer) {
  return std::none_of(layer.stages.begin(), layer.stages.end(),
                      [](const Explanation& stage) { return stage.chosen.empty(); });
}

}  // namespace

ExitCode run(const MoeExplainArguments& arguments) {
  const MoeShape shape = parse_moe_shape(arguments.shape);
  const std::vector<ExplainedLayer> layers = explain_layers(arguments, shape);
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, shape, layers);
  } else if (!arguments.output.is_quiet) {
    print_tables(arguments, shape, layers);
  }
  const bool all = std::all_of(layers.begin(), layers.end(), is_complete);
  return all ? ExitCode::kDone : ExitCode::kUnsupported;
}

}  // namespace narrowfloat::cli
