// See allreduce_ranks.h. The memory of a group is one shared mapping: a line for the fault of each
// rank, its region, and a page of canaries.
#include "support/allreduce_ranks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>
#include <thread>

#include <fmt/format.h>

#include "base/int_math.h"
#include "comm/leaf.h"
#include "ops/allreduce/allreduce_checks.h"
#include "support/forked_ranks.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kRegionCanaryBytes = 4096;
constexpr uint8_t kRegionCanary = 0xA5;
constexpr int64_t kFaultBytes = 128;

}  // namespace

// ---- RankGroup

RankGroup::RankGroup(int ranks, const AllReduceCapacities& capacities, DType element,
                     std::chrono::milliseconds deadline)
    : ranks_(ranks),
      capacities_(capacities),
      layout_(peer_region(ranks, capacities)),
      deadline_ns_(static_cast<uint64_t>(std::chrono::nanoseconds(deadline).count())),
      stride_(round_up(kFaultBytes + layout_.size_bytes + kRegionCanaryBytes, kRegionCanaryBytes)),
      size_(stride_ * ranks) {
  layout_.chunk_leaves = kChunkUnit;
  void* const memory = mmap(nullptr, static_cast<size_t>(size_), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<uint8_t*>(memory);
  const uint32_t sentinel = bits(element) == 32 ? sentinel_word<4>() : sentinel_word<2>();
  for (int rank = 0; rank < ranks; ++rank) {
    auto* const first = reinterpret_cast<uint32_t*>(region(rank) + layout_.oneshot);
    auto* const sums = reinterpret_cast<uint32_t*>(region(rank) + layout_.result);
    std::fill(first, sums, sentinel);
    std::fill(sums, reinterpret_cast<uint32_t*>(region_end(rank)), kWordWithoutSums);
    std::memset(region_end(rank), kRegionCanary, kRegionCanaryBytes);
  }
}

RankGroup::~RankGroup() { munmap(base_, static_cast<size_t>(size_)); }

uint8_t* RankGroup::region(int rank) const { return base_ + stride_ * rank + kFaultBytes; }

uint8_t* RankGroup::region_end(int rank) const { return region(rank) + layout_.size_bytes; }

RankMemory RankGroup::memory(int rank) const {
  RankMemory memory{.rank = rank,
                    .ranks = ranks_,
                    .control = reinterpret_cast<LocalControl*>(region(rank) + layout_.control),
                    .fault = reinterpret_cast<AllReduceFault*>(base_ + stride_ * rank),
                    .layout = layout_,
                    .deadline_ns = deadline_ns_};
  for (int peer = 0; peer < ranks_; ++peer) memory.regions[peer] = region(peer);
  return memory;
}

AllReduceFault RankGroup::fault(int rank) const {
  AllReduceFault* const place = memory(rank).fault;
  AllReduceFault fault;
  fault.kind = std::atomic_ref(place->kind).load(std::memory_order_acquire);
  if (fault.kind == AllReduceFault::kNone) return fault;
  const uint32_t kind = fault.kind;
  fault = *place;
  fault.kind = kind;
  return fault;
}

bool RankGroup::intact() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    const uint8_t* const end = region_end(rank);
    if (!std::all_of(end, end + kRegionCanaryBytes,
                     [](uint8_t byte) { return byte == kRegionCanary; })) {
      return false;
    }
  }
  return true;
}

// ---- RankTensors

TensorView RankTensors::add(const void* data, size_t bytes, DType dtype,
                            std::initializer_list<int64_t> shape, int64_t misalignment) {
  BufferStyle style = style_;
  style.misalignment = misalignment;
  GuardedBuffer& buffer = buffers_.emplace_back(static_cast<int64_t>(bytes), style);
  if (data != nullptr && bytes > 0) std::memcpy(buffer.data(), data, bytes);
  return TensorView::contiguous(buffer.data(), dtype, shape);
}

TensorView RankTensors::add_output(size_t bytes, DType dtype, std::initializer_list<int64_t> shape,
                                   int64_t misalignment) {
  return add(nullptr, bytes, dtype, shape, misalignment);
}

