// Warnings and metadata about the source of quantize and dequantize besides its tensors.
#pragma once

#include <string>
#include <vector>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// Throws kUnsupported for a source of more tensors than a target is planned for: a plan takes some
// 2 KB for each.
void check_number_of_tensors(const Checkpoint& source);

// The reader's warnings, and the parts of a directory that the target will lack.
std::vector<std::string> source_warnings(const Checkpoint& source);

// "xxh64:0123456789abcdef" of all shards' headers: names, dtypes, shapes, places of tensors, and
// metadata, without paths and tensor data. It suffices to distinguish models and their revisions;
// it is no proof that two are the same.
std::string source_fingerprint(const Checkpoint& source);

}  // namespace narrowfloat
