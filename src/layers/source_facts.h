// Warnings and metadata about the source of quantize and dequantize besides its tensors.
#pragma once

#include <string>
#include <vector>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// The reader's warnings, and the parts of a directory that the target will lack.
std::vector<std::string> source_warnings(const Checkpoint& source);

// "xxh64:0123456789abcdef" of all shards' headers: names, dtypes, shapes, places of tensors, and
// metadata, without paths and tensor data. It suffices to distinguish models and their revisions;
// it is no proof that two are the same.
std::string source_fingerprint(const Checkpoint& source);

}  // namespace narrowfloat
