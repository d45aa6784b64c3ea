// What a layer does before its first GEMM, in one launch: routes the tokens, permutes their slots,
// and codes plain input rows. Results are those of route(), permute() and code_rows(), to the bit.
// An operation for the layer alone: its arguments are what the layer has checked or made.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/words_to_clear.h"
#include "narrowfloat/permute.h"
#include "narrowfloat/route.h"
#include "ops/route/route_problem.h"
#include "tensor/decoded_rows.h"

namespace narrowfloat {

// Plain rows that become the first GEMM's: row t from row t.
struct CodedInputArgs {
  TensorView rows;  // BF16, F16 or F32 [tokens, cols], dense; absent: nothing is coded.
  RowFormat format = RowFormat::kBf16;
  float multiplier = 1.0F;  // Of the static formats.
  CodedRows output;
  DecodedRows decoded;  // Optional; with factors for kMxfp8 alone.
};

struct RoutePermuteArgs {
  Routing routing;
  RoutingConfig config;
  RouteOutputs outputs;
  int32_t expert_offset = 0;
  int32_t local_experts = 0;
  Permutation permutation;
  CodedInputArgs input;
  WordsToClear cleared;
};

struct RoutePermuteProblem {
  RouteProblem route;
  PermutationLayout layout{};
  RowFormat coded = RowFormat::kBf16;  // kBf16: rows stay as they are.
  int64_t cols = 0;
};
std::string to_string(const RoutePermuteProblem& problem);

// False where no implementation takes it, or a variable pins one of the operations it joins:
// nothing is queued then, and the caller does one after the other.
bool route_and_permute(const RoutePermuteArgs& args, Stream stream);

struct RoutePermuteImpl {
  std::string_view name;
  Support (*supports)(const RoutePermuteProblem& problem);
  void (*run)(const RoutePermuteProblem& problem, const RouteArgs& route,
              const RoutePermuteArgs& args, Stream stream);
};

// Empty in builds without CUDA.
std::span<const RoutePermuteImpl> route_permute_impls();
extern const RoutePermuteImpl kRoutePermuteSm90;  // In CUDA builds.

}  // namespace narrowfloat
