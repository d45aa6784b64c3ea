// KV caches by hand: where tokens go and come from, written out once more as plain index
// arithmetic, and whole caches against quantize(). Checks at the door: kv_cache_checks_test.cpp.
#include "narrowfloat/kv_cache.h"

#include <array>
#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "narrowfloat/quantize.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

std::vector<uint16_t> random_halves(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<uint16_t> bits(static_cast<size_t>(count));
  // bf16 numbers around 1 of both signs.
  for (uint16_t& element : bits) {
    const auto magnitude = static_cast<uint64_t>(random.range(0x3E00, 0x4080));
    element = static_cast<uint16_t>(magnitude | (random.bits() & 0x8000U));
  }
  return bits;
}

// A dense cache of one head dimension in either layout, filled with one byte.
struct Cache {
  int64_t pages;
  int64_t page_size;
  int64_t heads;
  int64_t dim;
  KvLayout layout;
  std::array<std::vector<uint8_t>, 2> values;
  std::array<std::vector<uint8_t>, 2> scales;

  Cache(int64_t num_pages, int64_t tokens, int64_t num_heads, int64_t head_dim, KvLayout order)
      : pages(num_pages), page_size(tokens), heads(num_heads), dim(head_dim), layout(order) {
    for (size_t side = 0; side < 2; ++side) {
      values[side].assign(static_cast<size_t>(pages * page_size * heads * dim / 2), 0xCC);
      scales[side].assign(static_cast<size_t>(pages * page_size * heads * dim / 16), 0xCC);
    }
  }
  // The first element of a token's head, in rows of `width`.
  [[nodiscard]] int64_t at(int64_t page, int64_t token, int64_t head, int64_t width) const {
    const int64_t in_page =
        layout == KvLayout::kNhd ? token * heads + head : head * page_size + token;
    return (page * page_size * heads + in_page) * width;
  }
  [[nodiscard]] TensorView view(const void* data, DType dtype, int64_t width) const {
    return TensorView::contiguous(data, dtype,
                                  {pages, layout == KvLayout::kNhd ? page_size : heads,
                                   layout == KvLayout::kNhd ? heads : page_size, width});
  }
  [[nodiscard]] PagedKvCache paged() const {
    return {.k = {view(values[0].data(), DType::kU8, dim / 2),
                  view(scales[0].data(), DType::kU8, dim / 16)},
            .v = {view(values[1].data(), DType::kU8, dim / 2),
                  view(scales[1].data(), DType::kU8, dim / 16)},
            .layout = layout,
            .k_scale = 0.5F,
            .v_scale = 2.0F};
  }
};

// The codes and scales of rows of numbers that are quantized alone. Ordinary blocks are the same
// for kv_quantize and an append in exact mode.
struct Rows {
  std::vector<uint8_t> values;
  std::vector<uint8_t> scales;
};

Rows quantized_rows(const std::vector<uint16_t>& input, int64_t dim, float decode_scale) {
  const int64_t rows = static_cast<int64_t>(input.size()) / dim;
  Rows out{std::vector<uint8_t>(input.size() / 2), std::vector<uint8_t>(input.size() / 16)};
  kv_quantize(TensorView::contiguous(input.data(), DType::kBF16, {rows, dim}),
              {TensorView::contiguous(out.values.data(), DType::kU8, {rows, dim / 2}),
               TensorView::contiguous(out.scales.data(), DType::kF8E4M3, {rows, dim / 16})},
              decode_scale);
  return out;
}

// All heads of a row to a token of a page.
void put_row(Cache& cache, size_t side, const Rows& rows, int64_t row, int64_t page,
             int64_t token) {
  for (int64_t head = 0; head < cache.heads; ++head) {
    const auto copy = [&](const std::vector<uint8_t>& from, std::vector<uint8_t>& to,
                          int64_t width) {
      const auto first = from.begin() + (row * cache.heads + head) * width;
      std::copy(first, first + width, to.begin() + cache.at(page, token, head, width));
    };
    copy(rows.values, cache.values[side], cache.dim / 2);
    copy(rows.scales, cache.scales[side], cache.dim / 16);
  }
}

template <size_t kCount>
TensorView view(const std::array<int32_t, kCount>& values) {
  return TensorView::contiguous(values.data(), DType::kI32, {kCount});
}

class KvCaches : public ::testing::TestWithParam<KvLayout> {};

