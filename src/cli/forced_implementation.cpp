// Commands have one thread that calls the library, so the environment may change under it.
#include "cli/forced_implementation.h"

#include <cstdlib>

namespace narrowfloat::cli {
namespace {

constexpr const char* kVariable = "NARROWFLOAT_FORCE";

}  // namespace

ForcedImplementation::ForcedImplementation(std::string_view op, std::string_view implementation) {
  if (const char* value = std::getenv(kVariable)) previous_ = value;
  ::setenv(kVariable, (std::string(op) + ":" + std::string(implementation)).c_str(), 1);
}

ForcedImplementation::~ForcedImplementation() {
  if (previous_) {
    ::setenv(kVariable, previous_->c_str(), 1);
  } else {
    ::unsetenv(kVariable);
  }
}

}  // namespace narrowfloat::cli
