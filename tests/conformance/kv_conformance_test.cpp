// Every implementation of the KV-cache operations against the oracle: all bytes of all tensors,
// with strided and stacked caches, tables of both widths, and tables that make no sense. That the
// oracle itself is right is for tests/golden and tests/unit/ops/kv_cache.
#include <algorithm>
#include <functional>
#include <numeric>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "ops/kv_cache/kv_problem.h"
#include "support/environment.h"
#include "support/kv_case.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kKvCases = 100;

// Fills a case's tensors and gives the call on them.
using KvCall = std::function<void(const DeviceCopies&)>;
using MakeKvCall = std::function<KvCall(KvTensors&)>;

std::vector<std::string> implementations(std::string_view op) {
  std::vector<std::string> names;
  const auto add = [&](const auto& impls) {
    for (const auto& impl : impls) names.emplace_back(impl.name);
  };
  if (op == "kv_quantize") add(kv_quantize_impls());
  if (op == "kv_dequantize") add(kv_dequantize_impls());
  if (op == "kv_reorder") add(kv_reorder_impls());
  return names;
}

// Among all bytes of a case; -1: none.
int64_t first_difference(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  if (a.size() != b.size()) return 0;
  const auto at = std::mismatch(a.begin(), a.end(), b.begin()).first;
  return at == a.end() ? -1 : at - a.begin();
}

class KvConformance : public DeviceTest<int> {
 protected:
  void check(const std::string& op, const std::string& what, const MakeKvCall& make) {
    Coverage coverage;
    for_cases(kKvCases, [&](int64_t index) {
      const uint64_t seed = case_seed(op + what, index);
      for (const Guard guard : {Guard::kCanary, Guard::kPage}) {
        const BufferStyle style{.poison = guard == Guard::kPage ? uint8_t{0xFF} : uint8_t{0xCC},
                                .guard = guard};
        KvTensors expected(seed, style);
        {
          const KvCall call = make(expected);
          const ForcedImplementation forced(op, "cpu_reference");
          call(DeviceCopies(expected.buffers(), {.on_host = true}));
        }
        for (const std::string& impl : implementations(op)) {
          if (!is_for_device(impl)) continue;
          const std::string note = fmt::format("{}\n  {}", repro_line(op, impl, index), what);
          set_crash_note(note.c_str());
          KvTensors actual(seed, style);
          const KvCall call = make(actual);
          const DeviceCopies device(actual.buffers(),
                                    {.programmatic_launch = guard == Guard::kPage});
          {
            const ForcedImplementation forced(op, impl);
            call(device);
          }
          coverage.ran(impl);
          EXPECT_TRUE(device.take_back()) << note;
          EXPECT_TRUE(actual.intact()) << note;
          EXPECT_EQ(first_difference(expected.bytes(), actual.bytes()), -1) << note;
        }
      }
      coverage.end_case(true, what);
    });
    coverage.report(what);
  }
};

DType half(Random& random) { return random.chance(50) ? DType::kBF16 : DType::kF16; }
DType index_type(Random& random) { return random.chance(50) ? DType::kI32 : DType::kI64; }
MathMode mode(Random& random) { return random.chance(50) ? MathMode::kExact : MathMode::kFast; }
Fill any_fill(Random& random) { return static_cast<Fill>(random.range(0, kNumFills - 1)); }
int64_t gap(Random& random) { return random.chance(30) ? 16 * random.range(1, 3) : 0; }
// An index that leads nowhere.
int64_t bad_index(Random& random) { return random.pick<int64_t>({-1, -7, 1 << 20, INT32_MIN}); }

std::vector<int64_t> shuffled_range(int64_t count, Random& random) {
  std::vector<int64_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  for (size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1],
              values[static_cast<size_t>(random.range(0, static_cast<int64_t>(i) - 1))]);
  }
  return values;
}

TEST_P(KvConformance, RowsAreQuantized) {
  check("kv_quantize", "rows", [](KvTensors& tensors) -> KvCall {
    Random& random = tensors.random();
    const int64_t rows = random.range(0, 40);
    const int64_t cols = 16 * random.range(0, 20);
    const TensorView input =
        tensors.numbers(half(random), {rows, cols}, any_fill(random), gap(random));
    const KvCodes output{tensors.output(DType::kU8, {rows, cols / 2}),
                         tensors.output(DType::kF8E4M3, {rows, cols / 16})};
    const KvScale scale = tensors.scale();
    const MathMode math = mode(random);
    return [=](const DeviceCopies& device) {
      kv_quantize(device.view(input), on_device(device, output), on_device(device, scale), math,
                  device.stream());
    };
  });
}

