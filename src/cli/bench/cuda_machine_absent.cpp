// In place of cuda_machine.cu in a build without CUDA.
#include "cli/bench/machine.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {

std::unique_ptr<Machine> open_gpu(int /*index*/) {
  throw Error(ErrorKind::kUnsupported,
              "this build has no CUDA: configure with `cmake --preset sm90` and build that");
}

}  // namespace narrowfloat::cli
