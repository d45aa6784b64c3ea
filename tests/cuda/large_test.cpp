// Tensors of more than 2^31 elements and 2^32 bytes on the GPU: the same bytes as
// their rows give in small calls, and as the host gives for rows at both ends and around the
// borders.
#include <algorithm>
#include <functional>

#include <fmt/format.h>

#include "cuda/bulk_kernels.h"
#include "cuda/gpu_test.h"
#include "narrowfloat/group_quantize.h"
#include "narrowfloat/kv_cache.h"
#include "narrowfloat/pack_bits.h"
#include "narrowfloat/shuffle.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kLargeRows = 799040;
constexpr int64_t kLargeCols = 2688;
constexpr int64_t kLargeRowBytes = kLargeCols * 2;
constexpr int64_t kNeededBytes = int64_t{20} << 30;
static_assert(kLargeRows * kLargeCols > int64_t{1} << 31);

class GpuLarge : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (free_device_memory() < kNeededBytes) GTEST_SKIP() << "skipped: needs 20 GiB of memory";
    input_ = DeviceBuffer(kLargeRows * kLargeRowBytes);
    fill_with_numbers(input_);
  }

  static TensorView rows_of(const DeviceBuffer& buffer, int64_t first, int64_t count) {
    return TensorView::contiguous(buffer.data() + first * kLargeRowBytes, DType::kBF16,
                                  {count, kLargeCols}, gpu());
  }

  DeviceBuffer input_;
};

// A quantized tensor of kLargeRows rows, and the part of it that holds some rows.
struct LargeTensor {
  QuantizedLayout layout;
  DeviceBuffer values;
  DeviceBuffer scales;
  DeviceBuffer global_scale;

  LargeTensor(FormatId format, ScaleLayoutId scale_layout, uint8_t poison)
      : layout(quantized_layout(format, kLargeRows, kLargeCols, {.scale_layout = scale_layout})),
        values(layout.values_bytes, {.poison = poison}),
        scales(layout.scales_bytes, {.poison = poison}),
        global_scale(layout.global_scales * 4) {}

  [[nodiscard]] QuantizedView view(int64_t first = 0, int64_t count = kLargeRows) const {
    const QuantizedLayout part =
        quantized_layout(layout.format, count, kLargeCols, {.scale_layout = layout.scale_layout});
    const QuantizedLayout before =
        quantized_layout(layout.format, first, kLargeCols, {.scale_layout = layout.scale_layout});
    // Formats with one scale of the tensor keep it at the beginning.
    const bool has_row_scale = format_info(layout.format).has_row_scale;
    const bool has_blocks = format_info(layout.format).block_cols != 0;
    return part.bind(
        values.data() + before.values_bytes, scales.data() + (has_blocks ? before.scales_bytes : 0),
        reinterpret_cast<float*>(global_scale.data()) + (has_row_scale ? first : 0), gpu());
  }
};

QuantizeOptions options_of(FormatId format) {
  QuantizeOptions options;
  // A maximum of the tensor would not be the maximum of a part.
  if (format == FormatId::kNvfp4) options.encode_scale = 1.75F;
  if (format == FormatId::kFp8Tensor) options.fp8_decode_scale = 0.25F;
  return options;
}

// Calls body for parts of whole 128-row tiles, so that parts of swizzled scales are contiguous.
template <typename Body>
void for_pieces(const Body& body) {
  constexpr int64_t kPiece = 128 * 100;
  for (int64_t first = 0; first < kLargeRows; first += kPiece) {
    body(first, std::min(kPiece, kLargeRows - first));
  }
}

std::vector<uint8_t> read(const DeviceBuffer& buffer, int64_t at, int64_t count) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  buffer.read(bytes.data(), count, at);
  return bytes;
}

// Rows of a linear result against the host.
void expect_host_rows(const DeviceBuffer& input, const LargeTensor& large, int64_t first) {
  constexpr int64_t kSample = 32;
  const Matrix rows({.rows = kSample, .cols = kLargeCols});
  input.read(rows.buffer().data(), rows.buffer().size(), first * kLargeRowBytes);
  const QuantizedTensor expected = quantized(rows, {.format = large.layout.format,
                                                    .layout = ScaleLayoutId::kLinear,
                                                    .options = options_of(large.layout.format)});
  const int64_t value_bytes = expected.values.size() / kSample;
  const int64_t scale_bytes = expected.scales.size() / kSample;
  EXPECT_TRUE(expected.values.copy() ==
              read(large.values, first * value_bytes, expected.values.size()))
      << "values from row " << first;
  EXPECT_TRUE(expected.scales.copy() ==
              read(large.scales, first * scale_bytes, expected.scales.size()))
      << "scales from row " << first;
}