// Rows of keys and values, views of wider ones.
std::pair<TensorView, TensorView> sample_rows_of(KvTensors& tensors, const KvCaseShape& shape,
                                                 int64_t rows) {
  Random& random = tensors.random();
  const DType dtype = half(random);
  const int64_t space = gap(random);
  const auto one = [&](int64_t dim) {
    return tensors.numbers(dtype, {rows, shape.heads, dim}, any_fill(random), space);
  };
  const TensorView key = one(shape.k_dim);
  return {key, one(shape.v_dim)};
}

TEST_P(KvConformance, RowsGoToSlots) {
  check("kv_quantize", "slots", [](KvTensors& tensors) -> KvCall {
    Random& random = tensors.random();
    const KvCaseShape shape = sample_kv_shape(random);
    const PagedKvCache cache = tensors.cache(shape, false);
    std::vector<int64_t> slots = shuffled_range(shape.pages * shape.page_size, random);
    slots.resize(std::min<size_t>(slots.size(), 40));
    for (int64_t i = random.range(0, 4); i > 0; --i) {
      slots.insert(slots.begin() + random.range(0, static_cast<int64_t>(slots.size())),
                   random.chance(50) ? shape.pages * shape.page_size : bad_index(random));
    }
    const auto rows = static_cast<int64_t>(slots.size()) + random.range(0, 3);
    const auto [key, value] = sample_rows_of(tensors, shape, rows);
    const TensorView places =
        tensors.indices(index_type(random), slots, {static_cast<int64_t>(slots.size())});
    const MathMode math = mode(random);
    return [=, key = key, value = value](const DeviceCopies& device) {
      kv_append_slots(device.view(key), device.view(value), device.view(places),
                      on_device(device, cache), math, device.stream());
    };
  });
}

TEST_P(KvConformance, RowsGoToPositions) {
  check("kv_quantize", "positions", [](KvTensors& tensors) -> KvCall {
    Random& random = tensors.random();
    const KvCaseShape shape = sample_kv_shape(random);
    const PagedKvCache cache = tensors.cache(shape, false);
    std::vector<int64_t> pages = shuffled_range(shape.pages, random);
    const int64_t batch = random.range(0, 4);
    std::vector<int64_t> indptr{0};
    for (int64_t i = 0; i < batch; ++i) {
      indptr.push_back(i + 1 == batch ? shape.pages : random.range(indptr.back(), shape.pages));
    }
    std::vector<int64_t> batches;
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < batch; ++i) {
      const auto at = static_cast<size_t>(i);
      // Some positions lie beyond the request's pages.
      const int64_t tokens = (indptr[at + 1] - indptr[at]) * shape.page_size + 2;
      for (int64_t position = 0; position < tokens && positions.size() < 40; ++position) {
        if (random.chance(30)) continue;
        batches.push_back(i);
        positions.push_back(position);
      }
    }
    const auto spoil = [&](std::vector<int64_t>& values) {
      if (!values.empty() && random.chance(25)) {
        values[static_cast<size_t>(random.range(0, static_cast<int64_t>(values.size()) - 1))] =
            bad_index(random);
      }
    };
    spoil(batches);
    spoil(positions);
    spoil(pages);
    // A request with a wild start or end has no places at all, or none beyond the indices.
    if (random.chance(20)) indptr.back() = random.chance(50) ? shape.pages + 3 : -2;
    const DType dtype = index_type(random);
    const auto vector = [&](const std::vector<int64_t>& values) {
      return tensors.indices(dtype, values, {static_cast<int64_t>(values.size())});
    };
    const KvPositions places{vector(batches), vector(positions), vector(pages), vector(indptr)};
    const auto [key, value] =
        sample_rows_of(tensors, shape, static_cast<int64_t>(positions.size()));
    const MathMode math = mode(random);
    return [=, key = key, value = value](const DeviceCopies& device) {
      kv_append_paged(device.view(key), device.view(value), on_device(device, places),
                      on_device(device, cache), math, device.stream());
    };
  });
}

