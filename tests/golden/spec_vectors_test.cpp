// Every line of quantization_golden.txt, whose first lines describe the columns: through the public
// API where it reaches the operation, else through the internal function. The number of lines of
// each operation is asserted, so none can be skipped in silence. Quantizers and dequantizers run in
// both CPU implementations.
#include <functional>

#include <gtest/gtest.h>

#include "formats/four_over_six.h"
#include "formats/silu.h"
#include "formats/ue8m0.h"
#include "golden/vector_line.h"
#include "narrowfloat/narrowfloat.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {
namespace {

struct Input {
  DType dtype = DType::kBF16;
  std::vector<uint16_t> bits;

  // The element types of the file are bf16 and e4m3.
  [[nodiscard]] uint16_t negated(size_t i) const {
    return static_cast<uint16_t>(bits[i] ^ (dtype == DType::kBF16 ? 0x8000U : 0x80U));
  }
};

// The file by operation.
class Golden {
 public:
  static const Golden& instance() {
    static const Golden golden;
    return golden;
  }
  [[nodiscard]] const std::vector<VectorLine>& lines(const std::string& op) const {
    return lines_.at(op);
  }
  [[nodiscard]] const std::map<std::string, std::vector<VectorLine>>& all() const { return lines_; }
  [[nodiscard]] const Input& input(const std::string& name) const { return inputs_.at(name); }

 private:
  Golden() {
    for (VectorLine& line : read_vector_lines("quantization_golden.txt")) {
      const std::string op = line.text("op");
      if (op == "input") {
        Input& input = inputs_[line.text("name")];
        input.dtype = line.text("dtype") == "bf16" ? DType::kBF16 : DType::kF8E4M3;
        for (const std::string& item : line.list("bits")) {
          input.bits.push_back(static_cast<uint16_t>(std::stoul(item, nullptr, 16)));
        }
      }
      lines_[op].push_back(std::move(line));
    }
  }

  std::map<std::string, std::vector<VectorLine>> lines_;
  std::map<std::string, Input> inputs_;
};

void for_each_line(const std::string& op, const std::function<void(const VectorLine&)>& body) {
  for (const VectorLine& line : Golden::instance().lines(op)) {
    SCOPED_TRACE(line.place());
    body(line);
    EXPECT_EQ(line.untaken(), "") << "columns that the test does not understand";
  }
}

void for_each_line_and_implementation(const std::string& op,
                                      const std::function<void(const VectorLine&)>& body) {
  for (const std::string& implementation : judged_implementations()) {
    SCOPED_TRACE(implementation);
    const PinnedImplementation pinned(implementation);
    for_each_line(op, body);
  }
}

// One row of elements as memory of its type.
std::vector<uint8_t> memory(DType dtype, const std::vector<uint16_t>& elements) {
  std::vector<uint8_t> bytes;
  for (const uint16_t element : elements) {
    bytes.push_back(static_cast<uint8_t>(element & 0xFFU));
    if (dtype == DType::kBF16) bytes.push_back(static_cast<uint8_t>(element >> 8));
  }
  return bytes;
}

struct Output {
  std::string codes;
  std::string scales;  // Memory bytes.
  float global = 0.0F;
};

// Quantizes one row with linear scales.
Output quantize_row(FormatId format, DType dtype, const std::vector<uint16_t>& elements,
                    const QuantizeOptions& options) {
  const auto cols = static_cast<int64_t>(elements.size());
  const QuantizedLayout layout =
      quantized_layout(format, 1, cols, {.scale_layout = ScaleLayoutId::kLinear});
  const std::vector<uint8_t> input = memory(dtype, elements);
  std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes), 0xCC);
  std::vector<uint8_t> scales(static_cast<size_t>(layout.scales_bytes), 0xCC);
  Output output;
  quantize(TensorView::contiguous(input.data(), dtype, {1, cols}),
           layout.bind(values.data(), scales.data(), &output.global), options);
  output.codes = to_hex(values.data(), values.size());
  output.scales = to_hex(scales.data(), scales.size());
  return output;
}

QuantizeOptions options_of(const VectorLine& line) {
  QuantizeOptions options;
  options.math = parse_math_mode(line.text("mode"));
  if (line.has("g")) options.encode_scale = line.number("g");
  if (line.has("rule") && !line.has("eps")) {
    options.mx_scale = parse_ue8m0_rounding(line.text("rule"));
  }
  return options;
}

