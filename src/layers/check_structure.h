// The part of `check` that reads headers and configs alone: whether the stored tensors, the
// declaration and each other agree, and whether any is missing.
#pragma once

#include <span>
#include <vector>

#include "layers/check_findings.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// The logical tensors, as recognise() returns them. Where that throws kCorruptData, it is a finding
// and so is every further tensor that fits no convention; the tensors that fit one are returned.
std::vector<LogicalTensor> recognise_or_find(const Checkpoint& checkpoint, FindingList& findings);

// Checks the declaration, the config's exclusions and its numbers of layers and experts against the
// tensors.
void check_structure(const Checkpoint& checkpoint, std::span<const LogicalTensor> tensors,
                     FindingList& findings);

}  // namespace narrowfloat
