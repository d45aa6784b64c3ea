// cpu_baseline, cpu_avx2 and cpu_avx512: all cores through oneTBB, one row at a time. A row is
// widened, activated and encoded in chunks of columns on the stack. Formats that need the row's
// maximum first compute the activation twice, which needs no memory. The last two have SwiGLU in
// the kernels of their vector level.
#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "ops/activation/activation_rows.h"
#include "ops/activation/x86/activation_kernels.h"
#include "runtime/parallel.h"
#include "runtime/vector_level.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

// Columns of h in one chunk.
constexpr int64_t kPieceCols = 4 * RowEncoder::kUnit;
// Elements below which a task is not split further: an exponential costs more than the rounding
// that other operations spend on an element.
constexpr int64_t kActivationTask = 2048;

template <typename Real>
class BaselineRow {
 public:
  // kernels: null for the portable loops.
  BaselineRow(const ActivationProblem& problem, const ActivationArgs& args, int64_t row,
              const ActivationKernels* kernels)
      : problem_(problem),
        args_(args),
        kernels_(kernels),
        row_(row),
        is_gated_(activation_info(problem.kind).is_gated),
        activation_(problem, args, row) {}

  void encode() const {
    const RowTarget target = row_target(args_.output, problem_.format, row_, problem_.inter);
    RowEncoder encoder(activation_.rules());
    AbsMax amax;
    if (encoder.needs_row_amax()) {
      for_each_piece([&](const float* h, int64_t, int64_t count) { amax.add(h, count); });
    }
    encoder.start_row(amax.or_zero(), target);
    for_each_piece([&](const float* h, int64_t first, int64_t count) {
      encoder.encode(h, first, count, target);
    });
  }

 private:
  template <typename Body>
  void for_each_piece(const Body& body) const {
    std::array<Real, kPieceCols> u{};
    std::array<Real, kPieceCols> g{};
    std::array<float, kPieceCols> h;
    for (int64_t first = 0; first < problem_.inter; first += kPieceCols) {
      const int64_t count = std::min(kPieceCols, problem_.inter - first);
      load_piece(first, count, u.data(), g.data());
      if (!activate_with_kernels(u.data(), g.data(), count, h.data())) {
        for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
          h[i] = activation_.result(u[i], g[i]);
        }
      }
      body(h.data(), first, count);
    }
  }

  // Returns false without kernels. The arrays have whole vectors.
  bool activate_with_kernels(const Real* u, const Real* g, int64_t count, float* h) const {
    static_assert(kPieceCols % kActivationLanes == 0);
    if constexpr (std::is_same_v<Real, float>) {
      if (kernels_ == nullptr) return false;
      const ActivationParams<float>& params = activation_.params();
      kernels_->swiglu(u, g, count,
                       {.alpha = params.alpha,
                        .beta = params.beta,
                        .limit_gate = params.limit_gate,
                        .limit_up = params.limit_up},
                       h);
      for (int64_t i = 0; i < count; ++i) h[i] = activation_.rounded(h[i]);
      return true;
    } else {
      return false;
    }
  }

  void load_piece(int64_t first, int64_t count, Real* u, Real* g) const {
    if (!is_gated_) return load(first, count, u);
    if (problem_.gate_order != GateOrder::kInterleaved) {
      const bool is_up_first = problem_.gate_order == GateOrder::kUpGate;
      load(first + (is_up_first ? 0 : problem_.inter), count, u);
      load(first + (is_up_first ? problem_.inter : 0), count, g);
      return;
    }
    std::array<Real, 2 * kPieceCols> pairs;
    load(2 * first, 2 * count, pairs.data());
    for (int64_t i = 0; i < count; ++i) {
      g[i] = pairs[static_cast<size_t>(2 * i)];
      u[i] = pairs[static_cast<size_t>(2 * i + 1)];
    }
  }

  // Loads columns of the input as they are stored.
  void load(int64_t first, int64_t count, Real* out) const {
    const void* in = element_pointer(args_.input.values.data, problem_.input,
                                     row_ * problem_.input_cols + first);
    if constexpr (sizeof(Real) == sizeof(double)) {
      std::memcpy(out, in, static_cast<size_t>(count) * sizeof(double));
    } else {
      widen(problem_.input, in, count, out);
      if (problem_.input == DType::kF8E4M3) apply_scales(first, count, out);
    }
  }

  void apply_scales(int64_t first, int64_t count, float* x) const {
    const TensorView& scales = args_.input.scales;
    const auto* row_scales = static_cast<const float*>(scales.data) + row_ * scales.strides[0];
    for (int64_t col = first; col < first + count;) {
      const int64_t block = col / 128;
      const int64_t end = std::min(first + count, (block + 1) * 128);
      const float scale = row_scales[block * scales.strides[1]];
      for (; col < end; ++col) x[col - first] = mul_rn(x[col - first], scale);
    }
  }

  const ActivationProblem& problem_;
  const ActivationArgs& args_;
  const ActivationKernels* kernels_;
  int64_t row_;
  bool is_gated_;
  RowActivation<Real> activation_;
};

void run_with(const ActivationKernels* kernels, const ActivationProblem& problem,
              const ActivationArgs& args) {
  const int64_t grain = row_grain(kActivationTask, problem.inter);
  visit_real(problem, [&]<typename Real>() {
    parallel_for(problem.slots, grain, [&](int64_t begin, int64_t end) {
      for (int64_t slot = begin; slot < end; ++slot) {
        if (args.slot_to_row[slot] >= 0)
          BaselineRow<Real>(problem, args, args.slot_to_row[slot], kernels).encode();
      }
    });
  });
}

void run(const ActivationProblem& problem, const ActivationArgs& args, Stream /*stream*/) {
  run_with(nullptr, problem, args);
}

Support supports(const ActivationProblem& problem) { return cpu_only(problem.device); }

#if defined(NARROWFLOAT_VECTOR_LEVELS)

template <VectorLevel kLevel>
Support supports_level(const ActivationProblem& problem) {
  Support support = cpu_with(problem.device, kLevel);
  if (!support.ok()) return support;
  if (problem.kind != ActivationKind::kSwiglu) return Support::no("has kernels for swiglu alone");
  return problem.input == DType::kF64 ? Support::no("has no kernels for fp64") : Support::yes();
}

template <VectorLevel kLevel>
void run_level(const ActivationProblem& problem, const ActivationArgs& args, Stream /*stream*/) {
  run_with(kLevel == VectorLevel::kAvx2 ? &kActivationKernelsAvx2 : &kActivationKernelsAvx512,
           problem, args);
}

#endif

}  // namespace

const ActivationImpl kActivationCpuBaseline{"cpu_baseline", supports, run};
#if defined(NARROWFLOAT_VECTOR_LEVELS)
const ActivationImpl kActivationCpuAvx2{"cpu_avx2", supports_level<VectorLevel::kAvx2>,
                                        run_level<VectorLevel::kAvx2>};
const ActivationImpl kActivationCpuAvx512{"cpu_avx512", supports_level<VectorLevel::kAvx512>,
                                          run_level<VectorLevel::kAvx512>};
#endif

}  // namespace narrowfloat
