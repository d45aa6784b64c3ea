// See allreduce_golden.h. Written for comparison with the specification, not for speed: each step
// has the order of its section there.
#include "support/allreduce_golden.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "formats/float16.h"
#include "formats/minifloat.h"

namespace narrowfloat::testing {
namespace {

constexpr float kLargestFloat = std::numeric_limits<float>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- Elements

class Elements {
 public:
  explicit Elements(DType type) : type_(type) {}

  [[nodiscard]] size_t bytes() const { return type_ == DType::kF32 ? 4 : 2; }
  [[nodiscard]] float read(const std::vector<uint8_t>& tensor, int64_t index) const {
    const uint8_t* const place = tensor.data() + static_cast<size_t>(index) * bytes();
    if (type_ == DType::kF32) {
      float value = 0.0F;
      std::memcpy(&value, place, sizeof(value));
      return value;
    }
    uint16_t half = 0;
    std::memcpy(&half, place, sizeof(half));
    return type_ == DType::kBF16 ? bf16_to_float(half) : f16_to_float(half);
  }
  // Every NaN is stored as the canonical one.
  void write(std::vector<uint8_t>& tensor, int64_t index, float value) const {
    uint8_t* const place = tensor.data() + static_cast<size_t>(index) * bytes();
    if (type_ == DType::kF32) {
      const uint32_t bits = std::isnan(value) ? 0x7FFFFFFFU : float_bits(value);
      std::memcpy(place, &bits, sizeof(bits));
      return;
    }
    const uint16_t half = type_ == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
    std::memcpy(place, &half, sizeof(half));
  }
  [[nodiscard]] float round(float value) const {
    if (type_ == DType::kF32) return std::isnan(value) ? bits_float(0x7FFFFFFFU) : value;
    return type_ == DType::kBF16 ? bf16_to_float(float_to_bf16(value))
                                 : f16_to_float(float_to_f16(value));
  }
  [[nodiscard]] float largest() const {
    if (type_ == DType::kF16) return 65504.0F;
    return type_ == DType::kBF16 ? 0x1.FEp127F : kLargestFloat;
  }

