// The entry point of the operation: selects an implementation and runs it.
#include <array>

#include <fmt/format.h>

#include "moe_shared/quantize_activations_problem.h"
#include "runtime/dispatch.h"

namespace narrowfloat {
namespace {

std::string_view name(RowChoice choice) {
  switch (choice) {
    case RowChoice::kAll:
      return "all rows";
    case RowChoice::kGathered:
      return "gathered";
    case RowChoice::kListed:
      return "listed rows";
  }
  return "";
}

}  // namespace

std::span<const QuantizeActivationsImpl> quantize_activations_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kQuantizeActivationsSm90Groups, kQuantizeActivationsSm90TokenRows,
        kQuantizeActivationsSm80Groups, kQuantizeActivationsSm80TokenRows,
#endif
        kQuantizeActivationsCpuBaseline
  };
  return kImpls;
}

std::string to_string(const QuantizeActivationsProblem& problem) {
  return fmt::format("{} {}x{} -> {} {} rows ({}{}) on {}", name(problem.input), problem.input_rows,
                     problem.cols, name(problem.format), problem.rows, name(problem.choice),
                     problem.per_expert ? ", per expert" : "", to_string(problem.device));
}

void quantize_activations(const QuantizeActivationsArgs& args, Stream stream) {
  const QuantizeActivationsProblem problem{.input = args.rows.dtype,
                                           .format = args.format,
                                           .choice = args.choice,
                                           .device = args.rows.device,
                                           .input_rows = args.rows.shape[0],
                                           .rows = args.output.values.shape[0],
                                           .cols = args.rows.shape[1],
                                           .per_expert = !args.multiplier.values.is_absent()};
  select("quantize_activations", quantize_activations_impls(), problem).run(problem, args, stream);
}

}  // namespace narrowfloat
