// The arithmetic and the addressing of KV caches that CPU and GPU share (spec 6.11, 8.8).
#pragma once

#include <cstdint>

#include "formats/nvfp4.h"
#include "tensor/indices.h"

namespace narrowfloat {

inline constexpr int64_t kKvBlock = 16;  // Columns that share a scale.

// The formulas that a block follows.
enum class KvRule : int { kQuantize = 0, kAppend = 1, kNvfp4 = 2 };

// A global factor in host or device memory, or a maximum there that it is computed from.
struct KvFactor {
  float value = 1.0F;
  const float* device = nullptr;
  bool is_amax = false;  // The encode scale of 9.4 is then computed from it.

  [[nodiscard]] NF_HOST_DEVICE float get() const {
    if (device == nullptr) return value;
    if (!is_amax) return *device;
    constexpr float kLeast = 1e-12F;
    return div_rn(448.0F, *device < kLeast ? kLeast : *device);
  }
};

// amax: NaN if every element is NaN. factor: a decode scale; an encode scale for kNvfp4.
template <class Math>
NF_HOST_DEVICE BlockScale<uint8_t> kv_block_scale(KvRule rule, float amax, float factor) {
  if (rule == KvRule::kNvfp4) {
    return Nvfp4::block_scale<Math>(amax, Nvfp4::scale_pair<Math>(factor), BlockRules{});
  }
  const bool appends = rule == KvRule::kAppend;
  const float a = appends && is_nan(amax) ? 0.0F : amax;
  if constexpr (Math::kMode == MathMode::kExact) {
    const uint8_t stored = Math::template encode<E4M3>(div_rn(a, mul_rn(6.0F, factor)));
    const float scale = Math::template decode<E4M3>(stored);
    if (scale == 0.0F) return {stored, 0.0F};
    return {stored, min_number(div_rn(1.0F, mul_rn(scale, factor)), kFloatMax)};
  } else {
    const bool is_zero = Math::flush(a) == 0.0F;
    float unrounded = 0.0F;
    if (!appends) {
      unrounded = Math::mul(Math::rcp(factor), Math::mul(a, kOneSixth));
    } else if (!is_zero && Math::flush(factor) != 0.0F) {
      unrounded = Math::mul(a, Math::rcp(Math::mul(6.0F, factor)));
    }
    const uint8_t stored = Math::template encode<E4M3>(unrounded);
    const float scale = Math::template decode<E4M3>(stored);
    if (is_zero || (appends && scale == 0.0F)) return {stored, 0.0F};
    return {stored, Math::rcp(Math::mul(scale, factor))};
  }
}

template <class Math>
NF_HOST_DEVICE uint8_t kv_code(KvRule rule, float x, float multiplier) {
  if (rule == KvRule::kAppend && is_nan(x)) return 0;
  return Math::template encode<E2M1>(Math::mul(x, multiplier));
}

// Token and position that a scale of V moves to within its page and head. blocks: scales of a head.
struct KvScalePlace {
  int64_t token;
  int64_t position;
};
NF_HOST_DEVICE constexpr KvScalePlace reordered_v_scale(int64_t token, int64_t block,
                                                        int64_t blocks) {
  const int64_t quarter = blocks / 4;
  return {token / 4 * 4 + block / quarter, block % quarter * 4 + token % 4};
}

// A token's place in a paged cache; page -1: none.
struct KvEntry {
  int64_t page = -1;
  int64_t entry = 0;
};

// The tables that give rows their places.
struct KvTargets {
  bool has_slots = false;
  Indices slots;  // [num_slots]; if absent, the next four are used.
  Indices batch_indices;
  Indices positions;
  Indices indices;  // [num_indices]
  Indices indptr;   // [num_batches + 1]
  int64_t num_slots = 0;
  int64_t num_indices = 0;
  int64_t num_batches = 0;
  int64_t pages = 0;
  int64_t page_size = 0;

  [[nodiscard]] NF_HOST_DEVICE KvEntry find(int64_t row) const {
    return has_slots ? by_slot(row) : by_position(row);
  }

 private:
  [[nodiscard]] NF_HOST_DEVICE KvEntry by_slot(int64_t row) const {
    if (row >= num_slots) return {};
    const int64_t slot = slots[row];
    if (slot < 0 || slot / page_size >= pages) return {};
    return {slot / page_size, slot % page_size};
  }
  [[nodiscard]] NF_HOST_DEVICE KvEntry by_position(int64_t row) const {
    const int64_t batch = batch_indices[row];
    const int64_t position = positions[row];
    if (batch < 0 || batch >= num_batches || position < 0) return {};
    const int64_t begin = indptr[batch];
    const int64_t end = indptr[batch + 1];
    const int64_t nth = position / page_size;
    if (begin < 0 || end > num_indices || end < begin || nth >= end - begin) return {};
    const int64_t page = indices[begin + nth];
    if (page < 0 || page >= pages) return {};
    return {page, position % page_size};
  }
};

// The tables that place the tokens of a sequence in a paged cache.
struct KvTables {
  Indices block_tables;  // [batch, max_pages]
  Indices seq_lens;      // [batch]
  int64_t max_pages = 0;
  int64_t pages = 0;
  int64_t page_size = 0;

  [[nodiscard]] NF_HOST_DEVICE KvEntry find(int64_t batch, int64_t token) const {
    if (token >= seq_lens[batch] || token / page_size >= max_pages) return {};
    const int64_t page = block_tables[batch * max_pages + token / page_size];
    if (page < 0 || page >= pages) return {};
    return {page, token % page_size};
  }
};

}  // namespace narrowfloat
