// Whole tensors: every case of tests/golden/vectors (from an independent model of the documented
// numerics) through the public API, in both CPU implementations. All bytes count: values, scale
// packed scales with their padding, decode scales, and bytes that must stay as they were.
#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>

#include <gtest/gtest.h>

#include "golden/vector_line.h"
#include "narrowfloat/narrowfloat.h"

namespace narrowfloat {
namespace {

using Bytes = std::vector<uint8_t>;

// Fillings from before the call: README.md says which bytes keep them.
constexpr uint8_t kValuePoison = 0xCC;
constexpr uint8_t kScalePoison = 0xA5;
// Bytes after every buffer, which must not change.
constexpr size_t kCanary = 64;

// A buffer followed by a canary. 16-byte aligned, as operator new does.
class Guarded {
 public:
  Guarded(int64_t size, uint8_t poison)
      : size_(static_cast<size_t>(size)), bytes_(size_ + kCanary, poison), poison_(poison) {}
  explicit Guarded(const Bytes& content) : Guarded(static_cast<int64_t>(content.size()), 0x5A) {
    std::copy(content.begin(), content.end(), bytes_.begin());
  }

  uint8_t* data() { return bytes_.data(); }
  [[nodiscard]] Bytes content() const { return {bytes_.begin(), bytes_.end() - kCanary}; }
  [[nodiscard]] bool canary_intact() const {
    return std::all_of(bytes_.end() - kCanary, bytes_.end(),
                       [&](uint8_t byte) { return byte == poison_; });
  }

 private:
  size_t size_;
  Bytes bytes_;
  uint8_t poison_;
};

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Equality with a message that points at the first differing byte.
void expect_bytes(std::string_view what, const Guarded& got, const Bytes& expected) {
  EXPECT_TRUE(got.canary_intact()) << what << ": bytes after the buffer were written";
  const Bytes content = got.content();
  ASSERT_EQ(content.size(), expected.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (content[i] == expected[i]) continue;
    const size_t first = i / 8 * 8;
    const size_t count = std::min<size_t>(16, expected.size() - first);
    ADD_FAILURE() << what << " differ at byte " << i << ": expected "
                  << to_hex(&expected[first], count) << ", got " << to_hex(&content[first], count);
    return;
  }
}

class Case {
 public:
  // tensors: by name. sums: what residuals hold after a call, by its operands.
  Case(const VectorLine& line, const std::map<std::string, Bytes>& tensors,
       std::map<std::string, Bytes>& sums)
      : line_(line), tensors_(tensors), sums_(sums), dtype_(*parse_dtype(line.text("dtype"))) {}

  void run() {
    const std::string& op = line_.text("op");
    if (op == "tensor_amax" || op == "row_amax") return run_amax(op == "row_amax");
    batch_ = line_.integer("batch");
    rows_ = line_.integer("rows");
    cols_ = line_.integer("cols");
    if (op == "dequantize") return run_dequantize();
    run_quantize(op);
  }

 private:
  void run_amax(bool per_row) {
    rows_ = line_.integer("rows");
    Guarded input(tensor("x"));
    const Bytes expected = bytes_of(line_.numbers("y"));
    Guarded output(static_cast<int64_t>(expected.size()), kScalePoison);
    const auto in = TensorView::contiguous(input.data(), dtype_, {rows_, line_.integer("cols")});
    const auto out =
        TensorView::contiguous(output.data(), DType::kF32, {per_row ? rows_ : int64_t{1}});
    per_row ? row_amax(in, out) : tensor_amax(in, out);
    expect_bytes("maxima", output, expected);
  }

  void run_dequantize() {
    const QuantizedLayout layout = make_layout();
    Guarded values(line_.payload("v"));
    Guarded scales(line_.payload("s"));
    const auto global = line_.has("gs") ? line_.numbers("gs") : std::vector<float>{};
    const auto count = static_cast<int64_t>(global.size());
    QuantizedView view = layout.bind(values.data(), scales.data(), nullptr);
    view.global_scale = {};
    if (count == batch_ && count != rows_) {
      view.global_scale = TensorView::contiguous(global.data(), DType::kF32, {batch_, 1});
    } else if (count > 0 || format_info(layout.format).has_row_scale) {
      view.global_scale = vector_view(global, DType::kF32);
    }
    DequantizeOptions options;
    options.global_scale_divides = line_.text_or("divides", "0") == "1";
    const Bytes expected = line_.payload("y");
    Guarded output(static_cast<int64_t>(expected.size()), kValuePoison);
    dequantize(view, TensorView::contiguous(output.data(), dtype_, {batch_, rows_, cols_}),
               options);
    expect_bytes("elements", output, expected);
  }

