// See route_call.h.
#include "route_call.h"

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "ops/route/route_problem.h"
#include "support/environment.h"

namespace narrowfloat::testing {
namespace {

template <typename T>
std::vector<T> row_of(const std::vector<T>& all, int64_t slots, int64_t token) {
  const auto first = all.begin() + token * slots;
  return {first, first + slots};
}

template <typename T>
std::vector<T> values_of(const GuardedBuffer& buffer) {
  EXPECT_TRUE(buffer.intact());
  const auto values = buffer.span<T>();
  return {values.begin(), values.end()};
}

int64_t tokens_of(const Routing& routing) {
  for (const TensorView* view : {&routing.logits, &routing.packed, &routing.ids}) {
    if (!view->is_absent()) return view->shape[0];
  }
  return 0;
}

Routed run(const Routing& routing, const RoutingConfig& config,
           std::optional<int64_t> replay_rows) {
  const int64_t tokens = tokens_of(routing);
  const int64_t slots = config.top_k + config.shared_experts;
  const BufferStyle style{.poison = 0xFF};
  const GuardedBuffer ids(tokens * slots * 4, style);
  const GuardedBuffer weights(tokens * slots * 4, style);
  const GuardedBuffer replay(replay_rows.value_or(0) * config.top_k * 2, style);
  DeviceErrors errors{.count = 7, .kind = 7, .first_index = 7};
  RouteOutputs outputs{
      .ids = TensorView::contiguous(ids.data(), DType::kI32, {tokens, slots}),
      .weights = TensorView::contiguous(weights.data(), DType::kF32, {tokens, slots}),
      .errors = &errors};
  if (replay_rows) {
    outputs.replay =
        TensorView::contiguous(replay.data(), DType::kI16, {*replay_rows, config.top_k});
  }
  route(routing, config, outputs);
  EXPECT_EQ(errors.count, 0U);
  EXPECT_EQ(errors.kind, 0U);
  EXPECT_EQ(errors.first_index, -1);
  return {.slots = slots,
          .ids = values_of<int32_t>(ids),
          .weights = values_of<uint32_t>(weights),
          .replay = values_of<uint16_t>(replay)};
}

}  // namespace

std::vector<int32_t> Routed::ids_of(int64_t token) const { return row_of(ids, slots, token); }

std::vector<uint32_t> Routed::weight_bits_of(int64_t token) const {
  return row_of(weights, slots, token);
}

std::vector<float> Routed::weights_of(int64_t token) const {
  std::vector<float> values;
  for (const uint32_t bits : weight_bits_of(token)) values.push_back(bits_float(bits));
  return values;
}

Routed route_everywhere(const Routing& routing, const RoutingConfig& config,
                        std::optional<int64_t> replay_rows) {
  std::optional<Routed> result;
  for (const RouteImpl& impl : route_impls()) {
    if (!impl.name.starts_with("cpu_")) continue;
    const ForcedImplementation forced("route", impl.name);
    Routed routed = run(routing, config, replay_rows);
    if (result) {
      EXPECT_EQ(*result, routed) << impl.name;
    }
    result = std::move(routed);
  }
  return *result;
}

Matrix logits_of(DType dtype, const Rows& rows, int64_t gap) {
  const auto cols = static_cast<int64_t>(rows.empty() ? 0 : rows[0].size());
  Matrix matrix(
      {.dtype = dtype, .rows = static_cast<int64_t>(rows.size()), .cols = cols, .gap = gap},
      {.poison = 0xFF});
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t col = 0; col < rows[row].size(); ++col) {
      matrix.set(static_cast<int64_t>(row), static_cast<int64_t>(col), rows[row][col]);
    }
  }
  return matrix;
}

Routed route_rows(const Rows& logits, const RoutingConfig& config, const std::vector<float>& bias) {
  const Matrix matrix = logits_of(DType::kF32, logits);
  const Vector bias_vector = Vector::of(DType::kF32, bias);
  Routing routing{.logits = matrix.view()};
  if (!bias.empty()) routing.bias = bias_vector.view();
  return route_everywhere(routing, config);
}

Routed route_row(const std::vector<float>& logits, const RoutingConfig& config,
                 const std::vector<float>& bias) {
  return route_rows({logits}, config, bias);
}

TensorView matrix_view(const Vector& values, DType dtype, int64_t top_k) {
  return TensorView::contiguous(values.buffer().data(), dtype,
                                {values.view().shape[0] / top_k, top_k});
}

}  // namespace narrowfloat::testing