// The file's convention for MX: the block, then the block negated.
std::vector<uint16_t> with_negated(const Input& input) {
  std::vector<uint16_t> elements = input.bits;
  for (size_t i = 0; i < input.bits.size(); ++i) elements.push_back(input.negated(i));
  return elements;
}

void check_quantizer(const std::string& op, FormatId format) {
  for_each_line_and_implementation(op, [&](const VectorLine& line) {
    const Input& input = Golden::instance().input(line.text("in"));
    const bool is_mx = format_info(format).scale_type == ScaleType::kUE8M0;
    const Output output = quantize_row(format, input.dtype,
                                       is_mx ? with_negated(input) : input.bits, options_of(line));
    EXPECT_EQ(output.scales, line.text("sf"));
    EXPECT_EQ(output.codes, line.text("q"));
    if (line.has("g") && format == FormatId::kNvfp4) {
      EXPECT_EQ(float_bits(output.global), float_bits(1.0F / line.number("g")));
    }
  });
}

TEST(SpecVectors, AreAllKnownAndCounted) {
  const std::map<std::string, size_t> expected{{"cvt_e2m1", 56},
                                               {"cvt_e4m3", 44},
                                               {"cvt_e8m0_up", 18},
                                               {"dequant_mxfp4", 30},
                                               {"dequant_mxfp8", 42},
                                               {"dequant_nvfp4", 60},
                                               {"encode_scale", 18},
                                               {"exp", 17},
                                               {"fp8_128", 70},
                                               {"fp8in_mxfp4", 24},
                                               {"fp8in_nvfp4", 24},
                                               {"grow", 6},
                                               {"input", 17},
                                               {"kv_append", 32},
                                               {"kv_quantize", 32},
                                               {"mn", 5},
                                               {"mxfp4", 84},
                                               {"mxfp8", 84},
                                               {"nvfp4", 66},
                                               {"nvfp4_4over6", 336},
                                               {"nvfp4_per_token", 18},
                                               {"off", 9},
                                               {"rcp", 19},
                                               {"shuf", 10},
                                               {"silu", 26},
                                               {"vswz", 5}};
  std::map<std::string, size_t> found;
  for (const auto& [op, lines] : Golden::instance().all()) found[op] = lines.size();
  EXPECT_EQ(found, expected);
}

TEST(SpecVectors, RowShufflesMoveTheRows) {
  for_each_line_and_implementation("shuf", [](const VectorLine& line) {
    const int64_t group = line.integer("bs");
    std::vector<uint8_t> rows(static_cast<size_t>(group), 0);
    std::vector<uint8_t> shuffled = rows;
    rows[static_cast<size_t>(line.integer("old"))] = 1;
    shuffle_rows(TensorView::contiguous(rows.data(), DType::kU8, {group, 1}),
                 TensorView::contiguous(shuffled.data(), DType::kU8, {group, 1}),
                 group == 32 ? 128 : 64);
    EXPECT_EQ(shuffled[static_cast<size_t>(line.integer("new"))], 1);
  });
}

TEST(SpecVectors, VScalesOfKvCachesAreReordered) {
  for_each_line_and_implementation("vswz", [](const VectorLine& line) {
    constexpr int64_t kTokens = 16;
    const int64_t blocks = line.integer("S");
    std::vector<uint8_t> plain(static_cast<size_t>(kTokens * blocks), 0);
    std::vector<uint8_t> moved = plain;
    plain[static_cast<size_t>(line.integer("t") * blocks + line.integer("s"))] = 1;
    kv_reorder_v_scales(TensorView::contiguous(plain.data(), DType::kU8, {1, kTokens, 1, blocks}),
                        TensorView::contiguous(moved.data(), DType::kU8, {1, kTokens, 1, blocks}),
                        KvLayout::kNhd);
    EXPECT_EQ(moved[static_cast<size_t>(line.integer("token") * blocks + line.integer("pos"))], 1);
  });
}

