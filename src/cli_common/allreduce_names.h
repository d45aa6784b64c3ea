// The names of the all-reduce's enumerations as values of options.
#pragma once

#include <string_view>
#include <vector>

#include "narrowfloat/allreduce.h"

namespace narrowfloat::cli {

std::vector<AllReducePattern> all_allreduce_patterns();
// "allreduce, residual_rmsnorm, ..."
std::string_view allreduce_pattern_list();

// All throw kInvalidArgument that lists the names, with the one that was meant first.
AllReducePattern parse_allreduce_pattern(std::string_view text);
AllReduceAlgorithm parse_allreduce_algorithm(std::string_view text);
AllReduceQuantization parse_allreduce_quantization(std::string_view text);

}  // namespace narrowfloat::cli
