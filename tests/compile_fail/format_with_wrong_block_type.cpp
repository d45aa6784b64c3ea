// A format whose block size is text.
#include "formats/registry.h"

struct Wrong : narrowfloat::Mxfp8 {
#if defined(NF_MUST_FAIL)
  static constexpr std::string_view kBlockCols = "32";
#endif
};

int main() { return narrowfloat::FormatList<Wrong>::kSize; }
