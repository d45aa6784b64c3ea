// Bits from booleans, eight a byte: masks of attention kernels.
//
// An element counts as one bit, 1 unless the element is 0. Every function checks its arguments
// before it writes anything, throws narrowfloat::Error and accepts empty tensors. Buffers must not
// overlap; on CUDA the elements and the packed bytes start at multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "narrowfloat/export.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// The place of the first of eight elements: kBig bit 7 (as NumPy's packbits), kLittle bit 0.
enum class BitOrder : int { kBig = 0, kLittle = 1 };

// input: BOOL or U8, dense, n elements in all. output: U8 [ceil(n / 8)]; the bits after the last
// element are 0.
NARROWFLOAT_API void pack_bits(const TensorView& input, const TensorView& output,
                               BitOrder order = BitOrder::kBig, Stream stream = {});

// The most bytes that `segments` segments with `elements` elements in all may need.
NARROWFLOAT_API int64_t segment_packed_bytes(int64_t elements, int64_t segments);

// Packs each segment [offsets[i], offsets[i + 1]) into whole bytes of its own.
//   input           BOOL or U8 [n], dense
//   offsets         I32 or I64 [segments + 1], ascending within [0, n]
//   output          U8, at least segment_packed_bytes(n, segments); bytes after the last segment
//                   keep their contents
//   output_offsets  as offsets: where each segment starts in the output, and where the last ends
// Offsets in device memory are not validated; bad ones give wrong bits, never an access out of
// bounds.
NARROWFLOAT_API void segment_pack_bits(const TensorView& input, const TensorView& offsets,
                                       const TensorView& output, const TensorView& output_offsets,
                                       BitOrder order = BitOrder::kBig, Stream stream = {});

}  // namespace narrowfloat
