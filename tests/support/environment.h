// Environment variables and processor modes that a test changes and puts back.
#pragma once

#include <cstdlib>
#include <string>

#include "narrowfloat/runtime.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace narrowfloat::testing {

// Pins implementations through NARROWFLOAT_FORCE while it lives.
class ForcedImplementation {
 public:
  ForcedImplementation(std::string_view op, std::string_view implementation) {
    const std::string setting = std::string(op) + ":" + std::string(implementation);
    setenv("NARROWFLOAT_FORCE", setting.c_str(), 1);
  }
  ~ForcedImplementation() { unsetenv("NARROWFLOAT_FORCE"); }
  ForcedImplementation(const ForcedImplementation&) = delete;
  ForcedImplementation& operator=(const ForcedImplementation&) = delete;
};

class ThreadLimit {
 public:
  explicit ThreadLimit(int count) { set_num_threads(count); }
  ~ThreadLimit() { set_num_threads(0); }
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

// Bits to set in the floating-point control register: flush to zero, denormals are zero, and the
// rounding modes.
inline constexpr unsigned kFlushToZero = 0x8000U;
inline constexpr unsigned kDenormalsAreZero = 0x0040U;
inline constexpr unsigned kRoundDown = 0x2000U;
inline constexpr unsigned kRoundUp = 0x4000U;
inline constexpr unsigned kRoundToZero = 0x6000U;

class ControlWord {
 public:
#if defined(__x86_64__)
  explicit ControlWord(unsigned set) : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | set); }
  ~ControlWord() { _mm_setcsr(saved_); }
  [[nodiscard]] static unsigned now() { return _mm_getcsr() & 0xFFC0U; }
#else
  explicit ControlWord(unsigned /*set*/) {}
  [[nodiscard]] static unsigned now() { return 0; }
#endif
  ControlWord(const ControlWord&) = delete;
  ControlWord& operator=(const ControlWord&) = delete;

 private:
  unsigned saved_ = 0;
};

}  // namespace narrowfloat::testing