 private:
  DType type_;
};

float without_negative_zero(float value) { return value == 0.0F ? 0.0F : value; }

// ---- The sum

float reduced_experts(const GoldenInputs& in, const GoldenRank& rank, int64_t token, int64_t col) {
  const Elements e(in.problem.element);
  const bool rounds = in.problem.accumulation == AllReduceAccumulation::kElement;
  const int64_t hidden = in.problem.hidden;
  float a = 0.0F;
  for (int64_t x = 0; x < in.active_experts; ++x) {
    const int64_t row = x * in.problem.tokens + token;
    const float value = e.read(rank.expert_rows, row * hidden + col);
    const float scale = rank.expert_scales[static_cast<size_t>(row)];
    a = rounds ? e.round(a + e.round(value * scale)) : std::fma(value, scale, a);
  }
  return e.round(a + e.read(rank.token_input, token * hidden + col));
}

float finalized_slots(const GoldenInputs& in, const GoldenRank& rank, int64_t token, int64_t col) {
  const Elements e(in.problem.element);
  const bool rounds = in.problem.accumulation == AllReduceAccumulation::kElement;
  const int64_t hidden = in.problem.hidden;
  float a = 0.0F;
  for (int64_t k = 0; k < in.top_k; ++k) {
    const auto slot = static_cast<size_t>(token * in.top_k + k);
    const int64_t row = rank.slot_to_row[slot];
    if (row < 0 || row >= in.rows) continue;
    const float weight = rank.slot_weights.empty() ? 1.0F : rank.slot_weights[slot];
    const float value = e.read(rank.permuted_rows, row * hidden + col);
    a = rounds ? e.round(a + e.round(weight * value)) : std::fma(weight, value, a);
  }
  if (in.routed_scaling != 1.0F) {
    a = a * in.routed_scaling;
    if (rounds) a = e.round(a);
  }
  if (!rank.shared_expert.empty()) a = a + e.read(rank.shared_expert, token * hidden + col);
  return e.round(a);
}

float local_value(const GoldenInputs& in, const GoldenRank& rank, int64_t token, int64_t col) {
  switch (in.problem.pattern) {
    case AllReducePattern::kMoeReduction:
      return reduced_experts(in, rank, token, col);
    case AllReducePattern::kMoeFinalize:
      return finalized_slots(in, rank, token, col);
    default:
      return Elements(in.problem.element).read(rank.input, token * in.problem.hidden + col);
  }
}

float sum_over_ranks(const GoldenInputs& in, int64_t token, int64_t col) {
  const Elements e(in.problem.element);
  float s = 0.0F;
  for (size_t rank = 0; rank < in.ranks.size(); ++rank) {
    const float v = without_negative_zero(local_value(in, in.ranks[rank], token, col));
    s = rank == 0 ? v : s + v;
    if (in.problem.accumulation == AllReduceAccumulation::kElement) s = e.round(s);
  }
  return e.round(s);
}

// ---- The norm

// The subtree over `size` leaves from leaf `first` on; size is a power of two.
float tree(const std::vector<float>& x, size_t first, size_t size) {
  if (8 * first >= x.size()) return 0.0F;
  if (size > 1) return tree(x, first, size / 2) + tree(x, first + size / 2, size / 2);
  float a = 0.0F;
  for (size_t j = 8 * first; j < 8 * first + 8; ++j) a = std::fma(x[j], x[j], a);
  return a;
}

float sum_of_squares(const std::vector<float>& x) {
  size_t leaves = 1;
  while (8 * leaves < x.size()) leaves *= 2;
  return tree(x, 0, leaves);
}

// ---- Quantization

// The largest magnitude that is a number; NaN if there is none and nan_if_none is set, else 0.
float maximum(const std::vector<float>& n, size_t first, size_t count, bool nan_if_none) {
  float largest = 0.0F;
  size_t numbers = 0;
  for (size_t i = first; i < first + count; ++i) {
    if (std::isnan(n[i])) continue;
    ++numbers;
    if (std::fabs(n[i]) > largest) largest = std::fabs(n[i]);
  }
  const bool is_nan = nan_if_none && numbers == 0;
  return is_nan ? std::numeric_limits<float>::quiet_NaN() : largest;
}

float at_most_largest_float(float value) { return value < kLargestFloat ? value : kLargestFloat; }

void write_float(std::vector<uint8_t>& out, size_t index, float value) {
  std::memcpy(out.data() + 4 * index, &value, sizeof(value));
}

class Quantizer {
 public:
  Quantizer(const GoldenInputs& in, GoldenOutputs& out)
      : in_(in),
        out_(out),
        hidden_(static_cast<size_t>(in.problem.hidden)),
        tokens_(static_cast<size_t>(in.problem.tokens)) {}

  void allocate() {
    const AllReduceProblem& problem = in_.problem;
    switch (quantization_of(problem)) {
      case AllReduceQuantization::kNone:
        return;
      case AllReduceQuantization::kFp8Tensor:
        return resize(8, 0);
      case AllReduceQuantization::kFp8Token:
        return resize(8, 4 * tokens_);
      case AllReduceQuantization::kFp8GroupUe8m0:
        return resize(8, 4 * static_cast<size_t>(in_.scale_words));
      case AllReduceQuantization::kFp8Block1x128:
        return resize(8, 4 * tokens_ * ((hidden_ + 127) / 128));
      case AllReduceQuantization::kNvfp4PerToken:
        out_.row_scale_out.resize(4 * tokens_);
        [[fallthrough]];
      case AllReduceQuantization::kNvfp4:
        return resize(4, scale_bytes(16));
      case AllReduceQuantization::kMxfp8:
        return resize(8, scale_bytes(32));
      case AllReduceQuantization::kMxfp4:
        return resize(4, scale_bytes(32));
    }
  }

  void quantize(size_t token, const std::vector<float>& n) {
    switch (quantization_of(in_.problem)) {
      case AllReduceQuantization::kNone:
        return;
      case AllReduceQuantization::kFp8Tensor: {
        const float i = at_most_largest_float(1.0F / in_.global_scale);
        for (size_t col = 0; col < hidden_; ++col) put_e4m3(token, col, n[col] * i);
        return;
      }
      case AllReduceQuantization::kFp8Token: {
        const float least = 0x1p-9F / 448.0F;
        const float quotient = maximum(n, 0, hidden_, false) / 448.0F;
        const float d = quotient > least ? quotient : least;
        write_float(out_.scale_out, token, d);
        for (size_t col = 0; col < hidden_; ++col) put_e4m3(token, col, n[col] / d);
        return;
      }
      case AllReduceQuantization::kFp8GroupUe8m0:
        return fp8_groups(token, n);
      case AllReduceQuantization::kFp8Block1x128:
        return fp8_blocks(token, n);
      case AllReduceQuantization::kNvfp4:
        return nvfp4(token, n, in_.global_scale, 1.0F / in_.global_scale);
      case AllReduceQuantization::kNvfp4PerToken:
        return nvfp4_per_token(token, n);
      case AllReduceQuantization::kMxfp8:
      case AllReduceQuantization::kMxfp4:
        return mx(token, n);
    }
  }

