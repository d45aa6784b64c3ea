// The ordered list of quantizers, and problems as text.
#include "ops/quantize/quantize_impls.h"

#include <array>

#include <fmt/format.h>

#include "base/bad_enumerator.h"

namespace narrowfloat {

std::span<const QuantizeImpl> quantize_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kQuantizeSm90Blocks, kQuantizeSm90Rows, kQuantizeSm90Tiles, kQuantizeSm80Blocks,
        kQuantizeSm80Rows, kQuantizeSm80Tiles,
#endif
#if defined(NARROWFLOAT_VECTOR_LEVELS)
        kQuantizeCpuAvx512, kQuantizeCpuAvx2,
#endif
        kQuantizeCpuBaseline, kQuantizeCpuReference
  };
  return kImpls;
}

std::string_view name(RowSourceKind kind) {
  switch (kind) {
    case RowSourceKind::kPlain:
      return "plain";
    case RowSourceKind::kSiluMul:
      return "silu_mul";
    case RowSourceKind::kSmooth:
      return "smooth";
    case RowSourceKind::kRmsNorm:
      return "rmsnorm";
    case RowSourceKind::kAddRmsNorm:
      return "add_rmsnorm";
  }
  throw_bad_enumerator("row source", static_cast<int>(kind));
}

std::string to_string(const QuantizeProblem& problem) {
  return fmt::format("{} {}x{}x{} -> {} {} ({}, {}) on {}", name(problem.input), problem.batch,
                     problem.rows, problem.cols, name(problem.format), name(problem.layout),
                     name(problem.math), name(problem.source), to_string(problem.device));
}

}  // namespace narrowfloat
