// The kernels of amx_kernels.h with AMX TILE and BF16, and AVX-512 F, BW, VL, DQ and VBMI.
#include <immintrin.h>
#include <type_traits>

#include "ops/grouped_gemm/x86/scaled_runs_text_avx512.h"
#include "ops/grouped_gemm/x86/scaled_tiles_text.h"
#include "ops/grouped_gemm/x86/tile_configuration.h"

namespace narrowfloat {
namespace {

// Names of this source alone: docs/architecture.md, levels of vector instructions.
struct Source {};
using Runs = e2m1_text::ScaledRuns<Source>;

struct Amx {
  template <Bf16StripScale kType>
  using Decoder = Runs::Decoder<
      std::conditional_t<kType == Bf16StripScale::kE4M3, Runs::E4m3Scales, Runs::PowersOfTwo>>;

  static void configure(int64_t first, int64_t second) {
    alignas(64) TileConfiguration configuration = {.palette = 1};
    constexpr uint16_t kLineBytes = 64;
    constexpr int64_t kPairs = kTileRunCols / 2;
    const int64_t rows[8] = {first, first, second, second, first, second, kPairs, kPairs};
    for (int tile = 0; tile < 8; ++tile) {
      if (rows[tile] == 0) continue;
      configuration.rows[tile] = static_cast<uint8_t>(rows[tile]);
      configuration.row_bytes[tile] = kLineBytes;
    }
    fence();
    _tile_loadconfig(&configuration);
  }
  static void release() { _tile_release(); }

  // The intrinsics of g++ 12 do not say what memory the instructions read.
  static void fence() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

  // The intrinsics of g++ 12 take tiles as text.
  template <int kTile>
  static void zero() {
    if constexpr (kTile == 0) _tile_zero(0);
    if constexpr (kTile == 1) _tile_zero(1);
    if constexpr (kTile == 2) _tile_zero(2);
    if constexpr (kTile == 3) _tile_zero(3);
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    if constexpr (kTile == 0) _tile_loadd(0, from, stride);
    if constexpr (kTile == 1) _tile_loadd(1, from, stride);
    if constexpr (kTile == 2) _tile_loadd(2, from, stride);
    if constexpr (kTile == 3) _tile_loadd(3, from, stride);
    if constexpr (kTile == 4) _tile_loadd(4, from, stride);
    if constexpr (kTile == 5) _tile_loadd(5, from, stride);
    if constexpr (kTile == 6) _tile_loadd(6, from, stride);
    if constexpr (kTile == 7) _tile_loadd(7, from, stride);
  }
  template <int kTile>
  static void store(float* to, int64_t stride) {
    if constexpr (kTile == 0) _tile_stored(0, to, stride);
    if constexpr (kTile == 1) _tile_stored(1, to, stride);
    if constexpr (kTile == 2) _tile_stored(2, to, stride);
    if constexpr (kTile == 3) _tile_stored(3, to, stride);
  }
  template <int kSums>
  static void multiply() {
    if constexpr (kSums == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (kSums == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kSums == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kSums == 3) _tile_dpbf16ps(3, 5, 7);
  }

  static void copy_run(uint16_t* to, const uint16_t* from) {
    if (from == nullptr) return _mm512_storeu_si512(to, _mm512_setzero_si512());
    // Elements 2 j and 2 j + 1 are columns j ^ 1 and 16 + (j ^ 1).
    const __m512i columns = _mm512_add_epi32(
        _mm512_set1_epi32(16 << 16),
        _mm512_mullo_epi32(
            _mm512_set1_epi32(0x00010001),
            _mm512_setr_epi32(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(columns, _mm512_loadu_si512(from)));
  }

  static void add_scaled(float* total, const float* weight_factors, const float* row_factor,
                         const float* inner) {
    const __m512 sums = _mm512_loadu_ps(inner);
    __m512 factors =
        weight_factors == nullptr ? _mm512_set1_ps(1.0F) : _mm512_loadu_ps(weight_factors);
    if (row_factor != nullptr) factors = _mm512_mul_ps(_mm512_set1_ps(*row_factor), factors);
    _mm512_storeu_ps(total, _mm512_fmadd_ps(factors, sums, _mm512_loadu_ps(total)));
  }
};

}  // namespace

const TileKernels kTileKernelsAmx = amx_kernels::tile_kernels_of<Amx>();

}  // namespace narrowfloat
