// Every check at the door of the KV-cache operations: a valid call, spoilt in one place.
#include <array>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "narrowfloat/kv_cache.h"
#include "support/environment.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

using Words = std::vector<std::string>;

// Three rows of one head into a cache of two pages of four tokens.
struct Append {
  std::array<uint16_t, 48> numbers{};
  std::array<int32_t, 3> places{0, 1, 2};
  std::array<uint8_t, 64> k_values{};
  std::array<uint8_t, 64> v_values{};
  std::array<uint8_t, 8> k_scales{};
  std::array<uint8_t, 8> v_scales{};
  TensorView key = TensorView::contiguous(numbers.data(), DType::kBF16, {3, 1, 16});
  TensorView value = key;
  TensorView slots = TensorView::contiguous(places.data(), DType::kI32, {3});
  PagedKvCache cache{.k = codes(k_values.data(), k_scales.data()),
                     .v = codes(v_values.data(), v_scales.data()),
                     .layout = KvLayout::kNhd,
                     .k_scale = {},
                     .v_scale = {}};

  Append() {
    k_values.fill(0xCC);
    v_values.fill(0xCC);
  }
  Append(const Append&) = delete;
  Append& operator=(const Append&) = delete;

  static KvCodes codes(uint8_t* values, uint8_t* scales) {
    return {TensorView::contiguous(values, DType::kU8, {2, 4, 1, 8}),
            TensorView::contiguous(scales, DType::kF8E4M3, {2, 4, 1, 1})};
  }
  [[nodiscard]] bool is_untouched() const {
    std::array<uint8_t, 64> poison;
    poison.fill(0xCC);
    return k_values == poison && v_values == poison;
  }
};

void refused_append(const Words& words, const std::function<void(Append&)>& spoil) {
  Append call;
  spoil(call);
  expect_error(kInvalid, words,
               [&] { kv_append_slots(call.key, call.value, call.slots, call.cache); });
  EXPECT_TRUE(call.is_untouched());
}

TEST(KvAppend, RefusesRowsThatDoNotFit) {
  refused_append({"key", "BF16 or F16", "F32"}, [](Append& c) { c.key.dtype = DType::kF32; });
  refused_append({"value", "BF16", "F16"}, [](Append& c) { c.value.dtype = DType::kF16; });
  refused_append({"key", "1 heads", "[3, 2, 16]"}, [](Append& c) { c.key.shape[1] = 2; });
  refused_append({"value", "3 rows", "[2, 1, 16]"}, [](Append& c) { c.value.shape[0] = 2; });
  refused_append({"key", "multiple of 16", "8"}, [](Append& c) { c.key.shape[2] = 8; });
  refused_append({"key", "stride 1"}, [](Append& c) { c.key.strides[2] = 2; });
  refused_append({"slots", "I32 or I64", "F32"}, [](Append& c) { c.slots.dtype = DType::kF32; });
  refused_append({"slots", "at most 3", "[4]"}, [](Append& c) { c.slots.shape[0] = 4; });
  refused_append({"cache.k.values", "overlaps key"},
                 [](Append& c) { c.key.data = c.cache.k.values.data; });
}

TEST(KvAppend, RefusesFactorsInsideTheCache) {
  alignas(4) std::array<uint8_t, 64> values{};
  const TensorView factor = TensorView::contiguous(values.data() + 8, DType::kF32, {1});
  const Words k_words{"cache.v.values", "overlaps cache.k_scale"};
  refused_append(k_words, [&](Append& c) {
    c.cache.v.values.data = values.data();
    c.cache.k_scale = factor;
  });
  Append call;
  call.cache.k.values.data = values.data();
  call.cache.v_scale = factor;
  expect_error(kInvalid, {"cache.k.values", "overlaps cache.v_scale"}, [&] {
    kv_append_paged(call.key, call.value, {call.slots, call.slots, call.slots, call.slots},
                    call.cache);
  });
}

