// Calls of expert parallelism on the virtual ranks of one GPU, beside ranks of the CPU.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "narrowfloat/expert_parallel.h"
#include "runtime/cuda/device_memory.h"
#include "support/device_buffer.h"
#include "support/gpu.h"
#include "support/random.h"

namespace narrowfloat::testing {

enum class Ids { kUniform, kZipf, kOneRank, kWithInvalid };

struct GroupSetup {
  int ranks = 3;
  std::vector<int64_t> tokens;  // One number for each rank.
  int64_t hidden = 256;
  int32_t experts = 11;
  int32_t top_k = 3;
  int64_t max_tokens = 40;
  std::vector<int32_t> places;
  RowFormat payload = RowFormat::kBf16;
  CombineOrder order = CombineOrder::kRank;
  DType result_dtype = DType::kBF16;
  DType out_dtype = DType::kBF16;
  int64_t out_cols = 0;  // 0: all.
};

inline ExpertParallelConfig config_of(const GroupSetup& setup) {
  return {.hidden = setup.hidden,
          .experts = setup.experts,
          .top_k = setup.top_k,
          .max_tokens = setup.max_tokens,
          .places = setup.places,
          .payload = setup.payload,
          .order = setup.order,
          .result_dtype = setup.result_dtype};
}

inline int64_t bytes_of(const TensorView& view) {
  return view.num_elements() * bits(view.dtype) / 8;
}

// Host memory and its copy on the GPU, with views of both.
class Mirrored {
 public:
  Mirrored(DType dtype, const std::vector<int64_t>& shape) : dtype_(dtype), shape_(shape) {
    int64_t elements = 1;
    for (const int64_t extent : shape) elements *= extent;
    host_.resize(static_cast<size_t>(elements * bits(dtype) / 8));
    device_ = DeviceBuffer(static_cast<int64_t>(host_.size()));
  }
  template <typename T>
  [[nodiscard]] T* data() {
    return reinterpret_cast<T*>(host_.data());
  }
  [[nodiscard]] std::vector<uint8_t>& bytes() { return host_; }
  void send() const { device_.write(host_.data(), static_cast<int64_t>(host_.size())); }
  [[nodiscard]] TensorView on_host() { return view(host_.data(), {}); }
  [[nodiscard]] TensorView on_gpu() { return view(device_.data(), gpu()); }
  [[nodiscard]] std::vector<uint8_t> from_gpu() const {
    EXPECT_TRUE(device_.intact());
    return device_.copy();
  }

 private:
  [[nodiscard]] TensorView view(void* data, Device device) const {
    return shape_.size() == 1
               ? TensorView::contiguous(data, dtype_, {shape_[0]}, device)
               : TensorView::contiguous(data, dtype_, {shape_[0], shape_[1]}, device);
  }
  DType dtype_;
  std::vector<int64_t> shape_;
  std::vector<uint8_t> host_;
  DeviceBuffer device_;
};

// The arguments of one rank's call.
struct RankCall {
  RankCall(const GroupSetup& setup, int rank, Ids pattern, uint64_t seed)
      : tokens(setup.tokens[static_cast<size_t>(rank)]),
        rows(DType::kBF16, {tokens, setup.hidden}),
        ids(DType::kI32, {tokens, setup.top_k}),
        weights(DType::kF32, {tokens, setup.top_k}),
        out(setup.out_dtype, {tokens, setup.out_cols == 0 ? setup.hidden : setup.out_cols}) {
    Random random(seed * 100 + static_cast<uint64_t>(rank));
    for (size_t i = 0; i < rows.bytes().size() / 2; ++i) {
      rows.data<uint16_t>()[i] = float_to_bf16(random.normal());
    }
    const ExpertShard last = expert_shard(setup.experts, setup.ranks, setup.ranks - 1);
    for (int64_t i = 0; i < tokens * setup.top_k; ++i) {
      auto id = static_cast<int32_t>(random.range(0, setup.experts - 1));
      while (pattern == Ids::kZipf && id > 0 && random.chance(60)) id /= 2;
      if (pattern == Ids::kOneRank) id = last.offset + id % last.count;
      if (pattern == Ids::kWithInvalid && random.chance(40)) {
        id = random.pick({-1, setup.experts, setup.experts + 7, -5, 1 << 30});
      }
      ids.data<int32_t>()[i] = id;
      weights.data<float>()[i] = random.normal();
    }
    for (const Mirrored* part : {&rows, &ids, &weights}) part->send();
    std::fill(out.bytes().begin(), out.bytes().end(), 0xEE);
    out.send();
  }

