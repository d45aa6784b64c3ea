// The findings and statistics of a check as JSON, for `check --json`.
#pragma once

#include "cli_common/output.h"
#include "narrowfloat/check.h"

namespace narrowfloat::cli {

Json findings_json(const CheckpointCheck& check);
Json checked_tensors_json(const CheckpointCheck& check);

}  // namespace narrowfloat::cli
