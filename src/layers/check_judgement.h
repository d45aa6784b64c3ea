// The part of `check` that judges the figures of one weight: its distance from the source, and how
// its codes and block scales use their range.
#pragma once

#include "layers/check_findings.h"
#include "narrowfloat/check.h"

namespace narrowfloat {

// Compares with the thresholds of docs/howto/read_the_error_report.md; those of weights that GPTQ
// rounded are wider.
void judge_error(const LogicalTensor& tensor, const ErrorFigures& figures, bool is_of_gptq,
                 FindingList& findings);

// `are_powers_of_two_declared`: config.json says it of F32 scales.
void judge_statistics(const LogicalTensor& tensor, const CodeStatistics& statistics,
                      bool are_powers_of_two_declared, FindingList& findings);

}  // namespace narrowfloat