  void run_quantize(const std::string& op) {
    const QuantizedLayout layout = make_layout();
    Guarded input(tensor("x"));
    Guarded values(layout.values_bytes, kValuePoison);
    Guarded scales(layout.scales_bytes, kScalePoison);
    const Bytes expected_global = line_.has("gs") ? bytes_of(line_.numbers("gs")) : Bytes{};
    Guarded global(static_cast<int64_t>(expected_global.size()), kScalePoison);
    QuantizedView view = layout.bind(values.data(), scales.data(), nullptr);
    if (format_info(layout.format).has_global_scale) {
      view.global_scale =
          TensorView::contiguous(global.data(), DType::kF32,
                                 {static_cast<int64_t>(expected_global.size() / sizeof(float))});
    }
    const QuantizeOptions options = read_options();
    if (op == "quantize") {
      narrowfloat::quantize(input_view(input, cols_), view, options);
    } else if (op == "silu_mul_quantize") {
      silu_mul_quantize(input_view(input, 2 * cols_), view, options);
    } else if (op == "smooth_quantize") {
      Guarded smooth(tensor("smooth"));
      smooth_quantize(input_view(input, cols_),
                      TensorView::contiguous(smooth.data(), dtype_, {cols_}), view, options);
    } else {
      run_norm(op, input, view, options);
    }
    expect_bytes("values", values, line_.payload("v"));
    expect_bytes("scales", scales, line_.payload("s"));
    expect_bytes("decode scales", global, expected_global);
    EXPECT_EQ(input.content(), tensor("x")) << "the input was written";
  }

  void run_norm(const std::string& op, Guarded& input, const QuantizedView& view,
                const QuantizeOptions& options) {
    Guarded weight(tensor("weight"));
    RmsNormOptions norm{.eps = line_.number("norm_eps")};
    const Bytes expected_y = line_.has("y") ? line_.payload("y") : Bytes{};
    Guarded y(static_cast<int64_t>(expected_y.size()), kValuePoison);
    if (line_.has("y")) norm.norm_output = input_view(y, cols_);
    const Bytes expected_extra = line_.has("extra_s") ? line_.payload("extra_s") : Bytes{};
    Guarded extra(static_cast<int64_t>(expected_extra.size()), kScalePoison);
    if (line_.has("extra_s")) {
      norm.extra_scales = view.scales;
      norm.extra_scales.data = extra.data();
      norm.extra_scales.layout = parse_scale_layout(line_.text("extra_layout"));
      norm.extra_scales.capacity =
          batch_ * scale_image_size(norm.extra_scales.layout, view.scales.rows, view.scales.blocks);
    }
    const auto weight_view = TensorView::contiguous(weight.data(), dtype_, {cols_});
    if (op == "rmsnorm_quantize") {
      rmsnorm_quantize(input_view(input, cols_), weight_view, view, norm, options);
    } else if (op == "add_rmsnorm_quantize") {
      Guarded residual(tensor("residual"));
      add_rmsnorm_quantize(input_view(input, cols_), input_view(residual, cols_), weight_view, view,
                           norm, options);
      // Stated once for all lines with the same operands: the sum depends on nothing else.
      Bytes& sum = sums_[line_.text("x") + "+" + line_.text("residual")];
      if (line_.has("h")) sum = line_.payload("h");
      expect_bytes("residual", residual, sum);
    } else {
      FAIL() << "unknown operation " << op;
    }
    expect_bytes("norm output", y, expected_y);
    expect_bytes("extra scales", extra, expected_extra);
  }

  QuantizedLayout make_layout() {
    QuantizedLayoutOptions options;
    options.scale_layout = parse_scale_layout(line_.text("layout"));
    options.batch = batch_;
    if (line_.has("alignment")) options.alignment = line_.integer("alignment");
    if (line_.has("offsets")) {
      options.groups = static_cast<int64_t>(line_.list("offsets").size()) - 1;
    }
    return quantized_layout(parse_format(line_.text("format")), rows_, cols_, options);
  }

  // Views in the result point into members of this case.
  QuantizeOptions read_options() {
    QuantizeOptions options;
    options.math = parse_math_mode(line_.text("mode"));
    read_encode_scale(options);
    if (line_.has("base")) options.base_decode_scale = line_.number("base");
    if (line_.has("fos")) options.four_over_six = read_four_over_six();
    if (line_.has("rounding")) options.mx_scale = parse_ue8m0_rounding(line_.text("rounding"));
    if (line_.has("rule")) options.fp8_rule = read_rule(line_.text("rule"));
    if (line_.has("eps")) options.fp8_eps = line_.number("eps");
    if (line_.has("fp8_d")) options.fp8_decode_scale = line_.number("fp8_d");
    if (line_.has("list")) {
      row_list_ = line_.integers<int32_t>("list");
      options.row_list = vector_view(row_list_, DType::kI32);
    }
    if (line_.has("valid")) {
      valid_ = line_.integers<int32_t>("valid");
      options.valid_rows = vector_view(valid_, DType::kI32);
    }
    if (line_.has("offsets")) {
      offsets_ = line_.integers<int64_t>("offsets");
      options.row_offsets = vector_view(offsets_, DType::kI64);
    }
    return options;
  }

