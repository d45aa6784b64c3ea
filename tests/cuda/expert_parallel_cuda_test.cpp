// Expert parallelism on a GPU, with all ranks on one: what is received, and what comes back, has
// the bytes of the ranks on the CPU, for every payload, order, routing and type; also in graphs,
// and after a rank did not come.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "cuda/gpu_test.h"
#include "formats/float16.h"
#include "narrowfloat/expert_parallel.h"
#include "runtime/cuda/device_memory.h"
#include "support/device_buffer.h"
#include "support/expect_error.h"
#include "support/gpu_moe.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

class ExpertParallelCuda : public OwnCodeTest {};

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

ExpertParallelConfig config_of(const GroupSetup& setup) {
  return {.hidden = setup.hidden,
          .experts = setup.experts,
          .top_k = setup.top_k,
          .max_tokens = setup.max_tokens,
          .places = setup.places,
          .payload = setup.payload,
          .order = setup.order,
          .result_dtype = setup.result_dtype};
}

int64_t bytes_of(const TensorView& view) { return view.num_elements() * bits(view.dtype) / 8; }

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

std::vector<uint8_t> bytes_on_gpu(const TensorView& view) {
  std::vector<uint8_t> bytes(static_cast<size_t>(bytes_of(view)));
  synchronize_device();
  copy_to_host(bytes.data(), view.data, static_cast<int64_t>(bytes.size()), gpu(), {});
  return bytes;
}

// The ranks of the CPU and of the GPU, and their calls.
class Groups {
 public:
  explicit Groups(GroupSetup setup)
      : setup_(std::move(setup)),
        cpu_(ExpertParallel::create_local(setup_.ranks, config_of(setup_))),
        gpu_(ExpertParallel::create_local(setup_.ranks, config_of(setup_), milliseconds(20'000),
                                          gpu())) {}

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

constexpr std::array kPatterns{Ids::kUniform, Ids::kZipf, Ids::kOneRank, Ids::kWithInvalid};
constexpr std::array kPayloads{RowFormat::kBf16, RowFormat::kFp8Group, RowFormat::kMxfp8,
                               RowFormat::kNvfp4PerToken};

TEST_F(ExpertParallelCuda, GivesTheBytesOfTheCpu) {
  for (const RowFormat payload : kPayloads) {
    for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
      Groups groups({.tokens = {17, 0, 40}, .payload = payload, .order = order});
      uint64_t seed = 1;
      for (const Ids pattern : kPatterns) {
        SCOPED_TRACE(
            fmt::format("{} {}, ids {}", name(payload), name(order), static_cast<int>(pattern)));
        groups.expect_same_bytes(pattern, ++seed);
        // The next call has other numbers of tokens.
        std::vector<int64_t>& tokens = groups.setup().tokens;
        std::rotate(tokens.begin(), tokens.begin() + 1, tokens.end());
      }
    }
  }
}

TEST_F(ExpertParallelCuda, TakesAnyNumberOfRanksAndTokens) {
  for (const int ranks : {1, 2, 8}) {
    std::vector<int64_t> tokens(static_cast<size_t>(ranks), 1);
    tokens.back() = 1500;
    for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
      Groups groups({.ranks = ranks,
                     .tokens = tokens,
                     .hidden = 16,
                     .experts = 16,
                     .top_k = 8,
                     .max_tokens = 1500,
                     .payload = RowFormat::kNvfp4PerToken,
                     .order = order});
      SCOPED_TRACE(ranks);
      groups.expect_same_bytes(Ids::kUniform, 3, true);
      std::fill(groups.setup().tokens.begin(), groups.setup().tokens.end(), 0);
      groups.expect_same_bytes(Ids::kUniform, 4, true);
    }
  }
}

TEST_F(ExpertParallelCuda, TakesAnyTypeOfResultsAndOutput) {
  for (const DType results : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType out : {DType::kBF16, DType::kF16, DType::kF32}) {
      SCOPED_TRACE(fmt::format("{} {}", name(results), name(out)));
      GroupSetup setup{.ranks = 2,
                       .tokens = {4, 7},
                       .hidden = 264,
                       .max_tokens = 8,
                       .result_dtype = results,
                       .out_dtype = out,
                       .out_cols = 256};
      Groups(setup).expect_same_bytes(Ids::kUniform, 5);
      if (results == DType::kF16) continue;
      setup.order = CombineOrder::kTopK;
      Groups(setup).expect_same_bytes(Ids::kUniform, 6);
    }
  }
}

