// The floating-point environment inside library calls, whatever the caller set.
#include "runtime/float_environment.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/quantize.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

#if defined(__x86_64__)

constexpr unsigned kDefault = 0x1F80;
constexpr unsigned kFlushToZero = 0x8000;
constexpr unsigned kDenormalsAreZero = 0x0040;
constexpr unsigned kRoundTowardsZero = 0x6000;

// Sets the caller's environment and puts the old one back.
class CallerEnvironment {
 public:
  explicit CallerEnvironment(unsigned flags) : saved_(_mm_getcsr()) {
    _mm_setcsr(kDefault | flags);
  }
  ~CallerEnvironment() { _mm_setcsr(saved_); }
  CallerEnvironment(const CallerEnvironment&) = delete;
  CallerEnvironment& operator=(const CallerEnvironment&) = delete;

 private:
  unsigned saved_;
};

const std::vector<unsigned> kSettings{kFlushToZero, kDenormalsAreZero, kRoundTowardsZero,
                                      kFlushToZero | kDenormalsAreZero | kRoundTowardsZero};

// Control bits without the sticky exception flags.
unsigned control() { return _mm_getcsr() & ~0x3FU; }

TEST(FloatEnvironmentGuard, SetsTheDefaultAndRestoresWhatWasThere) {
  for (const unsigned setting : kSettings) {
    const CallerEnvironment caller(setting);
    {
      const FloatEnvironmentGuard guard;
      EXPECT_EQ(control(), kDefault);
      volatile float tiny = 0x1p-126F;
      EXPECT_EQ(tiny * 0.5F, 0x1p-127F);
    }
    EXPECT_EQ(control(), kDefault | setting);
  }
}

TEST(FloatEnvironmentGuard, RestoresOnAnException) {
  const CallerEnvironment caller(kFlushToZero);
  try {
    const FloatEnvironmentGuard guard;
    throw 1;
  } catch (int) {
    EXPECT_EQ(control(), kDefault | kFlushToZero);
  }
}

TEST(FloatEnvironmentGuard, IsOpenInEveryPieceOfParallelWork) {
  const CallerEnvironment caller(kFlushToZero | kRoundTowardsZero);
  std::vector<unsigned> seen(64, 0);
  parallel_for(64, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) seen[static_cast<size_t>(i)] = control();
  });
  EXPECT_EQ(seen, std::vector<unsigned>(64, kDefault));
  (void)parallel_max(64, 1, [&](int64_t begin, int64_t /*end*/) {
    EXPECT_EQ(control(), kDefault);
    return static_cast<uint32_t>(begin);
  });
  EXPECT_EQ(control(), kDefault | kFlushToZero | kRoundTowardsZero);
}

// Public operations give the same bytes and leave the caller's settings alone.
TEST(FloatEnvironment, DoesNotChangeWhatTheOperationsGive) {
  std::vector<float> input;
  for (int i = 0; i < 64; ++i) {
    input.push_back(std::ldexp(1.0F + static_cast<float>(i) / 97.0F, i % 2 == 0 ? -128 : -130));
  }
  const auto view = TensorView::contiguous(input.data(), DType::kF32, {2, 32});
  const auto run = [&] {
    std::vector<uint8_t> bytes;
    for (const FormatInfo& info : all_formats()) {
      const QuantizedLayout layout = quantized_layout(info.id, 2, 32);
      std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes));
      std::vector<float> scales(static_cast<size_t>((layout.scales_bytes + 3) / 4));
      std::vector<float> global(static_cast<size_t>(layout.global_scales));
      const QuantizedView quantized = layout.bind(values.data(), scales.data(), global.data());
      quantize(view, quantized);
      std::vector<float> output(64);
      dequantize(quantized, TensorView::contiguous(output.data(), DType::kF32, {2, 32}));
      bytes.insert(bytes.end(), values.begin(), values.end());
      for (const std::vector<float>& floats : {scales, global, output}) {
        const auto* data = reinterpret_cast<const uint8_t*>(floats.data());
        bytes.insert(bytes.end(), data, data + floats.size() * sizeof(float));
      }
    }
    for (const float scale : {decode_scale_from_encode(0x1.234p126F), encode_scale_from_amax(0.3F),
                              encode_scale_from_decode(0x1.234p127F)}) {
      const auto* data = reinterpret_cast<const uint8_t*>(&scale);
      bytes.insert(bytes.end(), data, data + sizeof(scale));
    }
    return bytes;
  };
  // The first setting pins nothing: what runs without it.
  for (const char* implementation : {"", "cpu_reference", "cpu_baseline"}) {
    const std::string pins =
        std::string("quantize:") + implementation + ",dequantize:" + implementation;
    if (*implementation != '\0') setenv("NARROWFLOAT_FORCE", pins.c_str(), 1);
    const std::vector<uint8_t> expected = run();
    for (const unsigned setting : kSettings) {
      const CallerEnvironment caller(setting);
      EXPECT_EQ(run(), expected) << implementation << " with MXCSR flags " << setting;
      EXPECT_EQ(control(), kDefault | setting);
    }
    unsetenv("NARROWFLOAT_FORCE");
  }
}

#endif

}  // namespace
}  // namespace narrowfloat
