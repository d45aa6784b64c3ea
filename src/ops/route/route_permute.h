// What a layer does before its first GEMM, in one launch: routes the tokens, permutes their slots,
// and codes plain input rows. Results are those of route(), permute() and quantize_activations(),
// to the bit. An operation for the layer alone: its arguments are what the layer has checked or
// made.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "moe_shared/dequantized_rows.h"
#include "moe_shared/words_to_clear.h"
#include "narrowfloat/permute.h"
#include "narrowfloat/route.h"
#include "ops/route/route_problem.h"

namespace narrowfloat {

// Plain rows that become the first GEMM's: row t from row t.
struct QuantizedInputArgs {
  TensorView rows;  // BF16, F16 or F32 [tokens, cols], dense; absent: nothing is quantized.
  RowFormat format = RowFormat::kBf16;
  float multiplier = 1.0F;  // Of the static formats.
  CodedRows output;
  DequantizedRows dequantized;  // Optional; with factors for kMxfp8 alone.
};

struct RoutePermuteArgs {
  Routing routing;
  RoutingConfig config;
  RouteOutputs outputs;
  int32_t expert_offset = 0;
  int32_t local_experts = 0;
  Permutation permutation;
  QuantizedInputArgs input;
  WordsToClear cleared;
};

struct RoutePermuteProblem {
  RouteProblem route;
  PermutationLayout layout{};
  RowFormat quantized = RowFormat::kBf16;  // kBf16: rows stay as they are.
  int64_t cols = 0;
};
std::string to_string(const RoutePermuteProblem& problem);

// Whether an implementation takes a problem, and no variable pins one of the operations it joins.
bool joins_routing(const RoutePermuteProblem& problem);
RoutePermuteProblem route_permute_problem(const RoutePermuteArgs& args);
// For problems that joins_routing() says yes to.
void route_and_permute(const RoutePermuteArgs& args, Stream stream);

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
