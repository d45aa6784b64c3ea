// Sets NARROWFLOAT_FORCE while it lives.
#pragma once

#include <cstdlib>

namespace narrowfloat {

class Forced {
 public:
  explicit Forced(const char* setting) { setenv("NARROWFLOAT_FORCE", setting, 1); }
  ~Forced() { unsetenv("NARROWFLOAT_FORCE"); }
  Forced(const Forced&) = delete;
  Forced& operator=(const Forced&) = delete;
};

}  // namespace narrowfloat