// One block, as a row and as what is appended to a cache of one place.
TEST(SpecVectors, KvCachesGiveTheBytes) {
  for (const std::string op : {"kv_quantize", "kv_append"}) {
    for_each_line_and_implementation(op, [&](const VectorLine& line) {
      const Input& input = Golden::instance().input(line.text("in"));
      std::vector<uint8_t> codes(8, 0xCC);
      uint8_t scale = 0xCC;
      const MathMode math = parse_math_mode(line.text("mode"));
      const KvScale d(line.number("d"));
      if (op == "kv_quantize") {
        kv_quantize(TensorView::contiguous(input.bits.data(), DType::kBF16, {1, 16}),
                    {TensorView::contiguous(codes.data(), DType::kU8, {1, 8}),
                     TensorView::contiguous(&scale, DType::kF8E4M3, {1, 1})},
                    d, math);
      } else {
        std::vector<uint8_t> v_codes(8);
        uint8_t v_scale = 0;
        const int64_t slot = 0;
        const TensorView rows = TensorView::contiguous(input.bits.data(), DType::kBF16, {1, 1, 16});
        const auto part = [](void* data, int64_t width) {
          return TensorView::contiguous(data, DType::kU8, {1, 1, 1, width});
        };
        kv_append_slots(rows, rows, TensorView::contiguous(&slot, DType::kI64, {1}),
                        {.k = {part(codes.data(), 8), part(&scale, 1)},
                         .v = {part(v_codes.data(), 8), part(&v_scale, 1)},
                         .k_scale = d,
                         .v_scale = d},
                        math);
        EXPECT_EQ(v_codes, codes);
        EXPECT_EQ(v_scale, scale);
      }
      EXPECT_EQ(to_hex(&scale, 1), line.text("sf"));
      EXPECT_EQ(to_hex(codes.data(), codes.size()), line.text("q"));
    });
  }
}

TEST(SpecVectors, ConversionsGiveTheCodes) {
  for_each_line("cvt_e2m1", [](const VectorLine& line) {
    EXPECT_EQ(E2M1::encode(line.number("x")), line.hex("code")) << line.text("x");
  });
  for_each_line("cvt_e4m3", [](const VectorLine& line) {
    EXPECT_EQ(E4M3::encode(line.number("x")), line.hex("code")) << line.text("x");
  });
  for_each_line("cvt_e8m0_up", [](const VectorLine& line) {
    EXPECT_EQ(UE8M0::encode_up(line.number("x")), line.hex("code")) << line.text("x");
  });
}

TEST(SpecVectors, ReciprocalsAndExponentialsGiveTheBits) {
  for_each_line("rcp", [](const VectorLine& line) {
    EXPECT_EQ(float_bits(FastMath::rcp(line.number("x"))), line.hex("y")) << line.text("x");
  });
  for_each_line("exp", [](const VectorLine& line) {
    EXPECT_EQ(float_bits(exp_portable(line.number("x"))), line.hex("y")) << line.text("x");
  });
  for_each_line("silu", [](const VectorLine& line) {
    const bool is_exact = parse_math_mode(line.text("mode")) == MathMode::kExact;
    const float x = line.number("x");
    const float y = is_exact ? silu_mul<ExactMath>(x, 1.0F) : silu_mul<FastMath>(x, 1.0F);
    EXPECT_EQ(float_bits(canonical_nan(y)), line.hex("y")) << line.text("x");
  });
}

TEST(SpecVectors, EncodeScalesComeFromMaxima) {
  for_each_line("encode_scale", [](const VectorLine& line) {
    const float g =
        encode_scale_from_amax(line.number("amax"), static_cast<int>(line.integer("e4m3max")));
    EXPECT_EQ(float_bits(g), line.hex("g"));
  });
}

TEST(SpecVectors, LayoutsGiveTheOffsets) {
  // One line asks for a pad column, which the public function refuses.
  for_each_line("off", [](const VectorLine& line) {
    const int64_t row = line.integer("r");
    const int64_t block = line.integer("c");
    const int64_t blocks = line.integer("C");
    const auto check = [&]<typename Layout>(const std::string& key) {
      EXPECT_EQ(Layout::offset(row, block, {row + 1, blocks}), line.integer(key)) << key;
      if (block >= blocks) return;
      EXPECT_EQ(scale_offset(Layout::kId, row, block, row + 1, blocks), line.integer(key)) << key;
    };
    check.operator()<LinearLayout>("linear");
    check.operator()<Swizzled128x4Layout>("128x4");
    check.operator()<Swizzled8x4Layout>("8x4");
  });
  for_each_line("mn", [](const VectorLine& line) {
    EXPECT_EQ(scale_offset(ScaleLayoutId::kMnMajor, line.integer("m"), line.integer("kb"),
                           line.integer("M"), line.integer("kb") + 1),
              line.integer("off"));
  });
  for_each_line("grow", [](const VectorLine& line) {
    EXPECT_EQ(grouped_scale_row(line.integer("row_offset"), line.integer("group")),
              line.integer("start"));
  });
}

