// How the GPUs of this machine reach each other.
#pragma once

#include <vector>

#include "narrowfloat/allreduce.h"

namespace narrowfloat {

std::vector<GpuLink> list_gpu_links();

}  // namespace narrowfloat
