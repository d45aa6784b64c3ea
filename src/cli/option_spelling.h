// The library names options as its callers write them, "option max_memory_bytes". People at the
// command line know them by other names.
#pragma once

#include <string>
#include <string_view>

namespace narrowfloat::cli {

// `message` with "option max_memory_bytes" as "--max-memory", and so on.
std::string with_option_spelling(std::string_view message);

}  // namespace narrowfloat::cli
