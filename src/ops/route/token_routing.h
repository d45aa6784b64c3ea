// What the CPU implementations share: everything about a token but the selection of its experts,
// which each does in its own way.
#pragma once

#include <array>
#include <cstdint>

#include "ops/route/route_problem.h"

namespace narrowfloat {

// One value per routed expert.
using ExpertRow = std::array<float, kMaxExperts>;

// Zeros where there is none; rounded to bf16 where the options say so (moe spec 1.6).
void load_bias(const RouteProblem& problem, const RouteArgs& args, ExpertRow* bias);
void load_logits(const RouteProblem& problem, const RouteArgs& args, int64_t token,
                 ExpertRow* logits);

// Weights of the routed ids that the token's row of args.ids holds, then all that follows from
// them: rounding, shared experts, replay.
void finish_token(const RouteProblem& problem, const RouteArgs& args, int64_t token,
                  const ExpertRow& logits);

// The whole row of a token whose routing was given.
void copy_precomputed(const RouteProblem& problem, const RouteArgs& args, int64_t token);

}  // namespace narrowfloat