TEST(SpecVectors, Nvfp4GivesTheBytes) { check_quantizer("nvfp4", FormatId::kNvfp4); }
TEST(SpecVectors, Mxfp4GivesTheBytes) { check_quantizer("mxfp4", FormatId::kMxfp4); }
TEST(SpecVectors, Mxfp8GivesTheBytes) { check_quantizer("mxfp8", FormatId::kMxfp8); }
TEST(SpecVectors, Nvfp4OfE4m3InputGivesTheBytes) {
  check_quantizer("fp8in_nvfp4", FormatId::kNvfp4);
}
TEST(SpecVectors, Mxfp4OfE4m3InputGivesTheBytes) {
  check_quantizer("fp8in_mxfp4", FormatId::kMxfp4);
}

TEST(SpecVectors, Nvfp4PerTokenGivesTheBytes) {
  for_each_line_and_implementation("nvfp4_per_token", [](const VectorLine& line) {
    std::vector<uint16_t> elements;
    for (const std::string& name : line.list("in")) {
      const Input& input = Golden::instance().input(name);
      elements.insert(elements.end(), input.bits.begin(), input.bits.end());
    }
    QuantizeOptions options = options_of(line);
    options.base_decode_scale = line.number("d");
    const Output output = quantize_row(FormatId::kNvfp4PerToken, DType::kBF16, elements, options);
    EXPECT_EQ(output.scales, line.text("sf"));
    EXPECT_EQ(output.codes, line.text("q"));
    EXPECT_EQ(float_bits(output.global), line.hex("pts"));
  });
}

// Sixteen elements are the whole block here.
TEST(SpecVectors, Fp8BlocksGiveTheBytes) {
  for_each_line_and_implementation("fp8_128", [](const VectorLine& line) {
    QuantizeOptions options = options_of(line);
    options.fp8_eps = line.number("eps");
    for (int i = 0; i < 4; ++i) {
      if (name(static_cast<Fp8ScaleRule>(i)) == line.text("rule")) {
        options.fp8_rule = static_cast<Fp8ScaleRule>(i);
      }
    }
    const Input& input = Golden::instance().input(line.text("in"));
    for (const FormatId format :
         {FormatId::kFp8Block1x128, FormatId::kFp8Block128x128, FormatId::kFp8Tensor}) {
      const Output output = quantize_row(format, input.dtype, input.bits, options);
      const float scale = line.number("s");
      EXPECT_EQ(output.scales, to_hex(reinterpret_cast<const uint8_t*>(&scale), sizeof(scale)));
      EXPECT_EQ(output.codes, line.text("q"));
    }
  });
}

// The scale byte of a candidate, 6 or 4, from the formulas of spec 6.3.
uint8_t candidate_byte(const VectorLine& line, float amax, float g) {
  const bool is_exact = line.text("mode") == "exact";
  float scale = is_exact ? amax / 6.0F * g : FastMath::mul(g, FastMath::mul(amax, 1.0F / 6.0F));
  if (line.integer("pick") == 4) scale = is_exact ? scale * 1.5F : FastMath::mul(scale, 1.5F);
  return E4M3::encode(scale);
}

float amax_of(const Input& input) {
  AbsMax amax;
  for (const uint16_t bits : input.bits) amax.add(bits_float(static_cast<uint32_t>(bits) << 16));
  return amax.or_nan();
}

FourOverSix four_over_six_of(const VectorLine& line) {
  return {.enabled = true,
          .error = line.text("err") == "MSE" ? FourOverSixError::kMse : FourOverSixError::kMae,
          .error_math =
              line.text("errmath") == "fast" ? FourOverSixMath::kFast : FourOverSixMath::kStrict,
          .e4m3_max = static_cast<int>(line.integer("e4m3max"))};
}

