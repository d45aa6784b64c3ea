// A visitor is asked for a type that is no format.
#include "formats/registry.h"

int main() {
  const auto columns = []<narrowfloat::BlockFormat Format>() {
    return static_cast<int>(Format::kBlockCols);
  };
#if defined(NF_MUST_FAIL)
  return columns.operator()<float>();
#else
  return columns.operator()<narrowfloat::Nvfp4>();
#endif
}