TEST(KvAppend, RefusesCachesThatDoNotFit) {
  refused_append({"cache.k_scale", "above 0", "0"}, [](Append& c) { c.cache.k_scale = 0.0F; });
  refused_append({"cache.v_scale", "above 0", "-1"}, [](Append& c) { c.cache.v_scale = -1.0F; });
  refused_append({"cache.k.values", "four axes"}, [](Append& c) { c.cache.k.values.rank = 3; });
  refused_append({"cache.v.values", "[2, 4, 1, 8]"},
                 [](Append& c) { c.cache.v.values.shape[0] = 1; });
  refused_append({"cache.v.scales", "F8_E4M3 or U8", "F32"},
                 [](Append& c) { c.cache.v.scales.dtype = DType::kF32; });
  refused_append({"cache.k.scales", "[2, 4, 1, 1]"},
                 [](Append& c) { c.cache.k.scales.shape[3] = 2; });
  refused_append({"cache.k.values", "stride 1"},
                 [](Append& c) { c.cache.k.values.strides[3] = 2; });
  refused_append({"cache.k.values", "at least 8", "axis 0"},
                 [](Append& c) { c.cache.k.values.strides[0] = 4; });
  refused_append({"cache.v.scales", "null"}, [](Append& c) { c.cache.v.scales.data = nullptr; });
  refused_append({"layout", "5"}, [](Append& c) { c.cache.layout = static_cast<KvLayout>(5); });
  Append call;
  expect_error(kInvalid, {"math", "7"}, [&] {
    kv_append_slots(call.key, call.value, call.slots, call.cache, static_cast<MathMode>(7));
  });
}

TEST(KvAppend, IntoNoPagesDoesNothing) {
  Append call;
  for (KvCodes* codes : {&call.cache.k, &call.cache.v}) {
    for (TensorView* view : {&codes->values, &codes->scales}) view->shape[0] = view->shape[1] = 0;
  }
  kv_append_slots(call.key, call.value, call.slots, call.cache);
  EXPECT_TRUE(call.is_untouched());
}

TEST(KvAppend, PositionsHaveOneTypeAndLength) {
  Append call;
  const TensorView good = call.slots;
  TensorView wide = good;
  wide.dtype = DType::kI64;
  TensorView few = good;
  few.shape[0] = 2;
  TensorView none = good;
  none.shape[0] = 0;
  const auto refused = [&](const Words& words, const KvPositions& positions) {
    expect_error(kInvalid, words,
                 [&] { kv_append_paged(call.key, call.value, positions, call.cache); });
    EXPECT_TRUE(call.is_untouched());
  };
  refused({"positions.batch_indices", "I32", "I64"}, {wide, good, good, good});
  refused({"positions.positions", "3 values"}, {good, few, good, good});
  refused({"positions.indptr", "[batch + 1]"}, {good, good, good, none});
}

TEST(KvQuantize, RefusesWhatCannotWork) {
  const std::array<uint16_t, 32> numbers{};
  const std::array<uint8_t, 16> codes{};
  const std::array<uint8_t, 2> scales{};
  const auto view = [](const auto& buffer, DType dtype, std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(buffer.data(), dtype, shape);
  };
  const TensorView input = view(numbers, DType::kBF16, {2, 16});
  const KvCodes output{view(codes, DType::kU8, {2, 8}), view(scales, DType::kF8E4M3, {2, 1})};
  const auto refused = [](const Words& words, const TensorView& in, const KvCodes& out,
                          const KvScale& scale = {}) {
    expect_error(kInvalid, words, [&] { kv_quantize(in, out, scale); });
  };
  refused({"input", "BF16 or F16", "U8"}, output.values, output);
  refused({"input", "multiple of 16", "[4, 8]"}, view(numbers, DType::kBF16, {4, 8}), output);
  refused({"output.values", "U8", "F8_E4M3"}, input, {output.scales, output.scales});
  refused({"output.values", "8 columns"}, input, {view(codes, DType::kU8, {4, 4}), output.scales});
  refused({"output.scales", "2 rows"}, input, {output.values, view(scales, DType::kU8, {1, 1})});
  refused({"decode_scale", "finite", "inf"}, input, output, std::numeric_limits<float>::infinity());
  refused({"decode_scale", "1 values"}, input, output, view(numbers, DType::kF32, {2}));
  refused({"output.values", "overlaps"}, input, {view(numbers, DType::kU8, {2, 8}), output.scales});
  alignas(4) const std::array<uint8_t, 16> shared{};
  refused({"output.values", "overlaps decode_scale"}, input,
          {view(shared, DType::kU8, {2, 8}), output.scales}, view(shared, DType::kF32, {1}));
}