void RankTensors::add_moe_inputs(const GoldenInputs& in, const GoldenRank& rank,
                                 int64_t misalignment) {
  const int64_t tokens = in.problem.tokens;
  const int64_t hidden = in.problem.hidden;
  const DType element = in.problem.element;
  AllReduceMoe& moe = args_.moe;
  if (in.problem.pattern == AllReducePattern::kMoeReduction) {
    moe.expert_rows = add(rank.expert_rows.data(), rank.expert_rows.size(), element,
                          {in.experts, tokens, hidden}, misalignment);
    moe.expert_scales = add(rank.expert_scales.data(), rank.expert_scales.size() * 4, DType::kF32,
                            {in.experts, tokens}, 0);
    moe.token_input = add(rank.token_input.data(), rank.token_input.size(), element,
                          {tokens, hidden}, misalignment);
    const auto active = static_cast<int32_t>(in.active_experts);
    if (in.active_experts != in.experts) {
      moe.num_experts = add(&active, sizeof(active), DType::kI32, {1}, 0);
    }
    return;
  }
  moe.permuted_rows = add(rank.permuted_rows.data(), rank.permuted_rows.size(), element,
                          {in.rows, hidden}, misalignment);
  moe.slot_to_row =
      add(rank.slot_to_row.data(), rank.slot_to_row.size() * 4, DType::kI32, {tokens, in.top_k}, 0);
  // Every other case has weights of the element type.
  if (!rank.slot_weights.empty() && in.top_k % 2 == 0) {
    moe.slot_weights = add(rank.slot_weights.data(), rank.slot_weights.size() * 4, DType::kF32,
                           {tokens, in.top_k}, 0);
  } else if (!rank.slot_weights.empty()) {
    std::vector<uint16_t> halves;
    for (const float weight : rank.slot_weights) {
      halves.push_back(static_cast<uint16_t>(element_bits(element, weight)));
    }
    moe.slot_weights = add(halves.data(), halves.size() * 2, element, {tokens, in.top_k}, 0);
  }
  if (!rank.shared_expert.empty()) {
    moe.shared_expert = add(rank.shared_expert.data(), rank.shared_expert.size(), element,
                            {tokens, hidden}, misalignment);
  }
  moe.routed_scaling = in.routed_scaling;
}

void RankTensors::add_quantized(const GoldenInputs& in) {
  const AllReduceProblem& problem = in.problem;
  const int64_t tokens = problem.tokens;
  const int64_t hidden = problem.hidden;
  const auto out = [&](int64_t count, int64_t bytes, DType dtype,
                       std::initializer_list<int64_t> shape) {
    return add_output(static_cast<size_t>(count * bytes), dtype, shape, 0);
  };
  const auto codes = [&](int64_t cols, DType dtype) {
    args_.quant_out = out(tokens * cols, 1, dtype, {tokens, cols});
  };
  const auto byte_scales = [&](int64_t block, DType dtype) {
    const int64_t bytes = golden_scale_bytes(problem.scale_layout, tokens, hidden / block);
    args_.scale_out = out(bytes, 1, dtype, {bytes});
  };
  const float scale = in.global_scale;
  switch (quantization_of(problem)) {
    case AllReduceQuantization::kNone:
      return;
    case AllReduceQuantization::kFp8Tensor:
      codes(hidden, DType::kF8E4M3);
      args_.global_scale = add(&scale, sizeof(scale), DType::kF32, {1}, 0);
      return;
    case AllReduceQuantization::kFp8Token:
      codes(hidden, DType::kU8);
      args_.scale_out = out(tokens, 4, DType::kF32, {tokens});
      return;
    case AllReduceQuantization::kFp8GroupUe8m0:
      codes(hidden, DType::kF8E4M3);
      args_.scale_out = out(in.scale_words, 4, DType::kI32, {in.scale_words});
      return;
    case AllReduceQuantization::kFp8Block1x128: {
      codes(hidden, DType::kF8E4M3);
      const int64_t blocks = (hidden + 127) / 128;
      args_.scale_out = out(tokens * blocks, 4, DType::kF32, {tokens, blocks});
      return;
    }
    case AllReduceQuantization::kNvfp4:
      codes(hidden / 2, DType::kU8);
      byte_scales(16, DType::kF8E4M3);
      args_.global_scale = add(&scale, sizeof(scale), DType::kF32, {1}, 0);
      return;
    case AllReduceQuantization::kNvfp4PerToken:
      codes(hidden / 2, DType::kU8);
      byte_scales(16, DType::kU8);
      args_.row_scale_out = out(tokens, 4, DType::kF32, {tokens});
      return;
    case AllReduceQuantization::kMxfp8:
      codes(hidden, DType::kF8E4M3);
      return byte_scales(32, DType::kF8E8M0);
    case AllReduceQuantization::kMxfp4:
      codes(hidden / 2, DType::kF4);
      return byte_scales(32, DType::kU8);
  }
}

