// The floating-point environment that the arithmetic is specified for: round to nearest, denormals
// kept. A caller may have set flush-to-zero or another rounding mode (audio and game engines do),
// and worker threads have environments of their own, so every task on the CPU starts with this
// guard.
#pragma once

#include <atomic>
#include <cfenv>
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace narrowfloat {

class FloatEnvironmentGuard {
 public:
  FloatEnvironmentGuard() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    // All exceptions masked, round to nearest, neither FTZ nor DAZ.
    constexpr uint32_t kDefault = 0x1F80;
    if (saved_ != kDefault) _mm_setcsr(kDefault);
#else
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
#endif
  }
  ~FloatEnvironmentGuard() {
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#else
    std::fesetenv(&saved_);
#endif
  }
  FloatEnvironmentGuard(const FloatEnvironmentGuard&) = delete;
  FloatEnvironmentGuard& operator=(const FloatEnvironmentGuard&) = delete;

 private:
#if defined(__x86_64__)
  uint32_t saved_;
#else
  std::fenv_t saved_;
#endif
};

namespace float_environment_detail {

// Compilers do not know that arithmetic depends on the environment and may move it across a guard.
// They cannot move a call that they cannot inline (the fence makes it impure).
template <typename Function>
[[gnu::noinline]] auto call(const Function& function) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return function();
}

}  // namespace float_environment_detail

// Calls function() in the specified environment: for scalar arithmetic beside a guard. Loops whose
// operands are loaded and stored between the guard's construction and its end need no such call.
template <typename Function>
auto in_float_environment(const Function& function) {
  const FloatEnvironmentGuard guard;
  return float_environment_detail::call(function);
}

}  // namespace narrowfloat
