// See fills.h.
#include "support/fills.h"

#include <array>
#include <cmath>

#include "formats/float16.h"
#include "formats/minifloat.h"
#include "tensor/element_io.h"

namespace narrowfloat::testing {
namespace {

struct TypeBits {
  int mantissa;
  uint32_t infinity;  // Magnitude bits; for F8_E4M3, which has none, its NaN.
  int min_exponent;   // Range of random powers of two that keep N(0, 1) data finite and mostly
                      // normal.
  int max_exponent;
};

TypeBits type_bits(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return {23, 0x7F800000U, -130, 124};
    case DType::kBF16:
      return {7, 0x7F80U, -130, 124};
    case DType::kF16:
      return {10, 0x7C00U, -16, 13};
    default:
      return {3, 0x7FU, -6, 6};
  }
}

int element_width(DType dtype) { return bits(dtype); }

uint32_t sign_bit(DType dtype) { return 1U << (element_width(dtype) - 1); }

float power(int exponent) { return std::ldexp(1.0F, exponent); }

// Finite bits of a value, saturating where the type would make an infinity of it.
uint32_t finite_bits(DType dtype, float value) {
  const uint32_t raw = element_bits(dtype, value);
  const uint32_t magnitude = raw & (sign_bit(dtype) - 1);
  const uint32_t limit = type_bits(dtype).infinity;
  return magnitude >= limit ? (raw & sign_bit(dtype)) | (limit - 1) : raw;
}

uint32_t special_bits(DType dtype, Random& random) {
  const uint32_t sign = random.chance(50) ? sign_bit(dtype) : 0;
  const TypeBits type = type_bits(dtype);
  if (dtype == DType::kF8E4M3 || random.chance(40)) return sign | type.infinity;
  const uint32_t quiet = 1U << (type.mantissa - 1);
  const uint32_t payload = random.bits32() & (quiet - 1);
  const bool is_quiet = random.chance(50);
  // A signalling NaN needs a payload that is not 0.
  return sign | type.infinity | (is_quiet ? quiet | payload : payload | 1U);
}

uint32_t denormal_bits(DType dtype, Random& random) {
  const uint32_t mantissa_mask = (1U << type_bits(dtype).mantissa) - 1;
  const uint32_t sign = random.chance(50) ? sign_bit(dtype) : 0;
  if (random.chance(20)) return sign;
  return sign | (random.bits32() & mantissa_mask);
}

uint32_t extreme_bits(DType dtype, Random& random) {
  const TypeBits type = type_bits(dtype);
  const uint32_t near = static_cast<uint32_t>(random.range(0, 3));
  const uint32_t sign = random.chance(50) ? sign_bit(dtype) : 0;
  const uint32_t least_normal = 1U << type.mantissa;
  const std::array<uint32_t, 4> magnitudes{near, least_normal - 2 + near, type.infinity - 1 - near,
                                           type.infinity / 2 + near};
  return sign | magnitudes[static_cast<size_t>(random.range(0, 3))];
}

// The state that a whole fill shares.
class Filler {
 public:
  Filler(Fill fill, DType dtype, Random& random)
      : fill_(fill), dtype_(dtype), random_(random), type_(type_bits(dtype)) {
    new_exponent();
    constant_ = finite_bits(dtype, random.normal() * power(exponent_));
  }

  uint32_t next() {
    switch (fill_) {
      case Fill::kRandomBits:
        return random_.bits32() & (sign_bit(dtype_) | (sign_bit(dtype_) - 1));
      case Fill::kNormal:
        return normal();
      case Fill::kNormalRows:
        if (--left_ <= 0) new_exponent();
        return normal();
      case Fill::kQuarterIntegers:
        return element_bits(dtype_, static_cast<float>(random_.range(-32, 32)) / 4.0F);
      case Fill::kDenormals:
        return denormal_bits(dtype_, random_);
      case Fill::kSparse:
        if (random_.chance(90)) return random_.chance(30) ? sign_bit(dtype_) : 0;
        return normal();
      case Fill::kSpecials:
        return random_.chance(4) ? special_bits(dtype_, random_) : normal();
      default:
        return next_rare();
    }
  }

 private:
  uint32_t next_rare() {
    switch (fill_) {
      case Fill::kOnlySpecials:
        return special_bits(dtype_, random_);
      case Fill::kAllEqual:
        return constant_;
      case Fill::kOutlier:
        if (random_.chance(2)) return finite_bits(dtype_, power(type_.max_exponent));
        return finite_bits(dtype_, random_.normal() * power(type_.max_exponent - 9));
      case Fill::kIntegers:
        return finite_bits(dtype_, static_cast<float>(random_.range(-12, 12)) * power(exponent_));
      case Fill::kExtremes:
        return extreme_bits(dtype_, random_);
      default:
        return random_.chance(50) ? sign_bit(dtype_) : 0;
    }
  }

  uint32_t normal() { return finite_bits(dtype_, random_.normal() * power(exponent_)); }

  void new_exponent() {
    exponent_ = static_cast<int>(random_.range(type_.min_exponent, type_.max_exponent));
    // Half of all data is of ordinary size.
    if (random_.chance(50)) exponent_ = static_cast<int>(random_.range(-4, 4));
    left_ = random_.range(16, 48);
  }

  Fill fill_;
  DType dtype_;
  Random& random_;
  TypeBits type_;
  int exponent_ = 0;
  int64_t left_ = 0;
  uint32_t constant_ = 0;
};

}  // namespace

std::string_view name(Fill fill) {
  static constexpr std::array<std::string_view, kNumFills> kNames{
      "random_bits", "normal",   "normal_rows",   "quarter_integers", "denormals",
      "sparse",      "specials", "only_specials", "all_equal",        "outlier",
      "integers",    "zeros",    "extremes"};
  return kNames[static_cast<size_t>(fill)];
}

bool is_finite(Fill fill) {
  return fill != Fill::kRandomBits && fill != Fill::kSpecials && fill != Fill::kOnlySpecials;
}

void fill_elements(Fill fill, DType dtype, Random& random, int64_t count, void* out) {
  Filler filler(fill, dtype, random);
  for (int64_t i = 0; i < count; ++i) store_element(dtype, filler.next(), i, out);
}

uint32_t element_bits(DType dtype, float value) {
  switch (dtype) {
    case DType::kF32:
      return float_bits(value);
    case DType::kBF16:
      return float_to_bf16(value);
    case DType::kF16:
      return float_to_f16(value);
    default:
      return E4M3::encode(value);
  }
}

void store_element(DType dtype, uint32_t bits, int64_t index, void* out) {
  switch (element_width(dtype)) {
    case 32:
      static_cast<uint32_t*>(out)[index] = bits;
      return;
    case 16:
      static_cast<uint16_t*>(out)[index] = static_cast<uint16_t>(bits);
      return;
    default:
      static_cast<uint8_t*>(out)[index] = static_cast<uint8_t>(bits);
  }
}

float load_element(DType dtype, const void* data, int64_t index) {
  float value = 0.0F;
  widen(dtype, element_pointer(data, dtype, index), 1, &value);
  return value;
}

}  // namespace narrowfloat::testing