 private:
  void resize(size_t code_bits, size_t scales) {
    out_.quant_out.resize(tokens_ * hidden_ * code_bits / 8);
    out_.scale_out.resize(scales);
  }
  [[nodiscard]] size_t scale_bytes(size_t block) const {
    return static_cast<size_t>(golden_scale_bytes(in_.problem.scale_layout, in_.problem.tokens,
                                                  static_cast<int64_t>(hidden_ / block)));
  }

  void put_e4m3(size_t token, size_t col, float value) {
    out_.quant_out[token * hidden_ + col] = E4M3::encode(value);
  }
  void put_e2m1(size_t token, size_t col, float value) {
    uint8_t& byte = out_.quant_out[(token * hidden_ + col) / 2];
    byte = static_cast<uint8_t>(byte | E2M1::encode(value) << (col % 2 * 4));
  }
  void put_block_scale(size_t token, size_t block, size_t block_cols, uint8_t scale) {
    out_.scale_out[static_cast<size_t>(golden_scale_offset(
        in_.problem.scale_layout, static_cast<int64_t>(token), static_cast<int64_t>(block),
        static_cast<int64_t>(hidden_ / block_cols)))] = scale;
  }

  void fp8_groups(size_t token, const std::vector<float>& n) {
    const auto group = static_cast<size_t>(in_.problem.group);
    const size_t column_words = (tokens_ + 3) / 4 * 4;
    for (size_t g = 0; g < hidden_ / group; ++g) {
      float y = maximum(n, g * group, group, false) / 448.0F;
      if (y < 1e-10F) y = 1e-10F;
      int exponent = 0;
      const float mantissa = std::frexp(y, &exponent);  // y = mantissa * 2^exponent, from 1/2 on.
      // The largest scale takes the place of an infinite one.
      y = y == kInfinity ? 0x1p127F : std::ldexp(1.0F, mantissa == 0.5F ? exponent - 1 : exponent);
      for (size_t col = g * group; col < (g + 1) * group; ++col) {
        put_e4m3(token, col, n[col] / y);
      }
      const size_t word = g / 4 * column_words + token;
      out_.scale_out[4 * word + g % 4] = static_cast<uint8_t>(float_bits(y) >> 23);
    }
  }

  void fp8_blocks(size_t token, const std::vector<float>& n) {
    const size_t blocks = (hidden_ + 127) / 128;
    for (size_t b = 0; b < blocks; ++b) {
      const size_t count = std::min<size_t>(128, hidden_ - 128 * b);
      const float a = maximum(n, 128 * b, count, false);
      float m = a == 0.0F || a == kInfinity ? 1.0F : 448.0F / a;
      if (m == kInfinity) m = Elements(in_.problem.element).largest();
      write_float(out_.scale_out, token * blocks + b, 1.0F / m);
      for (size_t col = 128 * b; col < 128 * b + count; ++col) put_e4m3(token, col, n[col] * m);
    }
  }

  void nvfp4(size_t token, const std::vector<float>& n, float encode, float decode) {
    for (size_t b = 0; b < hidden_ / 16; ++b) {
      const float a = maximum(n, 16 * b, 16, true);
      uint8_t scale = 0;
      float m = 0.0F;
      if (a != 0.0F) {
        scale = E4M3::encode(a * (encode * (1.0F / 6.0F)));
        m = at_most_largest_float(1.0F / (E4M3::decode(scale) * decode));
      }
      put_block_scale(token, b, 16, scale);
      for (size_t col = 16 * b; col < 16 * b + 16; ++col) put_e2m1(token, col, n[col] * m);
    }
  }

  void nvfp4_per_token(size_t token, const std::vector<float>& n) {
    const float a = maximum(n, 0, hidden_, false);
    const float base = 1.0F / 2688.0F;
    float encode = kLargestFloat;
    if (a != 0.0F) {
      encode = at_most_largest_float((1.0F / base) / a);
      if (encode == 0.0F) encode = 1.0F;
    }
    write_float(out_.row_scale_out, token, a == 0.0F ? 0.0F : 1.0F / encode);
    nvfp4(token, n, encode, 1.0F / encode);
  }