TEST_P(KvCaches, AppendedRowsLieWhereTheTablesSay) {
  constexpr int64_t kDim = 32;
  Cache actual(4, 3, 2, kDim, GetParam());
  Cache expected = actual;
  // Request 0 has pages 2 and 0, request 1 page 3.
  const std::array<int32_t, 3> indices{2, 0, 3};
  const std::array<int32_t, 3> indptr{0, 2, 3};
  // To page 0, to page 3, beyond request 1, to no request, to page 2.
  const std::array<int32_t, 5> batches{0, 1, 1, 2, 0};
  const std::array<int32_t, 5> positions{4, 2, 3, 0, 1};
  const std::array inputs{random_halves(5 * 2 * kDim, 1), random_halves(5 * 2 * kDim, 2)};
  kv_append_paged(TensorView::contiguous(inputs[0].data(), DType::kBF16, {5, 2, kDim}),
                  TensorView::contiguous(inputs[1].data(), DType::kBF16, {5, 2, kDim}),
                  {view(batches), view(positions), view(indices), view(indptr)}, actual.paged());
  for (size_t side = 0; side < 2; ++side) {
    const Rows rows = quantized_rows(inputs[side], kDim, side == 0 ? 0.5F : 2.0F);
    put_row(expected, side, rows, 0, 0, 1);
    put_row(expected, side, rows, 1, 3, 2);
    put_row(expected, side, rows, 4, 2, 1);
  }
  EXPECT_EQ(expected.values, actual.values);
  EXPECT_EQ(expected.scales, actual.scales);
}

TEST_P(KvCaches, SlotsCountEntriesAndNegativeOnesAreSkipped) {
  constexpr int64_t kDim = 16;
  Cache actual(2, 4, 3, kDim, GetParam());
  Cache expected = actual;
  const std::array<int64_t, 4> slots{7, -1, 0, 8};
  // One row more than slots.
  const std::vector<uint16_t> input = random_halves(5 * 3 * kDim, 3);
  const TensorView rows = TensorView::contiguous(input.data(), DType::kBF16, {5, 3, kDim});
  kv_append_slots(rows, rows, TensorView::contiguous(slots.data(), DType::kI64, {4}),
                  actual.paged());
  for (size_t side = 0; side < 2; ++side) {
    const Rows quantized = quantized_rows(input, kDim, side == 0 ? 0.5F : 2.0F);
    put_row(expected, side, quantized, 0, 1, 3);
    put_row(expected, side, quantized, 2, 0, 0);
  }
  EXPECT_EQ(expected.values, actual.values);
  EXPECT_EQ(expected.scales, actual.scales);
}

// (code * scale) * decode scale, from the bits.
float decoded(const Cache& cache, size_t side, int64_t page, int64_t token, int64_t head,
              int64_t col) {
  constexpr std::array<float, 8> kMagnitudes{0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  const int64_t at = cache.at(page, token, head, cache.dim / 2) + col / 2;
  const int code = cache.values[side][static_cast<size_t>(at)] >> (col % 2 * 4);
  const uint8_t scale = cache.scales[side][static_cast<size_t>(cache.at(page, token, head, 1))];
  const float block = std::ldexp(1.0F + static_cast<float>(scale & 7) / 8, (scale >> 3) - 7);
  const float magnitude =
      kMagnitudes[static_cast<size_t>(code & 7)] * block * (side == 0 ? 0.5F : 2.0F);
  return (code & 8) != 0 ? -magnitude : magnitude;
}

TEST_P(KvCaches, GatheredTokensAreThoseOfTheTable) {
  constexpr int64_t kDim = 16;
  constexpr int64_t kTokens = 5;
  Cache cache(3, 2, 2, kDim, GetParam());
  Random random(4);
  for (size_t side = 0; side < 2; ++side) {
    for (uint8_t& byte : cache.values[side]) byte = static_cast<uint8_t>(random.bits());
    for (uint8_t& byte : cache.scales[side]) byte = static_cast<uint8_t>(random.range(0x20, 0x60));
  }
  // Sequence 1's second page does not exist.
  const std::array<int64_t, 4> table{2, 0, 1, 9};
  const std::array<int32_t, 2> lengths{3, 5};
  std::array<std::vector<float>, 2> output;
  output.fill(std::vector<float>(2 * kTokens * 2 * kDim, 7.0F));
  const auto target = [&](size_t side) {
    return TensorView::contiguous(output[side].data(), DType::kF32, {2, kTokens, 2, kDim});
  };
  kv_dequantize_paged(cache.paged(), TensorView::contiguous(table.data(), DType::kI64, {2, 2}),
                      view(lengths), target(0), target(1));
  for (size_t side = 0; side < 2; ++side) {
    for (int64_t i = 0; i < 2 * kTokens * 2 * kDim; ++i) {
      const int64_t col = i % kDim;
      const int64_t head = i / kDim % 2;
      const int64_t token = i / kDim / 2 % kTokens;
      const int64_t sequence = i / kDim / 2 / kTokens;
      float wanted = 7.0F;
      if (token < (sequence == 0 ? 3 : 2)) {
        const int64_t page = table[static_cast<size_t>(sequence * 2 + token / 2)];
        wanted = decoded(cache, side, page, token % 2, head, col);
      }
      ASSERT_EQ(float_bits(wanted), float_bits(output[side][static_cast<size_t>(i)])) << i;
    }
  }
}

// Both sides of a cache, with decode scales in `decode`.
PagedKvCache with_decode_scales(const Cache& cache, std::array<float, 2>& decode) {
  PagedKvCache output = cache.paged();
  output.k_scale = TensorView::contiguous(decode.data(), DType::kF32, {1});
  output.v_scale = TensorView::contiguous(decode.data() + 1, DType::kF32, {1});
  return output;
}

TEST_P(KvCaches, WholeCachesAreNvfp4WithoutTheFactorSix) {
  constexpr int64_t kDim = 128;
  constexpr int64_t kCount = 2 * 8 * 3 * kDim;
  Cache cache(2, 8, 3, kDim, GetParam());
  const std::array inputs{random_halves(kCount, 5), random_halves(kCount, 6)};
  std::array<float, 2> decode{};
  kv_quantize_paged_cache(cache.view(inputs[0].data(), DType::kBF16, kDim),
                          cache.view(inputs[1].data(), DType::kBF16, kDim),
                          with_decode_scales(cache, decode));
  std::vector<uint8_t> restored(cache.scales[1].size());
  kv_restore_v_scales(cache.view(cache.scales[1].data(), DType::kU8, kDim / 16),
                      cache.view(restored.data(), DType::kU8, kDim / 16), GetParam());
  EXPECT_NE(restored, cache.scales[1]);
  cache.scales[1] = restored;
  for (size_t side = 0; side < 2; ++side) {
    float amax = 0.0F;
    const TensorView rows =
        TensorView::contiguous(inputs[side].data(), DType::kBF16, {kCount / kDim, kDim});
    tensor_amax(rows, TensorView::contiguous(&amax, DType::kF32, {1}));
    const float encode = 448.0F / amax;
    EXPECT_EQ(decode[side], 1.0F / encode);
    const QuantizedLayout layout = quantized_layout(FormatId::kNvfp4, kCount / kDim, kDim,
                                                    {.scale_layout = ScaleLayoutId::kLinear});
    std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes));
    std::vector<uint8_t> scales(static_cast<size_t>(layout.scales_bytes));
    float global = 0.0F;
    quantize(rows, layout.bind(values.data(), scales.data(), &global), {.encode_scale = encode});
    EXPECT_EQ(values, cache.values[side]);
    EXPECT_EQ(scales, cache.scales[side]);
  }
}