RankTensors::RankTensors(const GoldenInputs& in, int rank, const RankOptions& options)
    : style_{.poison = options.poison} {
  buffers_.reserve(16);
  const AllReduceProblem& problem = in.problem;
  const GoldenRank& mine = in.ranks[static_cast<size_t>(rank)];
  const int64_t tokens = problem.tokens;
  const int64_t hidden = problem.hidden;
  const int64_t shift = options.misalignment;
  const auto bytes = static_cast<size_t>(tokens * hidden * (bits(problem.element) / 8));
  const auto rows_of = [&](const void* data) {
    return add(data, bytes, problem.element, {tokens, hidden}, shift);
  };
  const bool is_fused_moe = is_moe(problem.pattern);
  if (is_fused_moe) {
    add_moe_inputs(in, mine, shift);
  } else {
    args_.input = rows_of(mine.input.data());
  }
  const bool wants_all = is_fused_moe && !options.leaves_out_optional;
  const auto output = [&](bool is_wanted, Alias alias) {
    if (!is_wanted) return TensorView{};
    if (alias == options.alias && alias == Alias::kResidual) return args_.residual_in;
    return alias == options.alias && !args_.input.is_absent() ? args_.input : rows_of(nullptr);
  };
  if (has_norm(problem.pattern)) {
    args_.residual_in = rows_of(in.residual.data());
    args_.gamma = add(in.gamma.data(), in.gamma.size(), problem.element, {hidden}, shift);
    const bool is_residual_wanted = !is_fused_moe || wants_all;
    args_.residual_out =
        output(is_residual_wanted,
               options.alias == Alias::kResidual ? Alias::kResidual : Alias::kInputIsResidualOut);
    const bool is_norm_wanted =
        stores_norm(problem.pattern) || wants_all ||
        (is_fused_moe && quantization_of(problem) == AllReduceQuantization::kNone);
    args_.norm_out = output(is_norm_wanted, Alias::kInputIsNormOut);
  }
  args_.ar_out = output(!has_norm(problem.pattern) || wants_all, Alias::kInputIsArOut);
  add_quantized(in);
  args_.eps = in.eps;
  args_.weight_bias = in.weight_bias;
}

std::vector<const GuardedBuffer*> RankTensors::buffers() const {
  std::vector<const GuardedBuffer*> buffers;
  for (const GuardedBuffer& buffer : buffers_) buffers.push_back(&buffer);
  return buffers;
}

std::string RankTensors::difference(const GoldenOutputs& expected) const {
  for (const GuardedBuffer& buffer : buffers_) {
    if (!buffer.intact()) return "wrote outside of a tensor";
  }
  std::string text;
  const auto compare = [&](const char* name, const TensorView& view,
                           const std::vector<uint8_t>& bytes) {
    if (view.is_absent() || !text.empty()) return;
    const auto* const got = static_cast<const uint8_t*>(view.data);
    const auto [at, other] = std::mismatch(bytes.begin(), bytes.end(), got);
    if (at == bytes.end()) return;
    text = fmt::format("{}: byte {} of {} is {:#04x}, expected {:#04x}", name, at - bytes.begin(),
                       bytes.size(), *other, *at);
  };
  compare("ar_out", args_.ar_out, expected.ar_out);
  compare("residual_out", args_.residual_out, expected.residual_out);
  compare("norm_out", args_.norm_out, expected.norm_out);
  compare("quant_out", args_.quant_out, expected.quant_out);
  compare("scale_out", args_.scale_out, expected.scale_out);
  compare("row_scale_out", args_.row_scale_out, expected.row_scale_out);
  return text;
}

