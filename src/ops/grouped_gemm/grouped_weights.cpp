// GroupedWeights: checks the caller's weights, selects the implementation and keeps the packed
// weights.
#include <fmt/format.h>

#include "base/throw_error.h"
#include "ops/grouped_gemm/gemm_shape.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

constexpr int64_t kMostExperts = std::numeric_limits<int32_t>::max();

void require_values(const TensorView& values, const MoeModeInfo& info, Device device) {
  require_view("weights.values", values);
  const DType dtype = storage_of(info.weights).dtype;
  require_dtype("weights.values", values, {dtype});
  require_device("weights.values", values.device, device);
  if (values.rank != 3) {
    throw_invalid("weights.values: expected [experts, rows, {}], got {}",
                  dtype == DType::kU8 ? "cols / 2" : "cols", to_string(values));
  }
  if (values.shape[0] < 1 || values.shape[1] < 1 || values.shape[2] < 1) {
    throw_invalid("weights.values: expected at least one expert, row and column, got {}",
                  to_string(values));
  }
  if (values.shape[1] % kGemmRowMultiple != 0) {
    throw_invalid("weights.values: expected rows in multiples of {}, got {}", kGemmRowMultiple,
                  to_string(values));
  }
  if (values.shape[0] > kMostExperts) {
    throw_invalid("weights.values: expected fewer than 2^31 experts, got {}", to_string(values));
  }
  require_dense("weights.values", values);
  require_data("weights.values", values);
  require_cuda_alignment("weights.values", values.data, device);
}

int64_t require_cols(const TensorView& values, const MoeModeInfo& info) {
  const int64_t cols = values.shape[2] * (values.dtype == DType::kU8 ? 2 : 1);
  if (cols % info.multiple != 0) {
    throw_invalid("weights.values: {} needs columns in multiples of {}, got {}", info.name,
                  info.multiple, cols);
  }
  return cols;
}

void require_halves(const GateOrder& order, int64_t rows, const MoeModeInfo& info) {
  name(order);  // Throws for values that are no enumerator.
  if (rows % (2 * info.multiple) == 0) return;
  throw_invalid("weights.values: {} rows of u and of g must be multiples of {}, got {} in all",
                info.name, info.multiple, rows);
}

void require_weight_scales(const ScaleView& scales, const GemmShape& shape,
                           const GroupedGemmProblem& problem) {
  const ScaleGrid& grid = shape.weight_scales;
  if (!grid.is_present()) {
    if (scales.data == nullptr) return;
    throw_invalid("weights.scales: {} weights have none; leave them unset",
                  name(moe_mode_info(problem.mode).weights));
  }
  const bool may_be_swizzled = grid.type != ScaleType::kF32;
  if (scales.layout != ScaleLayoutId::kLinear &&
      !(may_be_swizzled && scales.layout == ScaleLayoutId::kSwizzled128x4)) {
    throw_invalid("weights.scales: expected layout linear{}, got {}; relayout() converts",
                  may_be_swizzled ? " or swizzled_128x4" : "", name(scales.layout));
  }
  if (scales.batch != shape.experts || scales.rows != grid.rows || scales.blocks != grid.blocks) {
    throw_invalid(
        "weights.scales: expected {} x {} x {} (experts x rows x blocks), got {} x {} x {}",
        shape.experts, grid.rows, grid.blocks, scales.batch, scales.rows, scales.blocks);
  }
  require_scales("weights.scales", scales, *shape.weights.scales);
  require_device("weights.scales", scales.device, problem.device);
}

GroupedGemmProblem checked_problem(const WeightView& weights, MoeMode mode, Device device,
                                   std::optional<GateOrder> gate_order) {
  const MoeModeInfo& info = moe_mode_info(mode);
  require_values(weights.values, info, device);
  const GroupedGemmProblem problem{.mode = mode,
                                   .device = device,
                                   .experts = weights.values.shape[0],
                                   .rows = weights.values.shape[1],
                                   .cols = require_cols(weights.values, info),
                                   .gate_order = gate_order};
  if (gate_order) require_halves(*gate_order, problem.rows, info);
  require_weight_scales(weights.scales, GemmShape(problem), problem);
  return problem;
}

