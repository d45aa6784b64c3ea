// The entry of the operation: choose an implementation, run it.
#include <array>

#include <fmt/format.h>

#include "ops/code_rows/code_rows_problem.h"
#include "runtime/dispatch.h"

namespace narrowfloat {
namespace {

std::string_view name(RowChoice choice) {
  switch (choice) {
    case RowChoice::kAll:
      return "all rows";
    case RowChoice::kGathered:
      return "gathered";
    case RowChoice::kMarked:
      return "marked rows";
  }
  return "";
}

}  // namespace

std::span<const CodeRowsImpl> code_rows_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kCodeRowsSm90Groups, kCodeRowsSm90TokenRows,
#endif
        kCodeRowsCpuBaseline
  };
  return kImpls;
}

std::string to_string(const CodeRowsProblem& problem) {
  return fmt::format("{} {}x{} -> {} {} rows ({}{}) on {}", name(problem.input), problem.input_rows,
                     problem.cols, name(problem.format), problem.rows, name(problem.choice),
                     problem.per_expert ? ", per expert" : "", to_string(problem.device));
}

void code_rows(const CodeRowsArgs& args, Stream stream) {
  const CodeRowsProblem problem{.input = args.rows.dtype,
                                .format = args.format,
                                .choice = args.choice,
                                .device = args.rows.device,
                                .input_rows = args.rows.shape[0],
                                .rows = args.output.values.shape[0],
                                .cols = args.rows.shape[1],
                                .per_expert = !args.multiplier.values.is_absent()};
  select("code_rows", code_rows_impls(), problem).run(problem, args, stream);
}

}  // namespace narrowfloat
