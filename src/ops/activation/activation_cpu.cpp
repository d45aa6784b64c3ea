// cpu_reference: the oracle. For every row that a slot names
//
//   u_i, g_i = elements of the input by the gate order (times their 1x128 scale)  (moe spec 1.3)
//   h_i      = activation(u_i, g_i)                                                (moe spec 6.2)
//   output   = h in the row format                                                 (moe spec 2)
#include <algorithm>
#include <array>

#include "ops/activation/activation_rows.h"
#include "runtime/float_environment.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

template <typename Real>
class ReferenceRow {
 public:
  ReferenceRow(const ActivationProblem& problem, const ActivationArgs& args, int64_t row)
      : problem_(problem), args_(args), row_(row), activation_(problem, args, row) {}

  void encode() const {
    const RowTarget target = row_target(args_.output, problem_.format, row_, problem_.inter);
    RowEncoder encoder(activation_.rules());
    AbsMax amax;
    for (int64_t i = 0; i < problem_.inter && encoder.needs_row_amax(); ++i) amax.add(result(i));
    encoder.start_row(amax.or_zero(), target);
    std::array<float, RowEncoder::kUnit> h;
    for (int64_t first = 0; first < problem_.inter; first += RowEncoder::kUnit) {
      const int64_t count = std::min(RowEncoder::kUnit, problem_.inter - first);
      for (int64_t i = 0; i < count; ++i) h[static_cast<size_t>(i)] = result(first + i);
      encoder.encode(h.data(), first, count, target);
    }
  }

 private:
  [[nodiscard]] float result(int64_t i) const {
    if (!activation_info(problem_.kind).is_gated) return activation_.result(input(i), Real{0});
    switch (problem_.gate_order) {
      case GateOrder::kUpGate:
        return activation_.result(input(i), input(problem_.inter + i));
      case GateOrder::kGateUp:
        return activation_.result(input(problem_.inter + i), input(i));
      case GateOrder::kInterleaved:
        return activation_.result(input(2 * i + 1), input(2 * i));
    }
    return 0.0F;
  }

  [[nodiscard]] Real input(int64_t col) const {
    const int64_t index = row_ * problem_.input_cols + col;
    if constexpr (sizeof(Real) == sizeof(double)) {
      return static_cast<const double*>(args_.input.values.data)[index];
    } else {
      float value = 0.0F;
      widen(problem_.input, element_pointer(args_.input.values.data, problem_.input, index), 1,
            &value);
      if (problem_.input != DType::kF8E4M3) return value;
      const TensorView& scales = args_.input.scales;
      const int64_t place = row_ * scales.strides[0] + col / 128 * scales.strides[1];
      return mul_rn(value, static_cast<const float*>(scales.data)[place]);
    }
  }

  const ActivationProblem& problem_;
  const ActivationArgs& args_;
  int64_t row_;
  RowActivation<Real> activation_;
};

void run(const ActivationProblem& problem, const ActivationArgs& args, Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  visit_real(problem, [&]<typename Real>() {
    for (int64_t slot = 0; slot < problem.slots; ++slot) {
      if (args.slot_to_row[slot] >= 0)
        ReferenceRow<Real>(problem, args, args.slot_to_row[slot]).encode();
    }
  });
}

Support supports(const ActivationProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const ActivationImpl kActivationCpuReference{"cpu_reference", supports, run};

}  // namespace narrowfloat