TEST_P(KvConformance, WholeCachesAreQuantized) {
  check("kv_quantize", "caches", [](KvTensors& tensors) -> KvCall {
    Random& random = tensors.random();
    KvCaseShape shape = sample_kv_shape(random);
    shape.page_size = random.pick<int64_t>({4, 8, 16});
    shape.k_dim = random.pick<int64_t>({64, 128});
    shape.v_dim = shape.is_stacked ? shape.k_dim : random.pick<int64_t>({64, 128, 256});
    PagedKvCache cache = tensors.cache(shape, false);
    cache.k_scale = tensors.output(DType::kF32, {1});
    cache.v_scale = tensors.output(DType::kF32, {1});
    const bool is_nhd = shape.layout == KvLayout::kNhd;
    const DType dtype = half(random);
    const auto input = [&](int64_t dim) {
      return tensors.numbers(dtype,
                             {shape.pages, is_nhd ? shape.page_size : shape.heads,
                              is_nhd ? shape.heads : shape.page_size, dim},
                             any_fill(random));
    };
    const TensorView key = input(shape.k_dim);
    const TensorView value = input(shape.v_dim);
    KvCacheQuantizeOptions options{.math = mode(random)};
    if (random.chance(40)) options.k_encode_scale = tensors.scale();
    if (random.chance(40)) options.v_encode_scale = tensors.scale();
    return [=](const DeviceCopies& device) {
      KvCacheQuantizeOptions moved = options;
      moved.k_encode_scale = on_device(device, options.k_encode_scale);
      moved.v_encode_scale = on_device(device, options.v_encode_scale);
      kv_quantize_paged_cache(device.view(key), device.view(value), on_device(device, cache), moved,
                              device.stream());
    };
  });
}

TEST_P(KvConformance, RowsAreDequantized) {
  check("kv_dequantize", "rows", [](KvTensors& tensors) -> KvCall {
    Random& random = tensors.random();
    const int64_t rows = random.range(0, 40);
    const int64_t cols = 16 * random.range(0, 20);
    const KvCodes input{tensors.random_bytes({rows, cols / 2}),
                        tensors.random_bytes({rows, cols / 16})};
    const DType dtype = random.chance(30) ? DType::kF32 : half(random);
    const TensorView output = tensors.output(dtype, {rows, cols}, gap(random));
    const KvScale scale = tensors.scale();
    return [=](const DeviceCopies& device) {
      kv_dequantize(on_device(device, input), device.view(output), on_device(device, scale),
                    device.stream());
    };
  });
}

TEST_P(KvConformance, PagesAreGathered) {
  check("kv_dequantize", "pages", [](KvTensors& tensors) -> KvCall {
    Random& random = tensors.random();
    const KvCaseShape shape = sample_kv_shape(random);
    const PagedKvCache cache = tensors.cache(shape, true);
    const int64_t batch = random.range(0, 4);
    const int64_t max_pages = random.range(0, 4);
    const int64_t max_seq = random.range(0, max_pages * shape.page_size + 3);
    std::vector<int64_t> table(static_cast<size_t>(batch * max_pages));
    for (int64_t& page : table) {
      page = random.chance(85) ? random.range(0, shape.pages) : bad_index(random);
    }
    std::vector<int64_t> lengths(static_cast<size_t>(batch));
    for (int64_t& length : lengths) {
      length = random.chance(85) ? random.range(0, max_seq + 5) : bad_index(random);
    }
    const TensorView block_tables = tensors.indices(index_type(random), table, {batch, max_pages});
    const TensorView seq_lens = tensors.indices(index_type(random), lengths, {batch});
    const DType dtype = random.chance(30) ? DType::kF32 : half(random);
    const int64_t space = gap(random);
    const auto output = [&](int64_t dim) {
      return tensors.output(dtype, {batch, max_seq, shape.heads, dim}, space);
    };
    const TensorView output_k = output(shape.k_dim);
    const TensorView output_v = output(shape.v_dim);
    return [=](const DeviceCopies& device) {
      kv_dequantize_paged(on_device(device, cache), device.view(block_tables),
                          device.view(seq_lens), device.view(output_k), device.view(output_v),
                          device.stream());
    };
  });
}

TEST_P(KvConformance, ScalesOfVAreReordered) {
  check("kv_reorder", "scales", [](KvTensors& tensors) -> KvCall {
    Random& random = tensors.random();
    const int64_t tokens = 4 * random.range(0, 5);
    const int64_t heads = random.range(0, 4);
    const bool is_nhd = random.chance(50);
    const std::vector<int64_t> shape{random.range(0, 4), is_nhd ? tokens : heads,
                                     is_nhd ? heads : tokens, 4 * random.range(0, 5)};
    const TensorView input = tensors.random_bytes(shape);
    const TensorView output = tensors.output(DType::kU8, shape, random.range(0, 5));
    const bool is_inverse = random.chance(50);
    const KvLayout layout = is_nhd ? KvLayout::kNhd : KvLayout::kHnd;
    return [=](const DeviceCopies& device) {
      (is_inverse ? kv_restore_v_scales : kv_reorder_v_scales)(
          device.view(input), device.view(output), layout, device.stream());
    };
  });
}

INSTANTIATE_TEST_SUITE_P(All, KvConformance, ::testing::Values(0),
                         [](const auto&) { return std::string("device"); });

}  // namespace
}  // namespace narrowfloat::testing
