// Explanations in the documents of explain, moe explain and doctor.
#pragma once

#include "cli_common/output.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {

// All candidates, because a bug report has to say why the expected one did not run.
Json candidates_json(const Explanation& explanation);
// The name of the chosen one, null where there is none.
Json chosen_json(const Explanation& explanation);

}  // namespace narrowfloat::cli
