// The Row of the all-reduce protocols on a GPU: where a rank's addends come from, and the epilogue
// of a token (docs/allreduce.md, Exactness).
//
//   accept()   lane = leaf of 8 columns: residual, the row x to shared memory, squares along the
//              tree of formats/rms_norm.h: a warp's chunk by shuffles, the chunks of all CTAs of
//              the cluster in shared memory
//   finish()   lane = run of 16 columns, a block of NVFP4: 1 / rms, norm, the maximum of the row
//              where the format has a scale for it, codes
//
// The row, sums and maxima of two tokens alternate between two places: a CTA, or a thread, may be
// one token ahead.
#pragma once

#include "comm/fp8_scales.h"
#include "comm/launch_shape.h"
#include "comm/scale_padding.h"
#include "device/encode_block.cuh"
#include "device/group_scale.cuh"
#include "device/norm_tree.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/prefetch.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/ring.cuh"
#include "device/scale_row.cuh"
#include "formats/rms_norm.h"
#include "ops/allreduce/sm90/device_cta.cuh"
#include "ops/allreduce/sm90/leaf_elements.cuh"
#include "tensor/row_encoder.h"

namespace narrowfloat {

// Dynamic shared memory of a CTA: sums and maxima of two tokens, a barrier for each of them, then
// the leaves of its part of the norm's weight and of two rows (row_memory_bytes()). The offsets are
// the same in all CTAs of a cluster.
struct RowMemory {
  static constexpr int kSumBytes = kMostClusterChunks * 4;
  static constexpr int kMaximaBytes = kMostClusterWarps * 4;
  static constexpr int kTokenBytes = kSumBytes + kMaximaBytes;
  static constexpr int kBarriers = 2 * kTokenBytes;
  static constexpr int kLeaves = kBarriers + 4 * 8;
  static constexpr int64_t kMostBytes = int64_t{226} * 1024;
};
static_assert(RowMemory::kLeaves == kRowSumBytes);

// Elements of a thread in finish(): two leaves.
inline constexpr int kEpilogueRun = 16;

// A run of norms, and how much of it the row has.
template <class Registers>
struct NormRun {
  Registers elements;  // Zeros where the row has none.
  int64_t col;
  int leaves;  // 0, 1 or 2.
};

// The maximum over groups of `lanes` adjacent lanes, a power of two known at run time.
__device__ inline float group_maximum(float value, int lanes) {
  for (int distance = 1; distance < lanes; distance *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

template <class Elements>
class DeviceRow {
 public:
  using LeafType = typename Elements::LeafType;
  using Registers = typename Elements::template Registers<kEpilogueRun>;
  using Run = NormRun<Registers>;

  __device__ DeviceRow(const RankArgs& args, DeviceCta& cta, uint8_t* shared)
      : args_(args), epilogue_(args.epilogue), cta_(cta), shared_(shared) {
    leaves_ = epilogue_.hidden / kLeafElements;
  }

  // All threads call it before the CTAs of the cluster wait for each other.
  __device__ void init_barriers() const {
    if (cta_.is_leader()) {
      for (uint32_t i = 0; i < 4; ++i) {
        init_barrier(shared_address(shared_ + RowMemory::kBarriers) + 8 * i, 1);
      }
      fence_barrier_init();
    }
    __syncwarp();
  }

  // Starts to copy the weight of the norm to shared memory. Nothing but constants may be read
  // before the wait for previous grids.
  __device__ void load_constants() const {
    if (!epilogue_.has_norm) return;
    cta_.for_each_leaf(leaves_, [&](int64_t leaf, bool is_inside) {
      if (!is_inside) return;
      const auto* const from = static_cast<const LeafType*>(epilogue_.gamma) + leaf;
      const uint32_t to = shared_address(weights() + place());
      NF_UNROLL
      for (int i = 0; i < LeafType::kWords; i += 4) copy_16(to + 4 * i, from->words + i);
    });
  }

  // Brings the residual of the first token near, while its addends are exchanged.
  __device__ void prefetch_first_token() const {
    const int64_t token = cta_.cluster();
    if (!epilogue_.has_norm || token >= epilogue_.tokens) return;
    cta_.for_each_leaf(leaves_, [&](int64_t leaf, bool is_inside) {
      if (!is_inside) return;
      prefetch_to_l2(static_cast<const LeafType*>(epilogue_.residual_in) + token * leaves_ + leaf);
    });
  }

  [[nodiscard]] __device__ bool stores_local_value() const {
    return args_.source.kind != AllReduceSource::kInput;
  }
  [[nodiscard]] __device__ LeafType local_value(int64_t token, int64_t leaf) const {
    const SourceArgs& source = args_.source;
    if (source.kind == AllReduceSource::kInput) {
      return Elements::load(source.input, token * leaves_ + leaf);
    }
    if constexpr (Elements::kBytes == 2) {
      if (source.kind == AllReduceSource::kMoeReduction) {
        return moe_reduction_value<Elements>(source.reduction, args_.accumulation, epilogue_.tokens,
                                             token, leaves_, leaf);
      }
      return moe_finalize_value<Elements>(
          source.finalize, args_.accumulation, token, leaves_, leaf, [&](int32_t row) {
            const WaitFor what{AllReduceFault::kBadIndex, static_cast<uint32_t>(token), 0};
            report_fault(cta_, args_.memory, what, static_cast<uint32_t>(row));
          });
    }
    return {};
  }

  // Zeroes the scales of the rows that pad the last tile; all CTAs of the rank share the work.
  __device__ void clear_padding() const {
    const ScalePadRows pads = scale_pad_rows(epilogue_);
    const auto rows = static_cast<uint32_t>(pads.rows);
    auto* const words = static_cast<uint32_t*>(epilogue_.scale_out);
    if (epilogue_.scale_layout == ScaleLayoutId::kSwizzled128x4 && rows > 0) {
      return clear_last_tiles(words, 128U - rows, static_cast<uint32_t>(pads.words_per_row));
    }
    cta_.for_each_cell(pads.rows * pads.words_per_row, [&](int64_t i) {
      const auto index = static_cast<uint32_t>(i);
      const int64_t row = epilogue_.tokens + index % rows;
      const int64_t offset = scale_word_offset(epilogue_, row, index / rows);
      if (offset < epilogue_.scale_words) words[offset] = 0;
    });
  }

  // Issues the loads that do not depend on the peers.
  __device__ void prepare(int64_t token, int64_t leaf, bool is_inside) {
    if (epilogue_.has_norm && is_inside) {
      residual_ = Elements::load(epilogue_.residual_in, token * leaves_ + leaf);
    }
  }

  __device__ void accept(int64_t token, int64_t leaf, bool is_inside, const LeafType& sum) {
    const int64_t index = token * leaves_ + leaf;
    if (is_inside && epilogue_.ar_out != nullptr) store_leaf(epilogue_.ar_out, index, sum);
    if (!epilogue_.has_norm) return;
    float squares = 0.0F;
    if (is_inside) {
      float x[kLeafElements];
      float residual[kLeafElements];
      Elements::widen(sum, x);
      Elements::widen(residual_, residual);
      NF_UNROLL
      for (int i = 0; i < kLeafElements; ++i) x[i] = add_rn(x[i], residual[i]);
      const LeafType rounded = Elements::narrow(x);
      if (epilogue_.residual_out != nullptr) store_leaf(epilogue_.residual_out, index, rounded);
      store_leaf(row(), place(), rounded);
      Elements::widen(rounded, x);
      NF_UNROLL
      for (int i = 0; i < kLeafElements; ++i) squares = fma_rn(x[i], x[i], squares);
    }
    squares = warp_tree_sum(squares);
    const auto chunk = static_cast<uint32_t>(leaf / kWarpSize);
    give_to_cluster(kSums, chunk, float_bits(squares));
  }

  __device__ void finish(int64_t token) {
    if (!epilogue_.has_norm) return;
    wait_for_async_copies();
    // The leaves of this CTA.
    __syncthreads();
    wait_for_cluster_words(kSums, warps_of_cluster() * static_cast<uint32_t>(cta_.num_steps()));
    const float* const sums = reinterpret_cast<const float*>(shared_ + word_offset(kSums, 0));
    const float total = tree_of_sums(sums, static_cast<int>(num_chunks()));
    reciprocal_rms_ = reciprocal_rms_of_sum(total, epilogue_.hidden, epilogue_.eps);
    quantize(token);
    ++finished_;
  }

 private:
  // --- Places in shared memory ----------------------------------------------------------------

  // Words of a token that the CTAs of a cluster send each other.
  enum Words : uint32_t {
    kSums = 0,    // Each chunk has one, of squares.
    kMaxima = 1,  // Each warp has one.
  };

  [[nodiscard]] __device__ uint32_t parity() const { return finished_ % 2; }
  [[nodiscard]] __device__ uint32_t num_chunks() const {
    return static_cast<uint32_t>((leaves_ + kWarpSize - 1) / kWarpSize);
  }
  [[nodiscard]] __device__ uint32_t warps_of_cluster() const {
    return static_cast<uint32_t>(cta_.num_threads() / kWarpSize * cta_.cluster_ctas());
  }
  [[nodiscard]] __device__ uint32_t word_offset(Words kind, uint32_t index) const {
    return parity() * RowMemory::kTokenBytes + kind * RowMemory::kSumBytes + 4 * index;
  }
  [[nodiscard]] __device__ uint32_t barrier_of(Words kind) const {
    return shared_address(shared_ + RowMemory::kBarriers) + 8 * (2 * parity() + kind);
  }
  // Leaves of a CTA: those of its threads in a step, step after step.
  [[nodiscard]] __device__ int leaves_of_cta() const {
    return cta_.num_steps() * cta_.num_threads();
  }
  [[nodiscard]] __device__ LeafType* weights() const {
    return reinterpret_cast<LeafType*>(shared_ + RowMemory::kLeaves);
  }
  [[nodiscard]] __device__ LeafType* row() const {
    return weights() + (1 + static_cast<int>(parity())) * leaves_of_cta();
  }
  // The place of this thread's leaf in the present step.
  [[nodiscard]] __device__ int place() const {
    return cta_.step() * cta_.num_threads() + cta_.thread();
  }

  // A warp stores a word at the same place in every CTA of the cluster. Every warp gives all words
  // of a token, also of leaves beyond the row: a CTA that has those of a token knows that nobody
  // reads those of the token before the last any more.
  __device__ void give_to_cluster(Words kind, uint32_t index, uint32_t value) const {
    const auto ctas = static_cast<uint32_t>(cta_.cluster_ctas());
    const uint32_t lane = static_cast<uint32_t>(cta_.thread()) % kWarpSize;
    uint8_t* const word = shared_ + word_offset(kind, index);
    if (ctas == 1) {
      if (lane == 0) *reinterpret_cast<uint32_t*>(word) = value;
    } else if (lane < ctas) {
      send_to_block(shared_address(word), lane, value, barrier_of(kind));
    }
  }
  // Waits for `count` words of the present token. Stores to global memory go on, which a barrier of
  // the cluster would wait for. In a cluster of one CTA the caller waits for its threads.
  __device__ void wait_for_cluster_words(Words kind, uint32_t count) const {
    if (cta_.cluster_ctas() == 1) return;
    if (cta_.is_leader()) arrive_and_expect(barrier_of(kind), 4 * count);
    // Each barrier serves every other token.
    wait_for_phase(barrier_of(kind), finished_ / 2 % 2);
  }

  // --- Norm and codes -------------------------------------------------------------------------

  // Calls function(run) for this thread's runs, in steps that all lanes of a warp take together.
  // Adjacent lanes hold adjacent runs, and blocks of up to 256 columns lie within a warp.
  template <class Function>
  __device__ void for_each_run(Function&& function) const {
    const int threads = cta_.num_threads();
    const int runs = leaves_of_cta() / 2;
    const int lane = cta_.thread() % kWarpSize;
    // The runs of all threads are two steps' leaves.
    const bool is_second = 2 * cta_.thread() >= threads;
    int step = is_second ? 1 : 0;
    const int leaf_of_step = 2 * cta_.thread() - (is_second ? threads : 0);
#pragma unroll 1
    for (int first = cta_.thread() - lane; first < runs; first += threads, step += 2) {
      const int place = 2 * (first + lane);
      const int leaf = cta_.first_leaf(step) + leaf_of_step;
      const auto left = static_cast<int>(leaves_) - leaf;
      const int inside = first + lane >= runs || left <= 0 ? 0 : left == 1 ? 1 : 2;
      Run run{.elements = {}, .col = int64_t{leaf} * kLeafElements, .leaves = inside};
      NF_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (i >= inside) continue;
        const LeafType norm = norm_of(place + i);
        NF_UNROLL
        for (int word = 0; word < LeafType::kWords; ++word) {
          run.elements.words[i * LeafType::kWords + word] = norm.words[word];
        }
      }
      function(run);
    }
  }

  [[nodiscard]] __device__ LeafType norm_of(int place) const {
    float x[kLeafElements];
    float gamma[kLeafElements];
    Elements::widen(row()[place], x);
    Elements::widen(weights()[place], gamma);
    NF_UNROLL
    for (int i = 0; i < kLeafElements; ++i) {
      const float weight = add_rn(epilogue_.weight_bias, gamma[i]);
      x[i] = mul_rn(mul_rn(x[i], reciprocal_rms_), weight);
    }
    return Elements::narrow(x);
  }

  // The largest magnitude of the row that is a number.
  __device__ float row_maximum() {
    uint32_t largest = 0;
    for_each_run([&](const Run& run) {
      const uint32_t number = run.elements.max_number();
      largest = max(largest, number > kInfinityBits ? 0U : number);
    });
    largest = __reduce_max_sync(kFullWarp, largest);
    const auto warps = static_cast<uint32_t>(cta_.num_threads() / kWarpSize);
    const uint32_t warp = static_cast<uint32_t>(cta_.thread()) / kWarpSize;
    const auto rank = static_cast<uint32_t>(cta_.rank_in_cluster());
    give_to_cluster(kMaxima, rank * warps + warp, largest);
    const uint32_t count = warps_of_cluster();
    if (cta_.cluster_ctas() == 1) __syncthreads();
    wait_for_cluster_words(kMaxima, count);
    const auto* const maxima = reinterpret_cast<const uint32_t*>(shared_ + word_offset(kMaxima, 0));
    largest = 0;
    for (uint32_t i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
      largest = max(largest, maxima[i]);
    }
    return bits_float(__reduce_max_sync(kFullWarp, largest));
  }

  __device__ void store_norm(int64_t token, const Run& run) const {
    if (epilogue_.norm_out == nullptr) return;
    auto* const to = static_cast<uint4*>(epilogue_.norm_out) +
                     (token * epilogue_.hidden + run.col) * Elements::kBytes / 16;
    const uint32_t* const words = run.elements.words;
    NF_UNROLL
    for (int i = 0; i < Registers::kWords / 4; ++i) {
      if (i / (LeafType::kWords / 4) >= run.leaves) continue;
      to[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    }
  }

  __device__ void quantize(int64_t token) {
    switch (epilogue_.quantization) {
      case AllReduceQuantization::kNone:
        if (epilogue_.norm_out == nullptr) return;
        return for_each_run([&](const Run& run) { store_norm(token, run); });
      case AllReduceQuantization::kFp8Tensor: {
        const float factor = Fp8Tensor::given_scale(*epilogue_.global_scale).multiplier;
        return for_each_run([&](const Run& run) {
          store_norm(token, run);
          store_e4m3(token, run, [&](float x) { return mul_rn(x, factor); });
        });
      }
      case AllReduceQuantization::kFp8Token:
        return quantize_fp8_token(token);
      case AllReduceQuantization::kFp8GroupUe8m0:
        return quantize_fp8_group(token);
      case AllReduceQuantization::kFp8Block1x128:
        return quantize_blocks<Fp8Block1x128>(token, ScalePair{});
      case AllReduceQuantization::kNvfp4: {
        const auto pair = Nvfp4::scale_pair<DeviceExactMath>(*epilogue_.global_scale);
        return quantize_blocks<Nvfp4>(token, pair);
      }
      case AllReduceQuantization::kNvfp4PerToken: {
        const auto scale =
            Nvfp4PerToken::row_scale<DeviceExactMath>(row_maximum(), kTokenBaseDecodeScale);
        if (is_first_thread_of_cluster()) {
          epilogue_.row_scale_out[token] = canonical_nan(scale.stored);
        }
        // With the factors of its row a block is one of NVFP4.
        return quantize_blocks<Nvfp4>(token, scale.pair);
      }
      case AllReduceQuantization::kMxfp8:
        return quantize_blocks<Mxfp8>(token, ScalePair{});
      case AllReduceQuantization::kMxfp4:
        return quantize_blocks<Mxfp4>(token, ScalePair{});
    }
  }

  [[nodiscard]] __device__ bool is_first_thread_of_cluster() const {
    return threadIdx.x == 0 && cta_.rank_in_cluster() == 0;
  }

  template <class Scaled>
  __device__ void store_e4m3(int64_t token, const Run& run, Scaled&& scaled) const {
    Codes<E4M3, kEpilogueRun> codes;
    const Registers& x = run.elements;
    NF_UNROLL
    for (int i = 0; i < codes.kWords; ++i) {
      codes.words[i] = to_e4m3x2(scaled(x[4 * i]), scaled(x[4 * i + 1])) |
                       static_cast<uint32_t>(to_e4m3x2(scaled(x[4 * i + 2]), scaled(x[4 * i + 3])))
                           << 16;
    }
    store_run(codes, epilogue_.quant_out + token * epilogue_.hidden + run.col, run.leaves);
  }

  // Stores the codes of the leaves that the row has. Rows of an odd number of leaves, which only
  // 8-bit codes have, start at multiples of 8 bytes.
  template <class CodesType>
  __device__ void store_run(const CodesType& codes, uint8_t* address, int leaves) const {
    if constexpr (CodesType::kWords == 2) {
      if (leaves > 0) store_codes(codes, address);
    } else if (leaves_ % 2 == 0) {
      if (leaves > 0) store_codes(codes, address);
    } else {
      if (leaves > 0) store(address, uint2{codes.words[0], codes.words[1]});
      if (leaves > 1) store(address + 8, uint2{codes.words[2], codes.words[3]});
    }
  }

  __device__ void quantize_fp8_token(int64_t token) {
    const float scale = fp8_token_scale(row_maximum());
    if (is_first_thread_of_cluster()) epilogue_.row_scale_out[token] = scale;
    // One correction makes the product with the rounded reciprocal the rounded quotient, unless all
    // bits of the significand are ones (Markstein 1990) or something is out of range: quotients
    // below 2^-10 are zeros of E4M3 whatever their last bits are. The correction loses the sign of
    // zeros.
    const float reciprocal = div_rn(1.0F, scale);
    const bool is_right = (float_bits(scale) & 0x7FFFFFU) != 0x7FFFFFU && scale <= 0x1p100F;
    for_each_run([&](const Run& run) {
      store_norm(token, run);
      store_e4m3(token, run, [&](float x) {
        return is_right ? copysignf(divide_by_known(x, scale, reciprocal), x) : div_rn(x, scale);
      });
    });
  }

  // Groups of 16 columns and more: a lane's run belongs to one.
  __device__ void quantize_fp8_group(int64_t token) {
    const int lanes = epilogue_.group / kEpilogueRun;
    for_each_run([&](const Run& run) {
      const uint32_t number = run.elements.max_number();
      const float amax = group_maximum(bits_float(number > kInfinityBits ? 0U : number), lanes);
      const uint8_t exponent = fp8_group_exponent(amax);
      const float factor = UE8M0::reciprocal(exponent);
      store_norm(token, run);
      store_e4m3(token, run, [&](float x) { return mul_rn(x, factor); });
      const auto col = static_cast<int>(run.col);
      if (run.leaves > 0 && col % epilogue_.group == 0) {
        store_group_exponent(token, col / epilogue_.group, exponent);
      }
    });
  }

  // Byte p of word (token, c) is the exponent of group 4c + p; the bytes after the last group are
  // zero.
  __device__ void store_group_exponent(int64_t token, int group, uint8_t exponent) const {
    const int64_t offset = scale_word_offset(epilogue_, token, group / 4);
    uint8_t* const word = static_cast<uint8_t*>(epilogue_.scale_out) + 4 * offset;
    word[group % 4] = exponent;
    if (group + 1 != epilogue_.scale_extents.blocks) return;
    for (int pad = group % 4 + 1; pad < 4; ++pad) word[pad] = 0;
  }

  template <BlockFormat Format>
  __device__ EncodedBlock<Format, Registers> encode(const Registers& norm,
                                                    const ScalePair& pair) const {
    if constexpr (Format::kId == FormatId::kFp8Block1x128) {
      constexpr int kLanes = static_cast<int>(Format::kBlockCols) / kEpilogueRun;
      const float amax = block_amax<Format, kLanes>(norm, kFullWarp);
      const QuickGroupScale quick = quick_group_scale(amax);
      const auto scale =
          quick.is_right ? quick.scale : group_scale(amax, epilogue_.rules.input_max);
      return {general_codes<Format, DeviceExactMath>(norm, scale.multiplier), scale.stored};
    } else {
      return encode_block<Format, DeviceExactMath>(norm, pair, epilogue_.rules);
    }
  }

  template <BlockFormat Format>
  __device__ void quantize_blocks(int64_t token, const ScalePair& pair) const {
    using Stored = typename Format::Stored;
    constexpr int kBlock = static_cast<int>(Format::kBlockCols);
    const auto scales = scale_row_of(static_cast<Stored*>(epilogue_.scale_out),
                                     epilogue_.scale_layout, epilogue_.scale_extents, token);
    const auto num_blocks = static_cast<uint32_t>(epilogue_.scale_extents.blocks);
    uint8_t* const codes =
        epilogue_.quant_out + token * (epilogue_.hidden * Format::Element::kBits / 8);
    for_each_run([&](const Run& run) {
      const auto block = encode<Format>(run.elements, pair);
      store_norm(token, run);
      store_run(block.codes, codes + run.col * Format::Element::kBits / 8, run.leaves);
      const auto col = static_cast<uint32_t>(run.col);
      if (run.leaves == 0 || col % kBlock != 0) return;
      store_scale(scales, num_blocks, col / kBlock, block.stored);
    });
  }

  // The pad rows of the last tiles of swizzled_128x4, from row `first` on. 16 bytes of a tile are
  // the words of rows r, r + 32, r + 64 and r + 96.
  __device__ void clear_last_tiles(uint32_t* words, uint32_t first, uint32_t tiles) const {
    constexpr uint32_t kTileCells = 32;
    const int64_t tile_row = (epilogue_.tokens - 1) / 128 * tiles * (kTileCells * 4);
    cta_.for_each_cell(int64_t{tiles} * kTileCells, [&](int64_t i) {
      uint32_t* const cell = words + tile_row + 4 * i;
      const uint32_t r = static_cast<uint32_t>(i) % kTileCells;
      if (r >= first) {
        store(cell, uint4{});
        return;
      }
      NF_UNROLL
      for (uint32_t part = 1; part < 4; ++part) {
        if (r + part * kTileCells >= first) cell[part] = 0;
      }
    });
  }

  const RankArgs& args_;
  const EpilogueArgs& epilogue_;
  DeviceCta& cta_;
  uint8_t* shared_;
  int64_t leaves_;
  LeafType residual_{};
  float reciprocal_rms_ = 0.0F;
  uint32_t finished_ = 0;  // Tokens.
};

}  // namespace narrowfloat
