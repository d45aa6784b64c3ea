// The fused prologue of a layer: routes the tokens, permutes their slots, and quantizes unquantized
// input rows in one launch. Results are those of route(), permute() and quantize_activations(), to
// the bit. The operation is internal: the layer has checked or made its arguments.
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

// Unquantized rows that become the first GEMM's: row t from row t.
struct QuantizedInputArgs {
  TensorView rows;  // BF16, F16 or F32 [tokens, cols], dense; absent: nothing is quantized.
  RowFormat format = RowFormat::kBf16;
  float multiplier = 1.0F;  // Static formats only.
  CodedRows output;
  DequantizedRows dequantized;  // Optional; with factors for kMxfp8 only.
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
  RowFormat quantized = RowFormat::kBf16;  // kBf16: rows are not quantized.
  int64_t cols = 0;
};
std::string to_string(const RoutePermuteProblem& problem);

// Whether route_and_permute() is the way for a problem on a GPU: an implementation takes it, or
// NARROWFLOAT_FORCE pins one, which then runs or throws.
bool joins_routing(const RoutePermuteProblem& problem);
RoutePermuteProblem route_permute_problem(const RoutePermuteArgs& args);
// Runs problems for which joins_routing() is true.
void route_and_permute(const RoutePermuteArgs& args, Stream stream);

struct RoutePermuteImpl {
  std::string_view name;
  Support (*supports)(const RoutePermuteProblem& problem);
  void (*run)(const RoutePermuteProblem& problem, const RouteArgs& route,
              const RoutePermuteArgs& args, Stream stream);
};

// Empty in builds without CUDA.
std::span<const RoutePermuteImpl> route_permute_impls();
extern const RoutePermuteImpl kRoutePermuteSm90;  // Only in builds with CUDA.

}  // namespace narrowfloat
