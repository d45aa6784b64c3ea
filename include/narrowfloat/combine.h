// Combine (FlashInfer's finalize): the weighted sum of a token's slots, in slot order (moe
// spec 6.6).
#pragma once

#include "narrowfloat/export.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// out[t, o] = round(fold over s, from +0: a = fma(weights[t, s], slot_rows[row(t, s), o], a)),
// where row = slot_to_row[t * slots + s] and slots at -1 are skipped. A token without a row gets
// +0. Throws kInvalidArgument before it writes anything.
//   slot_rows    BF16, F16 or F32 [rows, H], dense
//   slot_to_row  I32 [T * slots], dense
//   weights      F32 or BF16 [T, slots], dense; absent: 1
//   out          BF16, F16 or F32 [T, N], N <= H: the last columns are dropped
// Rounds once. The same bits on every device. A row that does not exist is an error on the CPU and
// a slot to skip on a GPU, where the rows of slot_rows and out lie multiples of 16 bytes apart.
NARROWFLOAT_API void combine(const TensorView& slot_rows, const TensorView& slot_to_row,
                             const TensorView& weights, const TensorView& out, Stream stream = {});

}  // namespace narrowfloat
