// The public activation: checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "ops/activation/activation_checks.h"
#include "runtime/dispatch.h"

namespace narrowfloat {

std::span<const ActivationImpl> activation_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kActivationSm90Swiglu, kActivationSm90Portable, kActivationSm90TokenRows, kActivationSm80Swiglu,
        kActivationSm80Portable, kActivationSm80TokenRows,
#endif
#if defined(NARROWFLOAT_VECTOR_LEVELS)
        kActivationCpuAvx512, kActivationCpuAvx2,
#endif
        kActivationCpuBaseline, kActivationCpuReference
  };
  return kImpls;
}

std::string to_string(const ActivationProblem& problem) {
  return fmt::format("{} {} {} {}x{} -> {} {}x{} ({} slots{}{}{}{}) on {}", name(problem.kind),
                     name(problem.gate_order), name(problem.input), problem.rows,
                     problem.input_cols, name(problem.format), problem.rows, problem.inter,
                     problem.slots, problem.per_expert ? ", per expert" : "",
                     problem.has_num_rows ? ", rows on the device" : "",
                     problem.has_row_to_slot ? ", inverse map" : "",
                     problem.has_wide_strides ? ", wide strides" : "", to_string(problem.device));
}

void activate(const ActivateArgs& args, Stream stream) {
  const LoweredActivation lowered = lower(args);
  select("activation", activation_impls(), lowered.problem)
      .run(lowered.problem, lowered.args, stream);
}

}  // namespace narrowfloat
