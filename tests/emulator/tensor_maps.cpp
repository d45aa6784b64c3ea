// See tensor_maps.h.
#include "emulator/tensor_maps.h"

#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>

#include "emulator/machine.h"

namespace emulator {
namespace {

constexpr uint32_t kMark = 0x4D415000;

// Calls of(global or null, shared address, bytes) for each element of a box.
template <class Of>
void for_box(const EncodedMap& map, const std::array<int, 3>& at, uint32_t shared, Of&& of) {
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  require(shared % (map.is_swizzled != 0 ? 1024 : 128) == 0,
          "a box at an address that is not aligned");
  uint32_t offset = 0;
  for (uint32_t z = 0; z < map.box[2]; ++z) {
    for (uint32_t y = 0; y < map.box[1]; ++y) {
      for (uint32_t x = 0; x < map.box[0]; ++x) {
        const std::array<int64_t, 3> place{at[0] + static_cast<int64_t>(x),
                                           at[1] + static_cast<int64_t>(y),
                                           at[2] + static_cast<int64_t>(z)};
        uint8_t* global = map.data;
        bool is_inside = true;
        for (size_t i = 0; i < 3; ++i) {
          is_inside = is_inside && place[i] >= 0 && place[i] < static_cast<int64_t>(map.extents[i]);
        }
        if (is_inside) {
          for (size_t i = 0; i < 3; ++i) {
            global += place[i] * static_cast<int64_t>(map.strides[i]);
          }
        }
        uint32_t target = shared + offset + x * map.element_bytes;
        if (map.is_swizzled != 0) target ^= (target >> 7 & 7U) << 4;
        of(is_inside ? global : nullptr, target, map.element_bytes);
      }
      offset += row_bytes;
    }
  }
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion /*promotion*/,
                CUtensorMapFloatOOBfill fill) {
  EncodedMap encoded{};
  encoded.data = static_cast<uint8_t*>(data);
  encoded.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT32   ? 4
                          : type == CU_TENSOR_MAP_DATA_TYPE_UINT16 ? 2
                                                                   : 1;
  encoded.dimensions = rank;
  encoded.extents = {1, 1, 1};
  encoded.box = {1, 1, 1};
  encoded.strides[0] = encoded.element_bytes;
  bool fits = rank >= 1 && rank <= 3 && is_aligned(data, 16) &&
              (encoded.element_bytes > 1 || type == CU_TENSOR_MAP_DATA_TYPE_UINT8) &&
              interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
              (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || swizzle == CU_TENSOR_MAP_SWIZZLE_128B) &&
              fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  for (uint32_t i = 0; fits && i < rank; ++i) {
    encoded.extents[i] = extents[i];
    encoded.box[i] = box[i];
    fits = extents[i] > 0 && extents[i] <= uint64_t{1} << 32 && box[i] > 0 && box[i] <= 256 &&
           steps[i] == 1;
    if (i > 0) {
      encoded.strides[i] = strides[i - 1];
      fits = fits && strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t{1} << 40;
    }
  }
  const uint32_t row_bytes = encoded.box[0] * encoded.element_bytes;
  encoded.is_swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 1 : 0;
  fits = fits && row_bytes % 16 == 0 && (encoded.is_swizzled == 0 || row_bytes <= 128);
  encoded.mark = kMark;
  std::memcpy(map, &encoded, sizeof(encoded));
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

const EncodedMap* encoded_map(const void* map) {
  const auto* encoded = static_cast<const EncodedMap*>(map);
  require(is_aligned(map, 64) && encoded->mark == kMark, "a tensor map that nobody has made");
  return encoded;
}

uint32_t box_bytes(const EncodedMap& map) {
  return map.box[0] * map.box[1] * map.box[2] * map.element_bytes;
}

void load_box(const EncodedMap& map, const std::array<int, 3>& at, uint32_t rank, uint32_t shared) {
  for_box(map, at, shared, [&](const uint8_t* global, uint32_t target, uint32_t bytes) {
    uint8_t* to = shared_memory_of(rank, target, bytes);
    if (global == nullptr) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, global, bytes);
    }
  });
}

void store_box(const EncodedMap& map, const std::array<int, 3>& at, uint32_t rank,
               uint32_t shared) {
  for_box(map, at, shared, [&](uint8_t* global, uint32_t target, uint32_t bytes) {
    if (global != nullptr) std::memcpy(global, shared_memory_of(rank, target, bytes), bytes);
  });
}

}  // namespace emulator

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                                        unsigned int /*version*/,
                                                        unsigned long long /*flags*/,
                                                        cudaDriverEntryPointQueryResult* found) {
  const bool is_known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = is_known ? reinterpret_cast<void*>(&emulator::encode) : nullptr;
  *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