// Lines with a row maximum are blocks of a per-token row whose decode scale d is known: the row is
// completed with one element of that maximum in a block of its own.
Output quantize_in_row(const VectorLine& line, QuantizeOptions options, const Input& input) {
  std::vector<uint16_t> elements = input.bits;
  elements.push_back(static_cast<uint16_t>(line.hex("ramax") >> 16));
  elements.resize(32, 0);
  options.base_decode_scale = 1.0F / (6.0F * static_cast<float>(line.integer("e4m3max")));
  Output output = quantize_row(FormatId::kNvfp4PerToken, DType::kBF16, elements, options);
  EXPECT_EQ(float_bits(output.global), line.hex("d"));
  output.codes.resize(16);
  output.scales.resize(2);
  return output;
}

TEST(SpecVectors, FourOverSixGivesTheBytes) {
  for_each_line_and_implementation("nvfp4_4over6", [](const VectorLine& line) {
    QuantizeOptions options = options_of(line);
    options.four_over_six = four_over_six_of(line);
    const Input& input = Golden::instance().input(line.text("in"));
    const bool is_per_token = line.has("ramax");
    const Output output = is_per_token
                              ? quantize_in_row(line, options, input)
                              : quantize_row(FormatId::kNvfp4, DType::kBF16, input.bits, options);
    EXPECT_EQ(output.scales, line.text("sf"));
    EXPECT_EQ(output.codes, line.text("q"));
    if (is_per_token) {
      EXPECT_TRUE(line.integer("pick") == 4 || line.integer("pick") == 6);
    } else {
      EXPECT_EQ(candidate_byte(line, amax_of(input), line.number("g")), line.hex("sf"));
    }
  });
}

// Dequantizes one block whose elements all have the same code.
float dequantize_code(FormatId format, uint8_t code, uint8_t scale, const float* decode_scale) {
  const FormatInfo& info = format_info(format);
  const QuantizedLayout layout =
      quantized_layout(format, 1, info.block_cols, {.scale_layout = ScaleLayoutId::kLinear});
  const auto byte = static_cast<uint8_t>(info.element_bits == 4 ? code | code << 4 : code);
  std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes), byte);
  QuantizedView view = layout.bind(values.data(), &scale, nullptr);
  view.global_scale = decode_scale == nullptr
                          ? TensorView{}
                          : TensorView::contiguous(decode_scale, DType::kF32, {1});
  std::vector<float> output(static_cast<size_t>(info.block_cols));
  dequantize(view, TensorView::contiguous(output.data(), DType::kF32, {1, info.block_cols}));
  for (const float element : output) EXPECT_EQ(float_bits(element), float_bits(output[0]));
  return output[0];
}

float dequantize_kv_code(uint8_t code, uint8_t scale, float d) {
  const std::vector<uint8_t> codes(8, static_cast<uint8_t>(code | code << 4));
  std::vector<float> output(16);
  kv_dequantize({TensorView::contiguous(codes.data(), DType::kU8, {1, 8}),
                 TensorView::contiguous(&scale, DType::kF8E4M3, {1, 1})},
                TensorView::contiguous(output.data(), DType::kF32, {1, 16}),
                TensorView::contiguous(&d, DType::kF32, {1}));
  for (const float element : output) EXPECT_EQ(float_bits(element), float_bits(output[0]));
  return output[0];
}

// y_kv is the association of KV caches.
TEST(SpecVectors, DequantizationGivesTheBits) {
  for_each_line_and_implementation("dequant_nvfp4", [](const VectorLine& line) {
    const auto code = static_cast<uint8_t>(line.hex("code"));
    const auto scale = static_cast<uint8_t>(line.hex("sf"));
    const float d = line.number("d");
    EXPECT_EQ(float_bits(dequantize_code(FormatId::kNvfp4, code, scale, &d)), line.hex("y"));
    if (d == 1.0F) {
      EXPECT_EQ(float_bits(dequantize_code(FormatId::kNvfp4, code, scale, nullptr)), line.hex("y"));
    }
    EXPECT_EQ(float_bits(dequantize_kv_code(code, scale, d)), line.hex("y_kv"));
  });
  for (const auto& [op, format] : std::map<std::string, FormatId>{
           {"dequant_mxfp4", FormatId::kMxfp4}, {"dequant_mxfp8", FormatId::kMxfp8}}) {
    for_each_line_and_implementation(op, [format = format](const VectorLine& line) {
      EXPECT_EQ(float_bits(dequantize_code(format, static_cast<uint8_t>(line.hex("code")),
                                           static_cast<uint8_t>(line.hex("sf")), nullptr)),
                line.hex("y"));
    });
  }
}

}  // namespace
}  // namespace narrowfloat
