// narrowfloat explain OP: the implementations of one operation in the order they are asked, which
// one runs, and why the others do not. Exit code 4 where none fits.
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/json_output.h"
#include "cli/output.h"

namespace narrowfloat::cli {
namespace {

void print_document(const Explanation& explanation) {
  Json document = json_document("explain");
  document["op"] = explanation.op;
  document["problem"] = explanation.problem;
  document["chosen"] = explanation.chosen.empty() ? Json(nullptr) : Json(explanation.chosen);
  document["candidates"] = Json::array();
  for (const Candidate& candidate : explanation.candidates) {
    document["candidates"].push_back(Json{{"name", candidate.name},
                                          {"supported", candidate.supported},
                                          {"reason", candidate.reason}});
  }
  print_json(document);
}

// In the order in which the library asks.
void print_table(const Explanation& explanation, bool colored) {
  Table table({{"implementation"}, {"verdict"}});
  for (const Candidate& candidate : explanation.candidates) {
    const bool is_chosen = candidate.name == explanation.chosen;
    table.add_row({candidate.name, is_chosen ? "runs" : candidate.reason},
                  is_chosen ? Tone::kGood : Tone::kPlain);
  }
  std::string text = fmt::format("{}: {}\n", explanation.op, explanation.problem);
  text += table.to_text(colored);
  if (explanation.chosen.empty()) text += paint("no implementation fits\n", Tone::kBad, colored);
  write_stdout(text);
}

}  // namespace

ExitCode run(const ExplainArguments& arguments) {
  const Explanation explanation = explain(arguments.op, arguments.request);
  if (arguments.output.data == DataFormat::kJson) {
    print_document(explanation);
  } else if (!arguments.output.is_quiet) {
    print_table(explanation, is_colored(arguments.output.color));
  }
  return explanation.chosen.empty() ? ExitCode::kUnsupported : ExitCode::kDone;
}

}  // namespace narrowfloat::cli
