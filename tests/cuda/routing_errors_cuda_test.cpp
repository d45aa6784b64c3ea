// route() and combine() on a GPU with values that only the device knows: ids out of range, rows
// that do not exist; offsets beyond 2^31; and calls that are refused before anything is launched.
#include <algorithm>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "narrowfloat/combine.h"
#include "narrowfloat/route.h"
#include "support/device_buffer.h"
#include "support/device_copies.h"
#include "support/expect_error.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

class RoutingErrors : public GpuTest {};

constexpr int32_t kExperts = 100;
constexpr int32_t kTopK = 4;

// Random valid ids; the errors are written over them.
std::vector<int32_t> valid_ids(int64_t tokens) {
  Random random(11);
  std::vector<int32_t> ids(static_cast<size_t>(tokens * kTopK));
  for (int32_t& id : ids) id = static_cast<int32_t>(random.range(0, kExperts - 1));
  return ids;
}

struct GivenRouting {
  std::vector<int32_t> ids;
  bool is_packed = false;
  bool allows_empty = false;
  int32_t shared_experts = 0;
};

struct GivenResult {
  std::vector<int32_t> ids;
  DeviceErrors errors;
};

// The record holds other errors before the call.
GivenResult route_given(const GivenRouting& given) {
  const auto count = static_cast<int64_t>(given.ids.size());
  const int64_t tokens = count / kTopK;
  const int64_t slots = kTopK + given.shared_experts;
  std::vector<int32_t> words = given.ids;
  for (int32_t& word : words) {
    if (given.is_packed) word = static_cast<int32_t>(static_cast<uint32_t>(word) << 16 | 0xBF80U);
  }
  const Vector input = Vector::of(DType::kI32, words);
  const Vector ids(DType::kI32, tokens * slots);
  const Vector weights(DType::kF32, tokens * slots);
  const Vector errors(DType::kI64, 2, {.poison = 0x11});
  const DeviceCopies device({&input.buffer(), &ids.buffer(), &weights.buffer(), &errors.buffer()});
  const auto view = [&](const Vector& vector, DType dtype, int64_t cols) {
    return device.view(TensorView::contiguous(vector.buffer().data(), dtype, {tokens, cols}));
  };
  Routing routing;
  (given.is_packed ? routing.packed : routing.ids) = view(input, DType::kI32, kTopK);
  const RoutingConfig config{.experts = kExperts,
                             .top_k = kTopK,
                             .shared_experts = given.shared_experts,
                             .options = {.negative_one_is_empty = given.allows_empty}};
  route(routing, config,
        {.ids = view(ids, DType::kI32, slots),
         .weights = view(weights, DType::kF32, slots),
         .errors = static_cast<DeviceErrors*>(device.view(errors.view()).data)},
        device.stream());
  EXPECT_TRUE(device.take_back());
  GivenResult result;
  const auto written = ids.buffer().span<int32_t>();
  result.ids.assign(written.begin(), written.end());
  std::memcpy(&result.errors, errors.buffer().data(), sizeof(DeviceErrors));
  return result;
}

TEST_F(RoutingErrors, IdsOutOfRangeAreCountedAndBecomeEmpty) {
  for (const int64_t tokens : {2, 300, 20000}) {
    for (const bool is_packed : {false, true}) {
      GivenRouting given{.ids = valid_ids(tokens), .is_packed = is_packed};
      std::vector<int32_t> expected = given.ids;
      const int64_t last = tokens * kTopK - 1;
      const int32_t least = is_packed ? -32768 : std::numeric_limits<int32_t>::min();
      const std::vector<std::pair<int64_t, int32_t>> bad{
          {last / 2, kExperts}, {last, -1}, {last - 1, 32767}, {last - 2, least}};
      for (const auto& [index, id] : bad) {
        given.ids[static_cast<size_t>(index)] = id;
        expected[static_cast<size_t>(index)] = -1;
      }
      const GivenResult result = route_given(given);
      EXPECT_EQ(result.ids, expected) << tokens;
      EXPECT_EQ(result.errors.count, bad.size()) << tokens;
      EXPECT_EQ(result.errors.kind, 1U);
      EXPECT_EQ(result.errors.first_index, last / 2);
    }
  }
}

TEST_F(RoutingErrors, EachCallClearsTheRecord) {
  for (const int64_t tokens : {0, 2, 20000}) {
    const GivenRouting given{.ids = valid_ids(tokens)};
    const GivenResult result = route_given(given);
    EXPECT_EQ(result.ids, given.ids);
    EXPECT_EQ(result.errors.count, 0U) << tokens;
    EXPECT_EQ(result.errors.kind, 0U);
    EXPECT_EQ(result.errors.first_index, -1);
  }
}

