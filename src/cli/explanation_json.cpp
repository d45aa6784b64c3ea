// Candidates keep the order in which the library asks them.
#include "cli/explanation_json.h"

namespace narrowfloat::cli {

Json candidates_json(const Explanation& explanation) {
  Json candidates = Json::array();
  for (const Candidate& candidate : explanation.candidates) {
    candidates.push_back(Json{{"name", candidate.name},
                              {"supported", candidate.supported},
                              {"reason", candidate.reason}});
  }
  return candidates;
}

Json chosen_json(const Explanation& explanation) {
  return explanation.chosen.empty() ? Json(nullptr) : Json(explanation.chosen);
}

}  // namespace narrowfloat::cli