// ---- Inputs

GoldenInputs random_inputs(const AllReduceProblem& problem, int ranks, Fill fill, uint64_t seed) {
  Random random(seed);
  const auto tensor = [&](Fill kind, int64_t count) {
    std::vector<uint8_t> data(static_cast<size_t>(count * (bits(problem.element) / 8)));
    fill_elements(kind, problem.element, random, count, data.data());
    return data;
  };
  const auto floats = [&](int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = random.normal();
    return values;
  };
  const int64_t tokens = problem.tokens;
  const int64_t elements = tokens * problem.hidden;
  GoldenInputs in{.problem = problem};
  in.residual = tensor(random.chance(70) ? Fill::kNormal : fill, elements);
  in.gamma = tensor(random.chance(70) ? Fill::kNormal : fill, problem.hidden);
  in.eps = random.pick({0.0F, 1e-6F, 1e-5F});
  in.weight_bias = random.chance(30) ? 1.0F : 0.0F;
  in.global_scale = random.pick({0.0123F, 97.5F, 1.0F, 3e-5F});
  in.experts = random.range(1, 5);
  in.active_experts = random.chance(50) ? in.experts : random.range(0, in.experts);
  in.rows = random.range(1, 9);
  in.top_k = random.range(1, 6);
  in.routed_scaling = random.chance(50) ? 1.0F : 2.5F;
  const bool has_weights = random.chance(80);
  const bool has_shared_expert = random.chance(50);
  if (problem.group > 0) {
    in.scale_words = golden_group_words(tokens, problem.hidden / problem.group, random.chance(50));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    GoldenRank& mine = in.ranks.emplace_back();
    if (problem.pattern == AllReducePattern::kMoeReduction) {
      mine.expert_rows = tensor(fill, in.experts * elements);
      mine.expert_scales = floats(in.experts * tokens);
      mine.token_input = tensor(fill, elements);
    } else if (problem.pattern == AllReducePattern::kMoeFinalize) {
      mine.permuted_rows = tensor(fill, in.rows * problem.hidden);
      for (int64_t slot = 0; slot < tokens * in.top_k; ++slot) {
        mine.slot_to_row.push_back(static_cast<int32_t>(random.range(-1, in.rows - 1)));
      }
      if (has_weights) mine.slot_weights = floats(tokens * in.top_k);
      for (float& weight : mine.slot_weights) {
        const uint32_t rounded = element_bits(problem.element, weight);
        weight = load_element(problem.element, &rounded, 0);
      }
      if (has_shared_expert) mine.shared_expert = tensor(fill, elements);
    } else {
      mine.input = tensor(fill, elements);
    }
  }
  return in;
}

// ---- Running

void run_rank(const RankGroup& group, int rank, const AllReduceImpl& impl,
              const AllReduceProblem& problem, const AllReduceArgs& args) {
  const AllReduceCall call{.problem = problem,
                           .ranks = group.ranks(),
                           .workspace_element = problem.element,
                           .capacities = group.capacities()};
  RankArgs lowered = lower_allreduce(problem, args, Device{});
  lowered.memory = group.memory(rank);
  impl.run(call, lowered, {}, args.trigger, {});
}

void run_as_threads(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 1; rank < ranks; ++rank) threads.emplace_back(body, rank);
  body(0);
  for (std::thread& thread : threads) thread.join();
}

std::vector<int> run_as_processes(int ranks, const std::function<int(int rank)>& body) {
  constexpr std::string_view kSignal = "signal ";
  std::vector<int> statuses;
  for (const std::string& result :
       run_processes(ranks, [&](int rank) { return std::to_string(body(rank)); })) {
    const bool is_signal = result.starts_with(kSignal);
    const std::string number = is_signal ? result.substr(kSignal.size()) : result;
    const bool is_number = !number.empty() && number.find_first_not_of("0123456789") == number.npos;
    if (!is_number) throw std::runtime_error("a rank has failed: " + result);
    statuses.push_back(is_signal ? -std::stoi(number) : std::stoi(number));
  }
  return statuses;
}

}  // namespace narrowfloat::testing