  int64_t tokens;
  Mirrored rows;
  Mirrored ids;
  Mirrored weights;
  Mirrored out;
};

inline std::vector<uint8_t> bytes_on_gpu(const TensorView& view) {
  std::vector<uint8_t> bytes(static_cast<size_t>(bytes_of(view)));
  synchronize_device();
  copy_to_host(bytes.data(), view.data, static_cast<int64_t>(bytes.size()), gpu(), {});
  return bytes;
}

// The ranks of the CPU and of the GPU, and their calls.
class Groups {
 public:
  explicit Groups(const GroupSetup& setup)
      : Groups(setup, ExpertParallel::create_local(setup.ranks, config_of(setup),
                                                   std::chrono::milliseconds(20'000), gpu())) {}
  Groups(GroupSetup setup, std::vector<ExpertParallel> on_gpu)
      : setup_(std::move(setup)),
        cpu_(ExpertParallel::create_local(setup_.ranks, config_of(setup_))),
        gpu_(std::move(on_gpu)) {}

  // Runs a call of all ranks on both, with results that do not depend on the tokens.
  void expect_same_bytes(Ids pattern, uint64_t seed, bool programmatic_launch = false) {
    std::vector<std::unique_ptr<RankCall>> calls;
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      calls.push_back(std::make_unique<RankCall>(setup_, rank, pattern, seed));
    }
    const Stream stream = stream_.get(programmatic_launch);
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      RankCall& call = *calls[static_cast<size_t>(rank)];
      at(cpu_, rank)
          .start_dispatch({.values = call.rows.on_host(), .scales = {}, .row_scale = {}},
                          call.ids.on_host(), call.weights.on_host());
      at(gpu_, rank)
          .start_dispatch({.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}},
                          call.ids.on_gpu(), call.weights.on_gpu(), stream);
    }
    std::vector<ReceivedTokens> on_cpu;
    std::vector<ReceivedTokens> on_gpu;
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      on_cpu.push_back(at(cpu_, rank).finish_dispatch());
      on_gpu.push_back(at(gpu_, rank).finish_dispatch(stream));
    }
    stream_.synchronize();
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      expect_same_tokens(on_cpu[static_cast<size_t>(rank)], on_gpu[static_cast<size_t>(rank)]);
      store_results(rank, seed);
    }
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      at(cpu_, rank).start_combine(on_cpu[static_cast<size_t>(rank)]);
      at(gpu_, rank).start_combine(on_gpu[static_cast<size_t>(rank)], stream);
    }
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      RankCall& call = *calls[static_cast<size_t>(rank)];
      at(cpu_, rank).finish_combine(call.out.on_host());
      at(gpu_, rank).finish_combine(call.out.on_gpu(), stream);
    }
    stream_.synchronize();
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      at(gpu_, rank).check_error();
      RankCall& call = *calls[static_cast<size_t>(rank)];
      EXPECT_EQ(call.out.from_gpu(), call.out.bytes()) << "outputs of rank " << rank;
    }
  }

  [[nodiscard]] GroupSetup& setup() { return setup_; }
  [[nodiscard]] std::vector<ExpertParallel>& on_gpu() { return gpu_; }

 private:
  static ExpertParallel& at(std::vector<ExpertParallel>& group, int rank) {
    return group[static_cast<size_t>(rank)];
  }

  // Rows that nobody sent have any contents, but for their ids.
  void expect_same_tokens(const ReceivedTokens& cpu, const ReceivedTokens& on_gpu) const {
    EXPECT_EQ(bytes_on_gpu(on_gpu.counts), host_bytes(cpu.counts));
    EXPECT_EQ(bytes_on_gpu(on_gpu.ids), host_bytes(cpu.ids));
    const auto* const counts = static_cast<const int32_t*>(cpu.counts.data);
    for (const auto& [want, got] : {std::pair{cpu.rows.values, on_gpu.rows.values},
                                    std::pair{cpu.rows.scales, on_gpu.rows.scales},
                                    std::pair{cpu.rows.row_scale, on_gpu.rows.row_scale},
                                    std::pair{cpu.weights, on_gpu.weights}}) {
      ASSERT_EQ(want.is_absent(), got.is_absent());
      if (want.is_absent()) continue;
      const std::vector<uint8_t> expected = host_bytes(want);
      const std::vector<uint8_t> actual = bytes_on_gpu(got);
      const auto row = expected.size() / static_cast<size_t>(want.shape[0]);
      for (int source = 0; source < setup_.ranks; ++source) {
        const size_t first = static_cast<size_t>(source * setup_.max_tokens) * row;
        const size_t size = static_cast<size_t>(counts[source]) * row;
        ASSERT_EQ(std::memcmp(expected.data() + first, actual.data() + first, size), 0)
            << name(want.dtype) << " rows of rank " << source;
      }
    }
  }
  static std::vector<uint8_t> host_bytes(const TensorView& view) {
    const auto* const data = static_cast<const uint8_t*>(view.data);
    return {data, data + bytes_of(view)};
  }

  // Random numbers and a few infinities and NaN.
  void store_results(int rank, uint64_t seed) {
    const TensorView host = at(cpu_, rank).results();
    Random random(seed * 1000 + static_cast<uint64_t>(rank));
    const int64_t elements = host.num_elements();
    for (int64_t i = 0; i < elements; ++i) {
      const float value = random.chance(1) ? std::numeric_limits<float>::infinity() *
                                                 (random.chance(50) ? 1.0F : 0.0F)
                                           : random.normal();
      if (host.dtype == DType::kF32) {
        static_cast<float*>(host.data)[i] = value;
      } else {
        static_cast<uint16_t*>(host.data)[i] =
            host.dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
      }
    }
    copy_to_device(at(gpu_, rank).results().data, host.data, bytes_of(host), gpu(), {});
  }

  GroupSetup setup_;
  std::vector<ExpertParallel> cpu_;
  std::vector<ExpertParallel> gpu_;
  CudaStream stream_;
};

inline constexpr std::array kPatterns{Ids::kUniform, Ids::kZipf, Ids::kOneRank, Ids::kWithInvalid};
inline constexpr std::array kPayloads{RowFormat::kBf16, RowFormat::kFp8Group, RowFormat::kMxfp8,
                                      RowFormat::kNvfp4PerToken};

}  // namespace narrowfloat::testing
