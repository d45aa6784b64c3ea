// Offsets beyond 2^31 elements and 2^32 bytes, in sparse mappings: pages that nobody writes cost
// nothing. The row-list case writes 137 MB and runs where twice that is free; the whole-tensor case
// writes over 1 GiB and runs with NARROWFLOAT_LARGE=1 only. Sanitizer builds skip both.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <sys/mman.h>

#include <gtest/gtest.h>

#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

class SparseMemory {
 public:
  explicit SparseMemory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparseMemory() {
    if (ok()) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  [[nodiscard]] bool ok() const { return data_ != MAP_FAILED; }
  [[nodiscard]] uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
constexpr bool kSanitized = __has_feature(address_sanitizer) != 0;
#else
constexpr bool kSanitized = false;
#endif

// MemAvailable of /proc/meminfo; 0 where that cannot be read.
int64_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  std::string unit;
  for (int64_t kibibytes = 0; meminfo >> key >> kibibytes && std::getline(meminfo, unit);) {
    if (key == "MemAvailable:") return kibibytes * 1024;
  }
  return 0;
}

// Rows that lie 2^31 + 16 elements apart.
constexpr int64_t kStride = (int64_t{1} << 31) + 16;
constexpr int64_t kStridedRows = 4;

TEST(QuantizeLarge, RowsFarApart) {
  constexpr int64_t kCols = 256;
  const SparseMemory memory((kStridedRows - 1) * kStride * 2 + kCols * 2);
  if (!memory.ok()) GTEST_SKIP() << "no 13 GB of address space";
  const Matrix dense = Matrix::filled({.dtype = DType::kBF16, .rows = kStridedRows, .cols = kCols},
                                      Fill::kNormal, 1);
  for (int64_t row = 0; row < kStridedRows; ++row) {
    std::memcpy(memory.data() + row * kStride * 2, dense.row(row), size_t{kCols * 2});
  }
  TensorView view = TensorView::contiguous(memory.data(), DType::kBF16, {kStridedRows, kCols});
  view.strides[0] = kStride;
  for (const FormatInfo& info : all_formats()) {
    const QuantizedTensor expected = quantized(dense, {.format = info.id});
    const QuantizedTensor actual(expected.layout);
    quantize(view, actual.view);
    EXPECT_EQ(bytes_of(actual), bytes_of(expected)) << info.name;
  }
  const Vector maxima(DType::kF32, kStridedRows);
  const Vector expected(DType::kF32, kStridedRows);
  row_amax(view, maxima.view());
  row_amax(dense.view(), expected.view());
  EXPECT_EQ(maxima.buffer().copy(), expected.buffer().copy());
}

TEST(DequantizeLarge, RowsFarApart) {
  constexpr int64_t kCols = 256;
  const SparseMemory memory((kStridedRows - 1) * kStride * 4 + kCols * 4);
  if (!memory.ok()) GTEST_SKIP() << "no 26 GB of address space";
  const Matrix input = Matrix::filled({.dtype = DType::kBF16, .rows = kStridedRows, .cols = kCols},
                                      Fill::kNormal, 2);
  const QuantizedTensor tensor = quantized(input, {.format = FormatId::kMxfp8});
  TensorView view = TensorView::contiguous(memory.data(), DType::kF32, {kStridedRows, kCols});
  view.strides[0] = kStride;
  dequantize(tensor.view, view);
  const Matrix expected = dequantized(tensor.view);
  for (int64_t row = 0; row < kStridedRows; ++row) {
    EXPECT_EQ(0,
              std::memcmp(memory.data() + row * kStride * 4, expected.row(row), size_t{kCols * 4}));
  }
}

// Most rows are not listed, so that their values (1 GiB) are never touched.
TEST(QuantizeLarge, ListedRowsOfATensorBeyondTwoToTheThirtyOne) {
  if (kSanitized) GTEST_SKIP() << "not in sanitizer builds";
  constexpr int64_t kRows = 798848 + 64;
  constexpr int64_t kCols = 2688;
  const QuantizedLayout layout = quantized_layout(FormatId::kNvfp4PerToken, kRows, kCols);
  const int64_t written = layout.scales_bytes + layout.global_scales * 4;  // Cleared as a whole.
  if (const int64_t available = available_bytes(); available < 2 * written) {
    GTEST_SKIP() << "MemAvailable is " << available << " bytes, needs " << 2 * written;
  }
  const SparseMemory input(kRows * kCols * 2);
  const SparseMemory values(layout.values_bytes);
  const SparseMemory scales(layout.scales_bytes);
  const SparseMemory row_scales(layout.global_scales * 4);
  if (!input.ok() || !values.ok() || !scales.ok() || !row_scales.ok()) {
    GTEST_SKIP() << "no 6 GB of address space";
  }
  const std::vector<int32_t> list{0, 1, 400000, 798847, 798848, kRows - 1};
  const Matrix some = Matrix::filled(
      {.dtype = DType::kBF16, .rows = static_cast<int64_t>(list.size()), .cols = kCols},
      Fill::kNormal, 3);
  for (size_t i = 0; i < list.size(); ++i) {
    std::memcpy(input.data() + int64_t{list[i]} * kCols * 2, some.row(static_cast<int64_t>(i)),
                size_t{kCols * 2});
  }
  const Vector rows = Vector::of(DType::kI32, list);
  const QuantizedView output =
      layout.bind(values.data(), scales.data(), reinterpret_cast<float*>(row_scales.data()));
  QuantizeOptions options;
  options.row_list = rows.view();
  quantize(TensorView::contiguous(input.data(), DType::kBF16, {kRows, kCols}), output, options);
  const QuantizedTensor expected = quantized(some, {.format = FormatId::kNvfp4PerToken});
  for (size_t i = 0; i < list.size(); ++i) {
    const auto small = static_cast<int64_t>(i);
    const int64_t row = list[i];
    EXPECT_EQ(0, std::memcmp(values.data() + row * kCols / 2,
                             expected.values.data() + small * kCols / 2, size_t{kCols / 2}));
    EXPECT_EQ(reinterpret_cast<const float*>(row_scales.data())[row],
              expected.global_scale.data<float>()[small]);
    for (int64_t block = 0; block < kCols / 16; ++block) {
      EXPECT_EQ(scales.data()[scale_offset(layout.scale_layout, row, block, kRows, kCols / 16)],
                expected.scales.data()[scale_offset(layout.scale_layout, small, block,
                                                    expected.layout.rows, kCols / 16)]);
    }
  }
}

TEST(QuantizeLarge, WholeTensorBeyondTwoToTheThirtyOne) {
  if (kSanitized) GTEST_SKIP() << "not in sanitizer builds";
  if (std::getenv("NARROWFLOAT_LARGE") == nullptr) GTEST_SKIP() << "set NARROWFLOAT_LARGE=1";
  constexpr int64_t kRows = 798848 + 64;
  constexpr int64_t kCols = 2688;
  constexpr int64_t kTail = 192;  // Rows compared at the end.
  for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp8}) {
    const QuantizedLayout layout = quantized_layout(format, kRows, kCols);
    const SparseMemory input(kRows * kCols * 2);
    const SparseMemory values(layout.values_bytes);
    const SparseMemory scales(layout.scales_bytes);
    if (!input.ok() || !values.ok() || !scales.ok()) GTEST_SKIP() << "no address space";
    const Matrix tail =
        Matrix::filled({.dtype = DType::kBF16, .rows = kTail, .cols = kCols}, Fill::kNormal, 4);
    std::memcpy(input.data() + (kRows - kTail) * kCols * 2, tail.row(0), size_t{kTail * kCols * 2});
    float global_scale = 0.0F;
    quantize(TensorView::contiguous(input.data(), DType::kBF16, {kRows, kCols}),
             layout.bind(values.data(), scales.data(), &global_scale));
    const QuantizedTensor expected = quantized(tail, {.format = format});
    const int64_t row_bytes = layout.values_bytes / kRows;
    EXPECT_EQ(0, std::memcmp(values.data() + (kRows - kTail) * row_bytes, expected.values.data(),
                             static_cast<size_t>(kTail * row_bytes)));
    EXPECT_TRUE(std::all_of(values.data(), values.data() + row_bytes,
                            [](uint8_t byte) { return byte == 0; }));
    for (int64_t row = 0; row < kTail; ++row) {
      for (int64_t block = 0; block < layout.scale_blocks; ++block) {
        ASSERT_EQ(
            scales.data()[scale_offset(layout.scale_layout, kRows - kTail + row, block, kRows,
                                       layout.scale_blocks)],
            expected.scales
                .data()[scale_offset(layout.scale_layout, row, block, kTail, layout.scale_blocks)]);
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
