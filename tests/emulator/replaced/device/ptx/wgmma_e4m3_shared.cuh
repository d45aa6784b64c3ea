// Emulated: src/device/ptx/wgmma_e4m3_shared.cuh.
#pragma once

#include "device/ptx/wgmma_e4m3.cuh"