TEST(KvDequantize, RefusesWhatCannotWork) {
  const std::array<float, 32> numbers{};
  const std::array<uint8_t, 16> codes{};
  const std::array<uint8_t, 2> scales{};
  const auto view = [](const auto& buffer, DType dtype, std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(buffer.data(), dtype, shape);
  };
  const TensorView output = view(numbers, DType::kF32, {2, 16});
  const KvCodes input{view(codes, DType::kU8, {2, 8}), view(scales, DType::kF8E4M3, {2, 1})};
  const auto refused = [](const Words& words, const KvCodes& in, const TensorView& out) {
    expect_error(kInvalid, words, [&] { kv_dequantize(in, out); });
  };
  refused({"output", "BF16 or F16 or F32", "I32"}, input, view(numbers, DType::kI32, {2, 16}));
  refused({"output", "multiple of 16"}, input, view(numbers, DType::kF32, {4, 8}));
  refused({"input.values", "1 rows"}, input, view(numbers, DType::kF32, {1, 16}));
  refused({"output", "overlaps input.values"}, {view(numbers, DType::kU8, {2, 8}), input.scales},
          output);
  expect_error(kInvalid, {"output", "overlaps decode_scale"},
               [&] { kv_dequantize(input, output, view(numbers, DType::kF32, {1})); });
}

// One sequence of up to four tokens.
struct Gather {
  Append stored;
  std::array<int32_t, 1> table{1};
  std::array<int32_t, 1> lengths{4};
  std::array<uint16_t, 64> k_numbers{};
  std::array<uint16_t, 64> v_numbers{};
  TensorView block_tables = TensorView::contiguous(table.data(), DType::kI32, {1, 1});
  TensorView seq_lens = TensorView::contiguous(lengths.data(), DType::kI32, {1});
  TensorView output_k = TensorView::contiguous(k_numbers.data(), DType::kF16, {1, 4, 1, 16});
  TensorView output_v = TensorView::contiguous(v_numbers.data(), DType::kF16, {1, 4, 1, 16});
};

void refused_gather(const Words& words, const std::function<void(Gather&)>& spoil) {
  Gather call;
  spoil(call);
  expect_error(kInvalid, words, [&] {
    kv_dequantize_paged(call.stored.cache, call.block_tables, call.seq_lens, call.output_k,
                        call.output_v);
  });
}

TEST(KvDequantizePaged, RefusesWhatCannotWork) {
  refused_gather({"block_tables", "[batch, max_pages]"},
                 [](Gather& c) { c.block_tables.rank = 1; });
  refused_gather({"block_tables", "I32 or I64", "F32"},
                 [](Gather& c) { c.block_tables.dtype = DType::kF32; });
  refused_gather({"seq_lens", "1 values"}, [](Gather& c) { c.seq_lens.shape[0] = 0; });
  refused_gather({"output_k", "head_dim", "F16[4, 4, 1, 16]"},
                 [](Gather& c) { c.output_k.shape[0] = 4; });
  refused_gather({"output_v", "[1, 4, 1, head_dim]"}, [](Gather& c) { c.output_v.shape[1] = 2; });
  refused_gather({"output_v", "F16", "BF16"}, [](Gather& c) { c.output_v.dtype = DType::kBF16; });
  refused_gather({"cache.k.values", "[2, 4, 1, 16]"}, [](Gather& c) {
    c.output_k = TensorView::contiguous(c.k_numbers.data(), DType::kF16, {1, 2, 1, 32});
    c.output_v.shape[1] = 2;
  });
  refused_gather({"output_k", "overlaps cache."},
                 [](Gather& c) { c.output_k.data = c.stored.v_values.data(); });
  refused_gather({"output_v", "overlaps cache.k_scale"}, [](Gather& c) {
    alignas(4) static std::array<uint16_t, 64> numbers{};
    c.output_v.data = numbers.data();
    c.stored.cache.k_scale = TensorView::contiguous(numbers.data(), DType::kF32, {1});
  });
}

TEST(KvQuantizePagedCache, RefusesWhatCannotWork) {
  const std::array<uint16_t, 512> numbers{};
  const std::array<uint8_t, 512> codes{};
  const std::array<float, 2> decode{};
  const auto refused = [&](const Words& words, int64_t tokens, int64_t dim, bool has_scales) {
    const auto stored = [&](int64_t first, DType dtype, int64_t width) {
      return TensorView::contiguous(codes.data() + first, dtype, {1, tokens, 1, width});
    };
    PagedKvCache output{.k = {stored(0, DType::kU8, dim / 2), stored(128, DType::kU8, dim / 16)},
                        .v = {stored(256, DType::kU8, dim / 2), stored(384, DType::kU8, dim / 16)},
                        .layout = KvLayout::kNhd,
                        .k_scale = 1.0F,
                        .v_scale = {}};
    if (has_scales) {
      output.k_scale = TensorView::contiguous(decode.data(), DType::kF32, {1});
      output.v_scale = TensorView::contiguous(decode.data() + 1, DType::kF32, {1});
    }
    const TensorView input =
        TensorView::contiguous(numbers.data(), DType::kBF16, {1, tokens, 1, dim});
    expect_error(kInvalid, words, [&] { kv_quantize_paged_cache(input, input, output); });
  };
  refused({"output", "multiple of 4", "2"}, 2, 64, true);
  refused({"key", "multiple of 64", "32"}, 4, 32, true);
  refused({"output.k_scale", "F32 [1]"}, 4, 64, false);
}