TEST_F(GpuLarge, QuantizesAsInPieces) {
  using Kind = std::pair<FormatId, ScaleLayoutId>;
  for (const auto& [format, layout] : {Kind{FormatId::kNvfp4, ScaleLayoutId::kLinear},
                                       Kind{FormatId::kNvfp4, ScaleLayoutId::kSwizzled128x4},
                                       Kind{FormatId::kMxfp4, ScaleLayoutId::kLinear},
                                       Kind{FormatId::kMxfp8, ScaleLayoutId::kLinear},
                                       Kind{FormatId::kMxfp8, ScaleLayoutId::kSwizzled128x4},
                                       Kind{FormatId::kNvfp4PerToken, ScaleLayoutId::kLinear},
                                       Kind{FormatId::kFp8Block1x128, ScaleLayoutId::kLinear},
                                       Kind{FormatId::kFp8Block128x128, ScaleLayoutId::kLinear},
                                       Kind{FormatId::kFp8Tensor, ScaleLayoutId::kLinear}}) {
    SCOPED_TRACE(fmt::format("{} {}", name(format), name(layout)));
    const LargeTensor whole(format, layout, 0xCC);
    const LargeTensor pieces(format, layout, 0x33);
    const QuantizeOptions options = options_of(format);
    quantize(rows_of(input_, 0, kLargeRows), whole.view(), options);
    for_pieces([&](int64_t first, int64_t count) {
      quantize(rows_of(input_, first, count), pieces.view(first, count), options);
    });
    synchronize_device();
    EXPECT_EQ(count_differences(whole.values, pieces.values), 0);
    EXPECT_EQ(count_differences(whole.scales, pieces.scales), 0);
    EXPECT_EQ(whole.global_scale.copy(), pieces.global_scale.copy());
    EXPECT_TRUE(whole.values.intact() && whole.scales.intact());
    // Scales of single rows are needed to compare some rows.
    if (layout != ScaleLayoutId::kLinear || format_info(format).block_rows != 1) continue;
    // Around element 2^31, and around 2^31 and 2^32 bytes of input.
    for (const int64_t first : {int64_t{0}, (int64_t{1} << 30) / kLargeCols - 16,
                                (int64_t{1} << 31) / kLargeCols - 16, kLargeRows - 32}) {
      expect_host_rows(input_, whole, first);
    }
  }
}

TEST_F(GpuLarge, MnMajorScalesAreTheLinearOnesMoved) {
  const LargeTensor linear(FormatId::kFp8Block1x128, ScaleLayoutId::kLinear, 0xCC);
  const LargeTensor mn_major(FormatId::kFp8Block1x128, ScaleLayoutId::kMnMajor, 0xCC);
  const LargeTensor moved(FormatId::kFp8Block1x128, ScaleLayoutId::kMnMajor, 0x33);
  quantize(rows_of(input_, 0, kLargeRows), linear.view());
  quantize(rows_of(input_, 0, kLargeRows), mn_major.view());
  relayout(FormatId::kFp8Block1x128, linear.view().scales, moved.view().scales);
  synchronize_device();
  EXPECT_EQ(count_differences(mn_major.scales, moved.scales), 0);
  EXPECT_EQ(count_differences(mn_major.values, linear.values), 0);
}

TEST_F(GpuLarge, DequantizesAsInPieces) {
  const LargeTensor coded(FormatId::kNvfp4, ScaleLayoutId::kLinear, 0xCC);
  quantize(rows_of(input_, 0, kLargeRows), coded.view(), options_of(FormatId::kNvfp4));
  const DeviceBuffer whole(kLargeRows * kLargeRowBytes, {.poison = 0xCC});
  const DeviceBuffer pieces(kLargeRows * kLargeRowBytes, {.poison = 0x33});
  dequantize(coded.view(), rows_of(whole, 0, kLargeRows));
  for_pieces([&](int64_t first, int64_t count) {
    dequantize(coded.view(first, count), rows_of(pieces, first, count));
  });
  synchronize_device();
  EXPECT_EQ(count_differences(whole, pieces), 0);
}