// Checks the weights that a source returned for an expert.
void require_expert(const GroupedGemmProblem& own, const GroupedGemmProblem& all, int64_t expert) {
  if (own.experts == 1 && own.rows == all.rows && own.cols == all.cols) return;
  throw_invalid("source: expected weights of one expert, {}x{}, got {} of {}x{} for expert {}",
                all.rows, all.cols, own.experts, own.rows, own.cols, expert);
}

std::shared_ptr<const PackedWeights> packed(const GroupedGemmProblem& problem,
                                            const WeightPieces& pieces, Stream stream) {
  const GroupedGemmImpl& impl = select("grouped_gemm", grouped_gemm_impls(), problem);
  return std::make_shared<const PackedWeights>(PackedWeights{
      .problem = problem, .impl = &impl, .data = impl.prepare(problem, pieces, stream)});
}

WeightSource lowered(const WeightView& weights) {
  return {.values = static_cast<const uint8_t*>(weights.values.data), .scales = weights.scales};
}

}  // namespace

std::span<const GroupedGemmImpl> grouped_gemm_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kGroupedGemmSm90, kGroupedGemmSm80,
#endif
#if defined(NARROWFLOAT_VECTOR_LEVELS)
        kGroupedGemmCpuAmxInt8, kGroupedGemmCpuAmxBf16, kGroupedGemmCpuAvx512Bf16,
        kGroupedGemmCpuAvx512, kGroupedGemmCpuAvx2,
#endif
        kGroupedGemmCpuBaseline, kGroupedGemmCpuReference
  };
  return kImpls;
}

std::string to_string(const GroupedGemmProblem& problem) {
  const std::string order =
      problem.gate_order ? fmt::format(" {}", name(*problem.gate_order)) : std::string();
  return fmt::format("{} {} x {}x{}{} on {}", name(problem.mode), problem.experts, problem.rows,
                     problem.cols, order, to_string(problem.device));
}

GroupedWeights GroupedWeights::prepare(const WeightView& weights, MoeMode mode, Device device,
                                       Stream stream, std::optional<GateOrder> gate_order) {
  const GroupedGemmProblem problem = checked_problem(weights, mode, device, gate_order);
  const auto all = [&](int64_t /*first*/) { return lowered(weights); };
  return GroupedWeights(packed(problem, {.experts = problem.experts, .from = all}, stream));
}

GroupedWeights GroupedWeights::prepare(const ExpertSource& source, int64_t experts, MoeMode mode,
                                       Device device, Stream stream,
                                       std::optional<GateOrder> gate_order) {
  if (!source) throw_invalid("source: expected a function, got an empty one");
  if (experts < 1) throw_invalid("experts: expected at least 1, got {}", experts);
  if (experts > kMostExperts) {
    throw_invalid("experts: expected fewer than 2^31 experts, got {}", experts);
  }
  const WeightView first = source(0);
  GroupedGemmProblem problem = checked_problem(first, mode, device, gate_order);
  const auto weights_of = [&](int64_t expert) {
    const WeightView view = expert == 0 ? first : source(expert);
    require_expert(checked_problem(view, mode, device, gate_order), problem, expert);
    return lowered(view);
  };
  problem.experts = experts;
  return GroupedWeights(packed(problem, {.experts = 1, .from = weights_of}, stream));
}

const PackedWeights& packed_weights(const GroupedWeights& weights) {
  if (weights.packed_ == nullptr) {
    throw_invalid("weights: empty; make them with GroupedWeights::prepare");
  }
  return *weights.packed_;
}

MoeMode GroupedWeights::mode() const { return packed_weights(*this).problem.mode; }
int64_t GroupedWeights::experts() const { return packed_weights(*this).problem.experts; }
int64_t GroupedWeights::rows() const { return packed_weights(*this).problem.rows; }
int64_t GroupedWeights::cols() const { return packed_weights(*this).problem.cols; }
int64_t GroupedWeights::bytes() const { return packed_weights(*this).data.size_bytes; }
Device GroupedWeights::device() const { return packed_weights(*this).problem.device; }
std::string_view GroupedWeights::implementation() const { return packed_weights(*this).impl->name; }
bool GroupedWeights::fuses_activation(ActivationKind kind, RowFormat format,
                                      int32_t token_tile) const {
  return packed_weights(*this)
      .impl->supports_activation(packed_weights(*this).problem, kind, format, token_tile)
      .ok();
}

}  // namespace narrowfloat
