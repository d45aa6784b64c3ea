// Emulated: src/device/ptx/wgmma_bf16_between.cuh.
#pragma once

#include "device/ptx/wgmma_bf16.cuh"
