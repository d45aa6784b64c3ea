// The kernels of int8_tiles.h with AMX TILE and INT8, and AVX-512 F, BW and VBMI.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/e2m1_text_avx512.h"
#include "ops/grouped_gemm/x86/int8_tiles_text.h"
#include "ops/grouped_gemm/x86/tile_configuration.h"

namespace narrowfloat {
namespace {

// Names of this source alone: docs/architecture.md, levels of vector instructions.
struct Source {};
using Text = e2m1_text::Avx512<Source>;

struct Amx {
  // Tiles 0 and 1 are sums, 4 and 5 rows, 6 and 7 weights.
  static void configure(int64_t rows) {
    alignas(64) TileConfiguration configuration = {.palette = 1};
    constexpr int kTiles[] = {0, 1, 4, 5, 6, 7};
    for (const int tile : kTiles) {
      const bool has_weights = tile >= 6;
      const bool has_rows = tile >= 4 && !has_weights;
      configuration.rows[tile] = static_cast<uint8_t>(has_weights ? 8 : rows);
      configuration.row_bytes[tile] = has_rows ? 32 : 64;
    }
    fence();
    _tile_loadconfig(&configuration);
  }
  static void release() { _tile_release(); }

  // The intrinsics of g++ 12 do not say what memory the instructions read and write.
  static void fence() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

  // The intrinsics of g++ 12 take tiles as text.
  template <int kIndex>
  static void multiply(const uint8_t* rows, const uint8_t* weights, int32_t* sums) {
    constexpr int64_t kRowBytes = 32;
    constexpr int64_t kLineBytes = 64;
    if constexpr (kIndex == 0) {
      _tile_loadd(4, rows, kRowBytes);
      _tile_loadd(6, weights, kLineBytes);
      _tile_zero(0);
      _tile_dpbssd(0, 4, 6);
      _tile_stored(0, sums, kLineBytes);
    } else {
      _tile_loadd(5, rows, kRowBytes);
      _tile_loadd(7, weights, kLineBytes);
      _tile_zero(1);
      _tile_dpbssd(1, 5, 7);
      _tile_stored(1, sums, kLineBytes);
    }
  }

  using Floats = __m512;
  static Floats load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats broadcast(const float* from) { return _mm512_set1_ps(*from); }
  static Floats of_integers(const int32_t* from) {
    return _mm512_cvtepi32_ps(_mm512_loadu_si512(from));
  }
  // The permutation reads six bits of an index. The upper two are not the code's, so values stand
  // four times.
  static void decode(const uint8_t* codes, uint8_t* low, uint8_t* high) {
    const __m512i values = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const __m512i packed = _mm512_loadu_si512(codes);
    _mm512_storeu_si512(low, _mm512_permutexvar_epi8(packed, values));
    _mm512_storeu_si512(high, _mm512_permutexvar_epi8(_mm512_srli_epi16(packed, 4), values));
  }
  static Floats ue8m0(const uint8_t* codes) {
    return Text::decode_scales(Bf16StripScale::kUE8M0, codes);
  }
};

}  // namespace

const Int8TileKernels kInt8TileKernelsAmx = int8_tiles::int8_tile_kernels_of<Amx>();

}  // namespace narrowfloat