TEST_F(GpuLarge, TheMaximumMayBeTheLastElement) {
  const uint16_t largest = 0x4640;  // 12288, above all others.
  input_.write(&largest, 2, input_.size() - 2);
  const DeviceBuffer maximum(4);
  const DeviceBuffer maxima(kLargeRows * 4);
  const auto vector = [](const DeviceBuffer& buffer) {
    return TensorView::contiguous(buffer.data(), DType::kF32, {buffer.size() / 4}, gpu());
  };
  tensor_amax(rows_of(input_, 0, kLargeRows), vector(maximum));
  row_amax(rows_of(input_, 0, kLargeRows), vector(maxima));
  float all = 0.0F;
  float last = 0.0F;
  maximum.read(&all, 4);
  maxima.read(&last, 4, maxima.size() - 4);
  EXPECT_EQ(all, 12288.0F);
  EXPECT_EQ(last, 12288.0F);
}

// A call on rows [first, first + count) of the input, which writes to `output`.
using CallOnRows = std::function<void(const DeviceBuffer& output, int64_t first, int64_t count)>;

void expect_same_in_pieces(const char* what, int64_t output_bytes, const CallOnRows& call) {
  SCOPED_TRACE(what);
  const DeviceBuffer whole(output_bytes, {.poison = 0xCC});
  const DeviceBuffer pieces(output_bytes, {.poison = 0x33});
  call(whole, 0, kLargeRows);
  for_pieces([&](int64_t first, int64_t count) { call(pieces, first, count); });
  synchronize_device();
  EXPECT_EQ(count_differences(whole, pieces), 0);
  EXPECT_TRUE(whole.intact());
}

// Rows of `width` bytes from one on; codes lie before scales.
TensorView bytes_of(const DeviceBuffer& buffer, int64_t at, DType dtype, int64_t first,
                    int64_t count, int64_t width) {
  return TensorView::contiguous(buffer.data() + at + first * width, dtype,
                                {count, width * 8 / bits(dtype)}, gpu());
}

TEST_F(GpuLarge, OperationsWithoutAFormatAreAsInPieces) {
  constexpr int64_t kGroups = kLargeCols / 128;
  const int64_t code_bytes = kLargeRows * kLargeCols;
  expect_same_in_pieces("group_quantize", code_bytes + kLargeRows * kGroups * 4,
                        [&](const DeviceBuffer& to, int64_t first, int64_t count) {
                          quantize_group_8bit(
                              rows_of(input_, first, count),
                              bytes_of(to, 0, DType::kF8E4M3, first, count, kLargeCols),
                              bytes_of(to, code_bytes, DType::kF32, first, count, kGroups * 4));
                        });
  const auto codes = [&](const DeviceBuffer& of, int64_t first, int64_t count) {
    return KvCodes{bytes_of(of, 0, DType::kU8, first, count, kLargeCols / 2),
                   bytes_of(of, code_bytes / 2, DType::kU8, first, count, kLargeCols / 16)};
  };
  const int64_t kv_bytes = code_bytes / 2 + code_bytes / 16;
  expect_same_in_pieces("kv_quantize", kv_bytes,
                        [&](const DeviceBuffer& to, int64_t first, int64_t count) {
                          kv_quantize(rows_of(input_, first, count), codes(to, first, count));
                        });
  const DeviceBuffer coded(kv_bytes);
  kv_quantize(rows_of(input_, 0, kLargeRows), codes(coded, 0, kLargeRows));
  expect_same_in_pieces("kv_dequantize", kLargeRows * kLargeRowBytes,
                        [&](const DeviceBuffer& to, int64_t first, int64_t count) {
                          kv_dequantize(codes(coded, first, count), rows_of(to, first, count));
                        });
  expect_same_in_pieces("shuffle", kLargeRows * kLargeRowBytes,
                        [&](const DeviceBuffer& to, int64_t first, int64_t count) {
                          shuffle_rows(rows_of(input_, first, count), rows_of(to, first, count),
                                       128);
                        });
  expect_same_in_pieces(
      "pack_bits", kLargeRows * kLargeRowBytes / 8,
      [&](const DeviceBuffer& to, int64_t first, int64_t count) {
        const auto flat = [](const DeviceBuffer& buffer, int64_t at, int64_t size) {
          return TensorView::contiguous(buffer.data() + at, DType::kU8, {size}, gpu());
        };
        pack_bits(flat(input_, first * kLargeRowBytes, count * kLargeRowBytes),
                  flat(to, first * kLargeRowBytes / 8, count * kLargeRowBytes / 8));
      });
}

}  // namespace
}  // namespace narrowfloat::testing