  // One usable number is passed by value, everything else as a tensor.
  void read_encode_scale(QuantizeOptions& options) {
    if (!line_.has("g") || line_.text("g") == "auto") return;
    encode_scales_ = line_.numbers("g");
    const float first = encode_scales_.at(0);
    if (encode_scales_.size() == 1 && first > 0 && first <= 0x1.fffffep127F) {
      options.encode_scale = first;
    } else {
      options.encode_scales = vector_view(encode_scales_, DType::kF32);
    }
  }

  [[nodiscard]] FourOverSix read_four_over_six() const {
    const std::vector<std::string> parts = line_.list("fos");
    return {.enabled = true,
            .error = parts.at(0) == "mse" ? FourOverSixError::kMse : FourOverSixError::kMae,
            .error_math = parts.at(1) == "fast" ? FourOverSixMath::kFast : FourOverSixMath::kStrict,
            .e4m3_max = std::stoi(parts.at(2))};
  }

  static Fp8ScaleRule read_rule(const std::string& text) {
    for (int i = 0; i < 4; ++i) {
      if (name(static_cast<Fp8ScaleRule>(i)) == text) return static_cast<Fp8ScaleRule>(i);
    }
    throw std::runtime_error("unknown rule " + text);
  }

  template <typename T>
  static TensorView vector_view(const std::vector<T>& values, DType dtype) {
    return TensorView::contiguous(values.data(), dtype, {static_cast<int64_t>(values.size())});
  }

  [[nodiscard]] TensorView input_view(Guarded& buffer, int64_t cols) const {
    return TensorView::contiguous(buffer.data(), dtype_, {batch_, rows_, cols});
  }

  // A payload, or the name of a tensor defined before.
  [[nodiscard]] Bytes tensor(const std::string& key) const {
    const std::string& text = line_.text(key);
    return text.starts_with('@') ? tensors_.at(text.substr(1)) : line_.payload(key);
  }

  const VectorLine& line_;
  const std::map<std::string, Bytes>& tensors_;
  std::map<std::string, Bytes>& sums_;
  DType dtype_;
  int64_t batch_ = 1;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  std::vector<float> encode_scales_;
  std::vector<int32_t> row_list_;
  std::vector<int32_t> valid_;
  std::vector<int64_t> offsets_;
};

struct File {
  const char* name;
  int at_least;  // Cases, so that a truncated file cannot pass.
};

// For names of tests and messages.
void PrintTo(const File& file, std::ostream* out) { *out << file.name; }

constexpr std::array kFiles{File{"add_rmsnorm_quantize", 48}, File{"amax", 54},
                            File{"dequantize", 108},          File{"quantize_fp8", 260},
                            File{"quantize_mxfp4", 190},      File{"quantize_mxfp8", 166},
                            File{"quantize_nvfp4", 188},      File{"quantize_nvfp4_per_token", 170},
                            File{"rmsnorm_quantize", 48},     File{"silu_mul_quantize", 52},
                            File{"smooth_quantize", 24}};

// How gtest and ctest spell the parameter.
std::string test_name(const ::testing::TestParamInfo<File>& file) { return file.param.name; }

class ModelVectors : public ::testing::TestWithParam<File> {};

TEST_P(ModelVectors, GiveTheSameBytesInBothImplementations) {
  const std::string path = std::string("vectors/") + GetParam().name + ".txt";
  const std::vector<VectorLine> lines = read_vector_lines(path);
  for (const std::string& implementation : judged_implementations()) {
    const PinnedImplementation pinned(implementation);
    std::map<std::string, Bytes> tensors;
    std::map<std::string, Bytes> sums;
    int cases = 0;
    for (const VectorLine& line : lines) {
      SCOPED_TRACE(implementation + " " + line.place());
      if (line.text("op") == "tensor") {
        (void)line.text("dtype");
        tensors[line.text("name")] = line.payload("x");
        continue;
      }
      ASSERT_NO_THROW(Case(line, tensors, sums).run());
      EXPECT_EQ(line.untaken(), "") << "columns that the test does not understand";
      ++cases;
      if (HasFailure()) return;
    }
    EXPECT_GE(cases, GetParam().at_least);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ModelVectors, ::testing::ValuesIn(kFiles), test_name);

TEST(ModelVectorFiles, AreAllRun) {
  std::set<std::string> listed;
  for (const File& file : kFiles) listed.insert(file.name);
  std::set<std::string> present;
  for (const auto& entry :
       std::filesystem::directory_iterator(NARROWFLOAT_SOURCE_DIR "/tests/golden/vectors")) {
    if (entry.is_regular_file()) present.insert(entry.path().stem());
  }
  EXPECT_EQ(present, listed);
}

}  // namespace
}  // namespace narrowfloat
