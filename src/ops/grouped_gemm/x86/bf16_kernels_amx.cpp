// The kernel of amx_kernels.h with AMX TILE and BF16, and AVX-512 F.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/amx_kernels_text.h"

namespace narrowfloat {
namespace {

struct Amx {
  // The operand of ldtilecfg.
  struct Configuration {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Configuration) == 64);

  static void configure(const amx_kernels::TileShape& shape) {
    alignas(64) Configuration configuration;
    const auto set = [&](int tile, int64_t rows, int64_t row_bytes) {
      if (rows == 0) return;
      configuration.rows[tile] = static_cast<uint8_t>(rows);
      configuration.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
    };
    constexpr int64_t kLineBytes = 64;
    for (int i = 0; i < 2; ++i) {
      set(2 * i, shape.rows[i], kLineBytes);
      set(2 * i + 1, shape.rows[i], kLineBytes);
      set(4 + i, shape.rows[i], shape.step * 2);
      set(6 + i, shape.step / 2, kLineBytes);
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
  static void load(const uint16_t* from, int64_t stride) {
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

const AmxKernels kBf16KernelsAmx = {.multiply = amx_kernels::multiply<Amx>};

}  // namespace narrowfloat
