// What quantize and dequantize say about their source besides its tensors.
#pragma once

#include <string>
#include <vector>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// The reader's warnings, and what of a directory the target will lack.
std::vector<std::string> source_warnings(const Checkpoint& source);

// "xxh64:0123456789abcdef" of all shards' headers: names, dtypes, shapes, places of tensors, and
// metadata. Neither of paths nor of tensor data: enough to tell models and their revisions apart,
// no proof that two are the same.
std::string source_fingerprint(const Checkpoint& source);

}  // namespace narrowfloat
