// The common part of the CPU implementations: everything about a token except the selection of its
// experts.
#pragma once

#include <array>
#include <cstdint>

#include "ops/route/route_problem.h"

namespace narrowfloat {

// One value per routed expert.
using ExpertRow = std::array<float, kMaxExperts>;

// Zeros if there is no bias; rounded to bf16 if the options say so (moe spec 1.6).
void load_bias(const RouteProblem& problem, const RouteArgs& args, ExpertRow* bias);
void load_logits(const RouteProblem& problem, const RouteArgs& args, int64_t token,
                 ExpertRow* logits);

// Computes weights of the routed ids in the token's row of args.ids, then rounding, shared experts
// and replay.
void finish_token(const RouteProblem& problem, const RouteArgs& args, int64_t token,
                  const ExpertRow& logits);

// Copies the whole row of a token whose routing was given.
void copy_precomputed(const RouteProblem& problem, const RouteArgs& args, int64_t token);

}  // namespace narrowfloat