  void mx(size_t token, const std::vector<float>& n) {
    const bool is_fp4 = quantization_of(in_.problem) == AllReduceQuantization::kMxfp4;
    for (size_t b = 0; b < hidden_ / 32; ++b) {
      const float a = maximum(n, 32 * b, 32, true);
      const float quotient = a / (is_fp4 ? 6.0F : 448.0F);
      uint8_t scale = 0;
      while (scale < 254 && quotient > std::ldexp(1.0F, scale - 127)) ++scale;
      if (std::isnan(a)) scale = 255;
      put_block_scale(token, b, 32, scale);
      const float m = scale == 255 ? a : std::ldexp(1.0F, 127 - scale);
      for (size_t col = 32 * b; col < 32 * b + 32; ++col) {
        if (is_fp4) {
          put_e2m1(token, col, n[col] * m);
        } else {
          put_e4m3(token, col, n[col] * m);
        }
      }
    }
  }

  const GoldenInputs& in_;
  GoldenOutputs& out_;
  size_t hidden_;
  size_t tokens_;
};

}  // namespace

int64_t golden_scale_offset(ScaleLayoutId layout, int64_t row, int64_t block, int64_t blocks) {
  const int64_t tiles = (blocks + 3) / 4;
  const int64_t m = row;
  const int64_t k = block;
  if (layout == ScaleLayoutId::kSwizzled128x4) {
    return m / 128 * tiles * 512 + k / 4 * 512 + m % 32 * 16 + m % 128 / 32 * 4 + k % 4;
  }
  if (layout == ScaleLayoutId::kSwizzled8x4) {
    return m / 8 * tiles * 32 + k / 4 * 32 + m % 8 * 4 + k % 4;
  }
  return m * blocks + k;
}

int64_t golden_scale_bytes(ScaleLayoutId layout, int64_t rows, int64_t blocks) {
  if (layout == ScaleLayoutId::kLinear) return rows * blocks;
  const int64_t tile = layout == ScaleLayoutId::kSwizzled128x4 ? 128 : 8;
  return (rows + tile - 1) / tile * tile * ((blocks + 3) / 4 * 4);
}

int64_t golden_group_words(int64_t tokens, int64_t groups, bool is_short) {
  const int64_t columns = (groups + 3) / 4;
  const int64_t rows = (tokens + 3) / 4 * 4;
  return is_short ? (columns - 1) * rows + tokens : columns * rows;
}

GoldenOutputs allreduce_golden(const GoldenInputs& in) {
  const Elements e(in.problem.element);
  const int64_t tokens = in.problem.tokens;
  const int64_t hidden = in.problem.hidden;
  const size_t bytes = static_cast<size_t>(tokens * hidden) * e.bytes();
  const bool is_plain = in.problem.pattern == AllReducePattern::kAllReduce;
  GoldenOutputs out;
  out.ar_out.resize(bytes);
  if (!is_plain) {
    out.residual_out.resize(bytes);
    out.norm_out.resize(bytes);
  }
  Quantizer quantizer(in, out);
  quantizer.allocate();
  std::vector<float> x(static_cast<size_t>(hidden));
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t col = 0; col < hidden; ++col) {
      const int64_t index = token * hidden + col;
      const float sum = sum_over_ranks(in, token, col);
      e.write(out.ar_out, index, sum);
      if (is_plain) continue;
      x[static_cast<size_t>(col)] = e.round(sum + e.read(in.residual, index));
      e.write(out.residual_out, index, x[static_cast<size_t>(col)]);
    }
    if (is_plain) continue;
    const float squares = sum_of_squares(x);
    const float m = squares / static_cast<float>(hidden) + in.eps;
    const auto r = static_cast<float>(1.0 / std::sqrt(static_cast<double>(m)));
    out.sums_of_squares.push_back(squares);
    out.inverse_rms.push_back(r);
    for (int64_t col = 0; col < hidden; ++col) {
      float& n = x[static_cast<size_t>(col)];
      n = e.round(n * r * (in.weight_bias + e.read(in.gamma, col)));
      e.write(out.norm_out, token * hidden + col, n);
    }
    quantizer.quantize(static_cast<size_t>(token), x);
  }
  return out;
}

}  // namespace narrowfloat::testing
