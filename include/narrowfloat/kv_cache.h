// KV caches in NVFP4: blocks of 16 columns of a head, an E4M3 scale each, one decode scale for all
// keys and one for all values (spec 6.11, 7).
//
//   value = (code * scale) * decode_scale        rounded once, then to the output's type
//
// Scales here go in the decode direction. Layouts of a paged cache of `heads` heads:
//
//   NHD   values [pages, page_size, heads, head_dim / 2]     scales [.., head_dim / 16]
//   HND   values [pages, heads, page_size, head_dim / 2]     scales [.., head_dim / 16]
//
// Strides of the first three axes are free, so that K and V may be halves of one stacked tensor, or
// share pages with their scales. Values are U8, two codes a byte, the even column in the low
// nibble; scales are F8_E4M3 or U8, in rows as stored (linear). On CUDA inputs and outputs of
// 16-bit or fp32 numbers start at 16 bytes with strides of multiples of 16 bytes, cached values
// at 8.
//
// The contents of index vectors (tables, positions, slots) select the entries that are touched;
// they never lead outside the tensors: rows whose index is out of range are skipped. Everything
// else is checked before anything is written (narrowfloat::Error). Inputs must not overlap outputs.
// If two rows name the same place, either may end up there.
#pragma once

#include <cstdint>
#include <optional>

#include "narrowfloat/export.h"
#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// One number: given by the host (finite, > 0), or F32 [1] on the device of the tensors, where it is
// not validated. With neither, the operation's documented default holds.
struct KvScale {
  KvScale() = default;
  KvScale(float host_value) : value(host_value) {}                   // NOLINT: meant to convert.
  KvScale(const TensorView& device_value) : tensor(device_value) {}  // NOLINT: meant to convert.

  std::optional<float> value;
  TensorView tensor;
};

enum class KvLayout : int { kNhd = 0, kHnd = 1 };

// Codes and scales of keys or of values.
struct KvCodes {
  TensorView values;
  TensorView scales;
};

// A paged cache. Heads, pages and page size of keys and values agree; head_dim may differ.
struct PagedKvCache {
  KvCodes k;
  KvCodes v;
  KvLayout layout = KvLayout::kNhd;
  KvScale k_scale;  // Decode scales; default 1.
  KvScale v_scale;
};

// input: BF16 or F16 [..., cols] of one row stride, cols a multiple of 16. output: values
// [..., cols / 2] and scales [..., cols / 16], dense. decode_scale: default 1.
NARROWFLOAT_API void kv_quantize(const TensorView& input, const KvCodes& output,
                                 const KvScale& decode_scale = {}, MathMode math = MathMode::kExact,
                                 Stream stream = {});

// Dequantizes. output: BF16, F16 or F32 [..., cols] of one row stride.
NARROWFLOAT_API void kv_dequantize(const KvCodes& input, const TensorView& output,
                                   const KvScale& decode_scale = {}, Stream stream = {});

// Gathers the tokens of each sequence. block_tables: I32 or I64 [batch, max_pages], dense;
// seq_lens: I32 or I64 [batch]. output_k, output_v: BF16, F16 or F32 (the same) [batch, max_seq,
// heads, head_dim], strides free. Tokens at or beyond seq_lens[i], and those whose page is not in
// the cache, keep what they hold.
NARROWFLOAT_API void kv_dequantize_paged(const PagedKvCache& cache, const TensorView& block_tables,
                                         const TensorView& seq_lens, const TensorView& output_k,
                                         const TensorView& output_v, Stream stream = {});

// Destinations of appended rows: row i goes to entry positions[i] % page_size of page
// indices[indptr[batch_indices[i]] + positions[i] / page_size]. All I32 or all I64.
struct KvPositions {
  TensorView batch_indices;  // [rows]
  TensorView positions;      // [rows]
  TensorView indices;        // [n]: pages, request after request.
  TensorView indptr;         // [batch + 1]: where the pages of a request start.
};

// Quantizes rows of keys and values into the cache. key, value: BF16 or F16 (the same)
// [rows, heads, head_dim], strides of the first two axes free. A row is skipped whose request,
// position or page does not exist; a position beyond the pages of its request counts as one.
NARROWFLOAT_API void kv_append_paged(const TensorView& key, const TensorView& value,
                                     const KvPositions& positions, const PagedKvCache& cache,
                                     MathMode math = MathMode::kExact, Stream stream = {});

// Appends by slots: I32 or I64 [n], n <= rows, each page * page_size + entry. Rows with a slot
// outside the cache (negative ones, say) are skipped, as are those from n on.
NARROWFLOAT_API void kv_append_slots(const TensorView& key, const TensorView& value,
                                     const TensorView& slots, const PagedKvCache& cache,
                                     MathMode math = MathMode::kExact, Stream stream = {});

struct KvCacheQuantizeOptions {
  MathMode math = MathMode::kExact;
  // Encode scales. Default: 448 / max(largest magnitude, 1e-12), without NVFP4's factor 6.
  KvScale k_encode_scale;
  KvScale v_encode_scale;
};

// Quantizes whole caches with the arithmetic of quantize() for NVFP4; the scales of V are reordered
// (kv_reorder_v_scales). key, value: BF16 or F16 (the same), [pages, page_size, heads, head_dim] or
// in the order of output.layout, each page dense; page_size a multiple of 4, head_dim of 64.
// output.k_scale, output.v_scale: F32 [1] tensors, which receive the decode scales 1 / encode
// scale.
NARROWFLOAT_API void kv_quantize_paged_cache(const TensorView& key, const TensorView& value,
                                             const PagedKvCache& output,
                                             const KvCacheQuantizeOptions& options = {},
                                             Stream stream = {});

// Reorders the scales of V as some attention kernels read them (spec 8.8). With S = head_dim / 16,
// the scale of block s of token t moves, within its page and head, to token t/4*4 + s/(S/4),
// position s%(S/4)*4 + t%4. input, output: F8_E4M3 or U8 [pages, page_size, heads, S] or in the
// order of `layout`, page_size and S multiples of 4; strides free. kv_restore_v_scales is the
// inverse.
NARROWFLOAT_API void kv_reorder_v_scales(const TensorView& input, const TensorView& output,
                                         KvLayout layout, Stream stream = {});
NARROWFLOAT_API void kv_restore_v_scales(const TensorView& input, const TensorView& output,
                                         KvLayout layout, Stream stream = {});

}  // namespace narrowfloat