// A page of four tokens into buffers that may be made to overlap.
struct WholeCache {
  std::array<uint16_t, 256> numbers{};
  alignas(4) std::array<uint8_t, 288> codes{};
  std::array<float, 2> decode{-1.0F, -1.0F};
  float encode = 2.0F;
  KvCacheQuantizeOptions options;
  PagedKvCache output{
      .k = {part(0, 32), part(128, 4)},
      .v = {part(144, 32), part(272, 4)},
      .layout = KvLayout::kNhd,
      .k_scale = one(&decode[0]),
      .v_scale = one(&decode[1]),
  };

  WholeCache() { numbers.fill(0x4000); }
  WholeCache(const WholeCache&) = delete;
  WholeCache& operator=(const WholeCache&) = delete;

  TensorView part(size_t first, int64_t width) {
    return TensorView::contiguous(codes.data() + first, DType::kU8, {1, 4, 1, width});
  }
  static TensorView one(void* at) { return TensorView::contiguous(at, DType::kF32, {1}); }
  void run() {
    const TensorView input = TensorView::contiguous(numbers.data(), DType::kBF16, {1, 4, 1, 64});
    kv_quantize_paged_cache(input, input, output, options);
  }
};

TEST(KvQuantizePagedCache, RefusesScalesThatOverlap) {
  const auto refused = [](const Words& words, const std::function<void(WholeCache&)>& spoil) {
    WholeCache call;
    spoil(call);
    const auto before = call.codes;
    expect_error(kInvalid, words, [&] { call.run(); });
    EXPECT_EQ(call.codes, before);
    EXPECT_EQ(call.decode, (std::array<float, 2>{-1.0F, -1.0F}));
  };
  refused({"output.k_scale", "overlaps output.k.values"},
          [](WholeCache& c) { c.output.k_scale = c.one(c.codes.data()); });
  refused({"output.v_scale", "overlaps output.v.scales"},
          [](WholeCache& c) { c.output.v_scale = c.one(c.codes.data() + 272); });
  refused({"output.k_scale", "overlaps output.v_scale"},
          [](WholeCache& c) { c.output.v_scale = c.output.k_scale; });
  refused({"output.k_scale", "overlaps options.v_encode_scale"},
          [](WholeCache& c) { c.options.v_encode_scale = c.output.k_scale; });
  refused({"cache.v.values", "overlaps options.k_encode_scale"},
          [](WholeCache& c) { c.options.k_encode_scale = c.one(c.codes.data() + 144); });
  WholeCache call;
  call.options.v_encode_scale = WholeCache::one(&call.encode);
  call.run();
  EXPECT_EQ(call.decode, (std::array<float, 2>{2.0F / 448.0F, 0.5F}));
}

TEST(KvQuantizePagedCache, StoresNoMaximumWhenNothingRuns) {
  WholeCache call;
  const ForcedImplementation forced("kv_quantize", "none");
  EXPECT_THROW(call.run(), Error);
  EXPECT_EQ(call.decode, (std::array<float, 2>{-1.0F, -1.0F}));
}

TEST(KvReorderVScales, RefusesWhatCannotWork) {
  const std::array<uint8_t, 64> in{};
  const std::array<uint8_t, 64> out{};
  const auto refused = [&](const Words& words, std::initializer_list<int64_t> from,
                           std::initializer_list<int64_t> to) {
    expect_error(kInvalid, words, [&] {
      kv_reorder_v_scales(TensorView::contiguous(in.data(), DType::kU8, from),
                          TensorView::contiguous(out.data(), DType::kU8, to), KvLayout::kNhd);
    });
  };
  refused({"input", "four axes"}, {4, 4}, {4, 4});
  refused({"output", "[1, 4, 1, 4]", "[1, 4, 4, 1]"}, {1, 4, 1, 4}, {1, 4, 4, 1});
  refused({"input", "multiples of 4", "4 and 3"}, {1, 4, 1, 3}, {1, 4, 1, 3});
  refused({"input", "multiples of 4", "2 and 4"}, {1, 2, 1, 4}, {1, 2, 1, 4});
}

}  // namespace
}  // namespace narrowfloat::testing