TEST_F(ExpertParallelCuda, SendsTokensToCopiesOfExperts) {
  std::vector<int32_t> places{0, 1, 2, 3, 4, 5, 6, 7, 0, 1};
  Groups({.ranks = 2, .tokens = {9, 8}, .experts = 8, .max_tokens = 9, .places = places})
      .expect_same_bytes(Ids::kWithInvalid, 7);
}

// Quantized rows travel as they are, whatever the strides of their scales.
TEST_F(ExpertParallelCuda, SendsQuantizedRowsOfTheCaller) {
  const GroupSetup setup{
      .ranks = 1, .tokens = {6}, .experts = 4, .max_tokens = 6, .payload = RowFormat::kFp8Group};
  auto group = ExpertParallel::create_local(1, config_of(setup), milliseconds(20'000), gpu());
  RankCall call(setup, 0, Ids::kUniform, 8);
  Mirrored codes(DType::kF8E4M3, {6, 256});
  Mirrored scales(DType::kF32, {6, 6});
  std::iota(codes.bytes().begin(), codes.bytes().end(), uint8_t{0});
  for (int i = 0; i < 36; ++i) scales.data<float>()[i] = static_cast<float>(i);
  codes.send();
  scales.send();
  CodedRows rows{.values = codes.on_gpu(), .scales = scales.on_gpu(), .row_scale = {}};
  rows.scales.shape[1] = 2;
  rows.scales.strides[1] = 3;
  const ReceivedTokens received =
      group[0].dispatch(rows, call.ids.on_gpu(), call.weights.on_gpu(), {});
  synchronize_device();
  EXPECT_EQ(bytes_on_gpu(received.rows.values), codes.bytes());
  const std::vector<uint8_t> bytes = bytes_on_gpu(received.rows.scales);
  std::array<float, 12> got{};
  std::memcpy(got.data(), bytes.data(), sizeof(got));
  EXPECT_EQ(got, (std::array<float, 12>{0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33}));
}

// The number of the call lives on the device.
TEST_F(ExpertParallelCuda, ReplaysOfAGraphGoOnWithTheCalls) {
  const GroupSetup setup{
      .ranks = 2, .tokens = {5, 8}, .max_tokens = 8, .order = CombineOrder::kTopK};
  auto group = ExpertParallel::create_local(2, config_of(setup), milliseconds(20'000), gpu());
  std::array<std::unique_ptr<RankCall>, 2> calls;
  for (int rank = 0; rank < 2; ++rank) {
    calls[static_cast<size_t>(rank)] = std::make_unique<RankCall>(setup, rank, Ids::kZipf, 9);
  }
  const CudaStream stream;
  std::array<ReceivedTokens, 2> received;
  const CapturedGraph graph(stream, [&] {
    for (size_t rank = 0; rank < 2; ++rank) {
      RankCall& call = *calls[rank];
      group[rank].start_dispatch({.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}},
                                 call.ids.on_gpu(), call.weights.on_gpu(), stream.get());
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      received[rank] = group[rank].finish_dispatch(stream.get());
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      // The result of a slot is the token's row.
      const TensorView results = group[rank].results();
      for (int64_t row = 0; row < group[rank].max_rows(); ++row) {
        for (int64_t slot = 0; slot < setup.top_k; ++slot) {
          const int64_t bytes = setup.hidden * 2;
          copy_on_device(static_cast<uint8_t*>(results.data) + (row * setup.top_k + slot) * bytes,
                         static_cast<const uint8_t*>(received[rank].rows.values.data) + row * bytes,
                         bytes, gpu(), stream.get());
        }
      }
      group[rank].start_combine(received[rank], stream.get());
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      group[rank].finish_combine(calls[rank]->out.on_gpu(), stream.get());
    }
  });
  for (uint64_t replay = 0; replay < 6; ++replay) {
    for (int rank = 0; rank < 2; ++rank) {
      RankCall& call = *calls[static_cast<size_t>(rank)];
      RankCall other(setup, rank, Ids::kUniform, 20 + replay);
      call.rows.bytes() = other.rows.bytes();
      call.ids.bytes() = other.ids.bytes();
      call.weights.bytes() = other.weights.bytes();
      for (const Mirrored* part : {&call.rows, &call.ids, &call.weights}) part->send();
    }
    graph.replay(2);
    for (size_t rank = 0; rank < 2; ++rank) {
      group[rank].check_error();
      RankCall& call = *calls[rank];
      for (int64_t i = 0; i < call.tokens * setup.hidden; ++i) {
        const float x = bf16_to_float(call.rows.data<uint16_t>()[i]);
        float sum = 0.0F;
        for (int64_t slot = 0; slot < setup.top_k; ++slot) {
          sum = std::fma(call.weights.data<float>()[i / setup.hidden * setup.top_k + slot], x, sum);
        }
        call.out.data<uint16_t>()[i] = float_to_bf16(sum);
      }
      EXPECT_EQ(call.out.from_gpu(), call.out.bytes()) << "replay " << replay;
    }
  }
}

TEST_F(ExpertParallelCuda, ARankThatDoesNotComeIsAnErrorOnAll) {
  const GroupSetup setup{.ranks = 2, .tokens = {5, 8}, .max_tokens = 8};
  auto group = ExpertParallel::create_local(2, config_of(setup), milliseconds(50), gpu());
  RankCall call(setup, 0, Ids::kUniform, 10);
  const ReceivedTokens received =
      group[0].dispatch({.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}},
                        call.ids.on_gpu(), call.weights.on_gpu(), {});
  synchronize_device();
  // No row of that rank was received.
  const std::vector<uint8_t> ids = bytes_on_gpu(received.ids);
  EXPECT_TRUE(std::all_of(ids.begin() + static_cast<std::ptrdiff_t>(ids.size() / 2), ids.end(),
                          [](uint8_t byte) { return byte == 0xFF; }));
  expect_error(ErrorKind::kDevice, {"call 1", "rank 0 of 2", "rank 1 sent no tokens", "50 ms"},
               [&] { group[0].check_error(); });
  expect_error(ErrorKind::kDevice, {"rank 1 sent no tokens"},
               [&] { group[0].combine(received, call.out.on_gpu(), {}); });
  // The other rank hears of it in its next call.
  RankCall late(setup, 1, Ids::kUniform, 11);
  group[1].dispatch({.values = late.rows.on_gpu(), .scales = {}, .row_scale = {}},
                    late.ids.on_gpu(), late.weights.on_gpu(), {});
  synchronize_device();
  expect_error(ErrorKind::kDevice, {"rank 1 of 2", "a rank gave up"},
               [&] { group[1].check_error(); });
}

TEST_F(ExpertParallelCuda, ARankThatGivesUpIsAnErrorOnAll) {
  const GroupSetup setup{.ranks = 2, .tokens = {5, 8}, .max_tokens = 8};
  auto group = ExpertParallel::create_local(2, config_of(setup), milliseconds(20'000), gpu());
  group[1].give_up();
  // At once, and not when the GPU comes to it.
  expect_error(ErrorKind::kDevice, {"gave up"}, [&] { group[1].check_error(); });
  RankCall call(setup, 0, Ids::kUniform, 12);
  group[0].dispatch({.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}},
                    call.ids.on_gpu(), call.weights.on_gpu(), {});
  synchronize_device();
  for (ExpertParallel& rank : group) {
    expect_error(ErrorKind::kDevice, {"a rank gave up"}, [&] { rank.check_error(); });
  }
}

TEST_F(ExpertParallelCuda, RefusesWhatItsKernelsDoNotTake) {
  GroupSetup setup{.ranks = 1, .tokens = {5}, .hidden = 100, .max_tokens = 8};
  expect_error(kInvalid, {"hidden", "multiple of 8", "100"}, [&] {
    ExpertParallel::create_local(1, config_of(setup), milliseconds(1'000), gpu());
  });
  setup.hidden = 256;
  auto group = ExpertParallel::create_local(1, config_of(setup), milliseconds(1'000), gpu());
  RankCall call(setup, 0, Ids::kUniform, 13);
  const CodedRows rows{.values = call.rows.on_gpu(), .scales = {}, .row_scale = {}};
  expect_error(kInvalid, {"ids", "cpu"},
               [&] { group[0].dispatch(rows, call.ids.on_host(), call.weights.on_gpu(), {}); });
  const ReceivedTokens received =
      group[0].dispatch(rows, call.ids.on_gpu(), call.weights.on_gpu(), {});
  TensorView out = call.out.on_gpu();
  out.data = static_cast<uint8_t*>(out.data) + 2;
  expect_error(kInvalid, {"out", "16 bytes"}, [&] { group[0].combine(received, out, {}); });
  group[0].combine(received, call.out.on_gpu(), {});
  synchronize_device();
}

// --- Layers --------------------------------------------------------------------------------------

struct LayerMode {
  MoeMode mode;
  RowFormat payload;
};

// With order topk the bytes of the layer on one rank.
void expect_bytes_of_the_layer(const LayerMode& layer_mode) {
  constexpr int kRanks = 2;
  constexpr int64_t kTokens = 6;  // Every rank has so many.
  const MoeShape shape{
      .tokens = kRanks * kTokens, .hidden = 128, .inter = 128, .experts = 4, .top_k = 2};
  MoeCase whole(layer_mode.mode, shape, {.kind = ActivationKind::kSwiglu}, 77);
  GroupSetup setup{.ranks = kRanks,
                   .tokens = {kTokens, kTokens},
                   .hidden = 128,
                   .experts = 4,
                   .top_k = 2,
                   .max_tokens = 8,
                   .payload = layer_mode.payload,
                   .order = CombineOrder::kTopK};
  std::array<std::unique_ptr<RankCall>, kRanks> calls;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (int rank = 0; rank < kRanks; ++rank) {
    auto& call = calls[static_cast<size_t>(rank)];
    call = std::make_unique<RankCall>(setup, rank, Ids::kUniform, 14);
    std::memcpy(call->rows.bytes().data(), whole.x().data() + rank * kTokens * 128,
                call->rows.bytes().size());
    call->rows.send();
    ids.insert(ids.end(), call->ids.data<int32_t>(), call->ids.data<int32_t>() + kTokens * 2);
    weights.insert(weights.end(), call->weights.data<float>(),
                   call->weights.data<float>() + kTokens * 2);
  }
  MoeConfig& config = whole.config();
  config.routing.options.negative_one_is_empty = true;
  config.slot_dtype = DType::kBF16;
  whole.routing() = {};
  whole.routing().ids = TensorView::contiguous(ids.data(), DType::kI32, {kRanks * kTokens, 2});
  whole.routing().weights =
      TensorView::contiguous(weights.data(), DType::kF32, {kRanks * kTokens, 2});
  const MoeResult expected = run_on_gpu(prepare_on_gpu(whole), whole);

  auto group = ExpertParallel::create_local(kRanks, config_of(setup), milliseconds(20'000), gpu());
  const CudaStream stream;
  std::array<ReceivedTokens, kRanks> received;
  std::vector<MoeLayer> layers;
  std::vector<DeviceBuffer> workspaces;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    const ExpertShard shard = group[rank].shard();
    MoeConfig own = config;
    own.expert_offset = shard.offset;
    own.local_experts = shard.count;
    layers.push_back(prepare_on_gpu(whole.shard(shard.offset, shard.count), own));
    workspaces.emplace_back(group[rank].required_workspace(layers[rank]));
    group[rank].start_dispatch(
        {.values = calls[rank]->rows.on_gpu(), .scales = {}, .row_scale = {}},
        calls[rank]->ids.on_gpu(), calls[rank]->weights.on_gpu(), stream.get());
  }
  for (size_t rank = 0; rank < kRanks; ++rank) {
    received[rank] = group[rank].finish_dispatch(stream.get());
    group[rank].run_experts(layers[rank], received[rank],
                            TensorView::contiguous(workspaces[rank].data(), DType::kU8,
                                                   {workspaces[rank].size()}, gpu()),
                            stream.get());
    group[rank].start_combine(received[rank], stream.get());
  }
  for (size_t rank = 0; rank < kRanks; ++rank) {
    group[rank].finish_combine(calls[rank]->out.on_gpu(), stream.get());
  }
  stream.synchronize();
  std::vector<uint8_t> actual;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    group[rank].check_error();
    const std::vector<uint8_t> out = calls[rank]->out.from_gpu();
    actual.insert(actual.end(), out.begin(), out.end());
  }
  EXPECT_EQ(actual, expected.out);
}

TEST_F(ExpertParallelCuda, GivesTheBytesOfTheLayer) {
  for (const LayerMode& mode : {LayerMode{MoeMode::kBf16, RowFormat::kBf16},
                                LayerMode{MoeMode::kFp8Block, RowFormat::kBf16},
                                LayerMode{MoeMode::kFp8Block, RowFormat::kFp8Group},
                                LayerMode{MoeMode::kMxfp4Mxfp8, RowFormat::kMxfp8},
                                LayerMode{MoeMode::kNvfp4PerToken, RowFormat::kNvfp4PerToken}}) {
    SCOPED_TRACE(fmt::format("{} {}", name(mode.mode), name(mode.payload)));
    expect_bytes_of_the_layer(mode);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
