// Row shuffles: the order of rows that epilogue-tiled GEMMs read weights in (spec 8.7), and back.
//
// Inside each group of R rows (R = 32 where epilogue_tile_m is a multiple of 128, else 16) row j
// moves to row j % (R/8) * 8 + j / (R/8):
//
//   R = 16, from the top:  rows 0 2 4 6 8 10 12 14 1 3 5 7 9 11 13 15 of the group
//
// unshuffle_rows and unshuffle_scales restore the order of weights that were stored for such a
// GEMM. Every function checks its arguments before it writes anything, throws narrowfloat::Error,
// accepts 0 rows and 0 columns, and needs buffers that do not overlap.
#pragma once

#include <cstdint>

#include "narrowfloat/export.h"
#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Rows that are shuffled among themselves: 32 or 16. Throws kInvalidArgument where epilogue_tile_m
// is below 1.
NARROWFLOAT_API int64_t shuffle_group_rows(int64_t epilogue_tile_m);

// input: any type of whole bytes, [..., rows, cols], leading axes of one row stride. output: the
// same type and shape, dense. Throws kInvalidArgument where rows is no multiple of
// shuffle_group_rows(epilogue_tile_m). Any alignment works on a GPU; 16-byte rows are fast.
NARROWFLOAT_API void shuffle_rows(const TensorView& input, const TensorView& output,
                                  int64_t epilogue_tile_m, Stream stream = {});
NARROWFLOAT_API void unshuffle_rows(const TensorView& input, const TensorView& output,
                                    int64_t epilogue_tile_m, Stream stream = {});

// Shuffles one-byte scales of such a matrix: `input` in layout linear, `output` shuffled and in
// swizzled_128x4, its padding columns zero; unshuffle_scales is the inverse. Type, batch, rows and
// blocks must agree, and rows must be a multiple of 128. On CUDA buffers start at 16 bytes.
NARROWFLOAT_API void shuffle_scales(FormatId format, const ScaleView& input,
                                    const ScaleView& output, int64_t epilogue_tile_m,
                                    Stream stream = {});
NARROWFLOAT_API void unshuffle_scales(FormatId format, const ScaleView& input,
                                      const ScaleView& output, int64_t epilogue_tile_m,
                                      Stream stream = {});

}  // namespace narrowfloat