TEST_P(KvCaches, ZerosHaveTheLargestEncodeScale) {
  const Cache cache(1, 4, 1, 64, GetParam());
  const std::vector<uint16_t> zeros(4 * 64, 0);
  std::array<float, 2> decode{};
  const TensorView numbers = cache.view(zeros.data(), DType::kBF16, 64);
  kv_quantize_paged_cache(numbers, numbers, with_decode_scales(cache, decode));
  EXPECT_EQ(decode[0], 1.0F / (448.0F / 1e-12F));
  EXPECT_EQ(cache.values[0], std::vector<uint8_t>(4 * 32, 0));
  EXPECT_EQ(cache.scales[0], std::vector<uint8_t>(4 * 4, 0));
}

TEST_P(KvCaches, GivenEncodeScalesAreInverted) {
  const Cache cache(1, 4, 1, 64, GetParam());
  const std::vector<uint16_t> input = random_halves(4 * 64, 9);
  std::array<float, 2> decode{};
  const float on_device = 3.0F;
  const TensorView numbers = cache.view(input.data(), DType::kBF16, 64);
  kv_quantize_paged_cache(numbers, numbers, with_decode_scales(cache, decode),
                          {.k_encode_scale = 5.0F,
                           .v_encode_scale = TensorView::contiguous(&on_device, DType::kF32, {1})});
  EXPECT_EQ(decode, (std::array<float, 2>{1.0F / 5.0F, 1.0F / 3.0F}));
}

TEST_P(KvCaches, ReorderedScalesOfFourTokensAndFourBlocksAreTransposed) {
  // With S = 4 scale s of token t moves to token s, position t.
  Cache cache(1, 4, 2, 64, GetParam());
  std::iota(cache.scales[0].begin(), cache.scales[0].end(), uint8_t{0});
  kv_reorder_v_scales(cache.view(cache.scales[0].data(), DType::kU8, 4),
                      cache.view(cache.scales[1].data(), DType::kU8, 4), GetParam());
  for (int64_t head = 0; head < 2; ++head) {
    for (int64_t token = 0; token < 4; ++token) {
      for (int64_t block = 0; block < 4; ++block) {
        EXPECT_EQ(cache.scales[0][static_cast<size_t>(cache.at(0, token, head, 4) + block)],
                  cache.scales[1][static_cast<size_t>(cache.at(0, block, head, 4) + token)]);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, KvCaches, ::testing::Values(KvLayout::kNhd, KvLayout::kHnd),
                         [](const auto& test) {
                           return std::string(test.param == KvLayout::kNhd ? "NHD" : "HND");
                         });

}  // namespace
}  // namespace narrowfloat::testing