TEST_F(RoutingErrors, MinusOneIsNoErrorWhereItMeansEmpty) {
  GivenRouting given{.ids = valid_ids(40), .allows_empty = true};
  given.ids[17] = -1;
  given.ids[90] = -2;
  const GivenResult result = route_given(given);
  EXPECT_EQ(result.ids[17], -1);
  EXPECT_EQ(result.ids[90], -1);
  EXPECT_EQ(result.errors.count, 1U);
  EXPECT_EQ(result.errors.first_index, 90);
}

// The id of the first shared expert is out of range for a routed slot.
TEST_F(RoutingErrors, NoRoutedIdNamesASharedExpert) {
  GivenRouting given{.ids = valid_ids(30), .shared_experts = 2};
  given.ids[5] = kExperts;
  const GivenResult result = route_given(given);
  EXPECT_EQ(result.ids[7], -1);  // Token 1, slot 1.
  EXPECT_EQ(result.ids[10], kExperts);
  EXPECT_EQ(result.ids[11], kExperts + 1);
  EXPECT_EQ(result.errors.first_index, 5);
}

std::vector<uint8_t> combined(const std::vector<int32_t>& slot_to_row, const Matrix& rows,
                              bool on_host) {
  constexpr int64_t kSlots = 3;
  const Vector map = Vector::of(DType::kI32, slot_to_row);
  const Matrix out(
      {.rows = static_cast<int64_t>(slot_to_row.size()) / kSlots, .cols = rows.shape().cols});
  const DeviceCopies device({&rows.buffer(), &map.buffer(), &out.buffer()}, {.on_host = on_host});
  combine(device.view(rows.view()), device.view(map.view()), {}, device.view(out.view()),
          device.stream());
  EXPECT_TRUE(device.take_back());
  return out.elements();
}

TEST_F(RoutingErrors, RowsThatDoNotExistAreSkipped) {
  const Matrix rows = Matrix::filled({.rows = 5, .cols = 200}, Fill::kNormal, 3);
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  const std::vector<int32_t> bad{0, 5, 1, kMax, -kMax, 4, -2, -kMax - 1, 6};
  const std::vector<int32_t> absent{0, -1, 1, -1, -1, 4, -1, -1, -1};
  EXPECT_EQ(combined(absent, rows, true), combined(bad, rows, false));
}

TEST_F(RoutingErrors, RowsBeyondTwoToThe31ElementsAreFound) {
  constexpr int64_t kCols = 7168;
  constexpr int64_t kRows = 620000;
  if (free_device_memory() < kRows * kCols * 2 + (int64_t{1} << 30)) {
    GTEST_SKIP() << "skipped: needs 10 GiB of memory";
  }
  const DeviceBuffer rows(kRows * kCols * 2, {.poison = 0});
  const std::vector<int32_t> named{0, (1 << 30) / kCols + 1, 300000, kRows - 1};
  Random random(2);
  std::vector<uint16_t> expected(named.size() * kCols);
  for (uint16_t& bits : expected) bits = static_cast<uint16_t>(random.range(0x3F00, 0x4100));
  for (size_t i = 0; i < named.size(); ++i) {
    rows.write(expected.data() + i * kCols, kCols * 2, int64_t{named[i]} * kCols * 2);
  }
  const auto tokens = static_cast<int64_t>(named.size());
  const DeviceBuffer map(tokens * 4);
  map.write(named.data(), tokens * 4);
  const DeviceBuffer out(tokens * kCols * 2);
  combine(TensorView::contiguous(rows.data(), DType::kBF16, {kRows, kCols}, gpu()),
          TensorView::contiguous(map.data(), DType::kI32, {tokens}, gpu()), {},
          TensorView::contiguous(out.data(), DType::kBF16, {tokens, kCols}, gpu()));
  std::vector<uint16_t> actual(expected.size());
  out.read(actual.data(), out.size());
  EXPECT_EQ(expected, actual);
}

// Needs no GPU: the views lie about where their memory is, and nothing is launched.
TEST(CombineChecks, RowsOnAGpuLieSixteenBytesApart) {
  const Matrix rows({.rows = 4, .cols = 24});
  const Matrix out({.rows = 2, .cols = 20});
  const Vector map = Vector::of(DType::kI32, std::vector<int32_t>{0, 1});
  const auto on_gpu = [](TensorView view) {
    view.device = gpu();
    return view;
  };
  expect_error(ErrorKind::kInvalidArgument, {"out: expected rows a multiple of 16 bytes apart"},
               [&] { combine(on_gpu(rows.view()), on_gpu(map.view()), {}, on_gpu(out.view())); });
  const Matrix narrow({.rows = 4, .cols = 20});
  expect_error(ErrorKind::kInvalidArgument, {"slot_rows: expected rows a multiple of 16 bytes"},
               [&] { combine(on_gpu(narrow.view()), on_gpu(map.view()), {}, on_gpu(out.view())); });
}

}  // namespace
}  // namespace narrowfloat::testing
