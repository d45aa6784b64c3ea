// The settings of tests, see cpu_cta.h.
#include "ops/allreduce/cpu_cta.h"

namespace narrowfloat {

namespace cpu_cta_detail {

TestSettings& test_settings() {
  static TestSettings settings;
  return settings;
}

}  // namespace cpu_cta_detail

void set_protocol_point_function(ProtocolPointFunction function) {
  cpu_cta_detail::test_settings().reached.store(function, std::memory_order_relaxed);
}

void set_cpu_ctas_per_rank(int count) {
  cpu_cta_detail::test_settings().ctas_per_rank.store(count, std::memory_order_relaxed);
}

}  // namespace narrowfloat
