// See allreduce_case.h.
#include "support/allreduce_case.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/int_math.h"
#include "ops/allreduce/allreduce_problem.h"
#include "tensor/element_io.h"

namespace narrowfloat::testing {
namespace {

using Quantization = AllReduceQuantization;
constexpr int64_t kExperts = 3;
constexpr int64_t kTopK = 4;
constexpr int64_t kSparePermutedRows = 5;

bool is_fp4(Quantization quantization) {
  return quantization == Quantization::kNvfp4 || quantization == Quantization::kNvfp4PerToken ||
         quantization == Quantization::kMxfp4;
}

int64_t scale_block(Quantization quantization) {
  const bool is_nvfp4 =
      quantization == Quantization::kNvfp4 || quantization == Quantization::kNvfp4PerToken;
  return is_nvfp4 ? 16 : 32;
}

}  // namespace

std::string to_string(const AllReduceCaseSpec& spec) {
  return fmt::format("{} on {} ranks, seed {}, {}{}{}{}{}, weight_bias {}", to_string(spec.problem),
                     spec.ranks, spec.seed, name(spec.fill), spec.is_in_place ? ", in place" : "",
                     spec.has_element_weights ? ", element weights" : "",
                     spec.has_shared_expert ? "" : ", no shared expert",
                     spec.has_all_outputs ? "" : ", fewest outputs", spec.weight_bias);
}

// A tensor and its memory.
struct Tensor {
  GuardedBuffer buffer;
  TensorView view;  // Absent: not a tensor of this case.
};

struct AllReduceCase::Rank {
  Rank(const AllReduceCaseSpec& spec, int rank) : spec_(spec), number_(rank) {
    make_inputs();
    make_outputs();
    fill(spec.seed);
  }

  void fill(uint64_t seed) {
    const AllReduceProblem& problem = spec_.problem;
    Random shared(seed * 7919);
    Random own(seed * 7919 + static_cast<uint64_t>(number_) + 1);
    for (Tensor* tensor : {&input, &expert_rows, &token_input, &permuted_rows, &shared_expert}) {
      fill_floats(*tensor, own, spec_.fill);
    }
    // A rank may have a residual and a weight of its own; all real ones are equal.
    for (Tensor* tensor : {&residual_in, &gamma}) fill_floats(*tensor, shared, spec_.fill);
    fill_floats(expert_scales, own, Fill::kNormal);
    fill_floats(slot_weights, own, Fill::kNormal);
    if (!slot_to_row.view.is_absent()) {
      const int64_t rows = permuted_rows.view.shape[0] - kSparePermutedRows;
      for (int32_t& row : slot_to_row.buffer.span<int32_t>()) {
        row = static_cast<int32_t>(own.range(-1, rows - 1));
      }
    }
    if (!num_experts.view.is_absent()) *num_experts.buffer.data<int32_t>() = kExperts - 1;
    if (!global_scale.view.is_absent()) {
      const bool is_fp8 = quantization_of(problem) == Quantization::kFp8Tensor;
      *global_scale.buffer.data<float>() = is_fp8 ? 0.0123F : 97.5F;
    }
    if (spec_.is_in_place) share_memory();
    for (Tensor* tensor : outputs()) {
      if (tensor->buffer.size() > 0) std::ranges::fill(tensor->buffer.span(), spec_.poison);
    }
  }

  [[nodiscard]] std::vector<const Tensor*> all() const {
    return {&input,         &residual_in,   &gamma,        &global_scale,  &expert_rows,
            &expert_scales, &num_experts,   &token_input,  &permuted_rows, &slot_to_row,
            &slot_weights,  &shared_expert, &ar_out,       &residual_out,  &norm_out,
            &quant_out,     &scale_out,     &row_scale_out};
  }
  std::vector<Tensor*> outputs() {
    return {&ar_out, &residual_out, &norm_out, &quant_out, &scale_out, &row_scale_out};
  }

  template <typename View>
  [[nodiscard]] AllReduceArgs args(const View& view) const {
    AllReduceArgs args{.input = view(input),
                       .residual_in = view(residual_in),
                       .gamma = view(gamma),
                       .ar_out = view(ar_out),
                       .residual_out = view(residual_out),
                       .norm_out = view(norm_out),
                       .quant_out = view(quant_out),
                       .scale_out = view(scale_out),
                       .row_scale_out = view(row_scale_out),
                       .global_scale = view(global_scale),
                       .eps = 1e-6F,
                       .weight_bias = spec_.weight_bias};
    args.moe = {.expert_rows = view(expert_rows),
                .expert_scales = view(expert_scales),
                .num_experts = view(num_experts),
                .token_input = view(token_input),
                .permuted_rows = view(permuted_rows),
                .slot_to_row = view(slot_to_row),
                .slot_weights = view(slot_weights),
                .shared_expert = view(shared_expert),
                .routed_scaling = is_finalize() ? 2.5F : 1.0F};
    return args;
  }

  Tensor input, residual_in, gamma, global_scale;
  Tensor expert_rows, expert_scales, num_experts, token_input;
  Tensor permuted_rows, slot_to_row, slot_weights, shared_expert;
  Tensor ar_out, residual_out, norm_out, quant_out, scale_out, row_scale_out;

 private:
  [[nodiscard]] bool is_finalize() const {
    return spec_.problem.pattern == AllReducePattern::kMoeFinalize;
  }

  void make(Tensor& tensor, DType dtype, std::initializer_list<int64_t> shape) const {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    tensor.buffer = GuardedBuffer(count * bits(dtype) / 8, {.poison = spec_.poison});
    tensor.view = TensorView::contiguous(tensor.buffer.data(), dtype, shape);
  }

  void make_inputs() {
    const AllReduceProblem& p = spec_.problem;
    const DType e = p.element;
    if (p.pattern == AllReducePattern::kMoeReduction) {
      make(expert_rows, e, {kExperts, p.tokens, p.hidden});
      make(expert_scales, DType::kF32, {kExperts, p.tokens});
      make(token_input, e, {p.tokens, p.hidden});
      if (spec_.seed % 2 == 0) make(num_experts, DType::kI32, {1});
    } else if (is_finalize()) {
      make(permuted_rows, e, {std::max<int64_t>(p.tokens * 2, 1) + kSparePermutedRows, p.hidden});
      make(slot_to_row, DType::kI32, {p.tokens, kTopK});
      make(slot_weights, spec_.has_element_weights ? e : DType::kF32, {p.tokens, kTopK});
      if (spec_.has_shared_expert) make(shared_expert, e, {p.tokens, p.hidden});
    } else {
      make(input, e, {p.tokens, p.hidden});
    }
    if (!has_norm(p.pattern)) return;
    make(residual_in, e, {p.tokens, p.hidden});
    make(gamma, e, {p.hidden});
  }

  void make_outputs() {
    const AllReduceProblem& p = spec_.problem;
    const DType e = p.element;
    const Quantization quantization = quantization_of(p);
    const bool all = is_moe(p.pattern) && spec_.has_all_outputs;
    if (p.pattern == AllReducePattern::kAllReduce || all) make(ar_out, e, {p.tokens, p.hidden});
    const bool fewest = is_moe(p.pattern) && !spec_.has_all_outputs;
    if (has_norm(p.pattern) && !(fewest && quantization != Quantization::kNone)) {
      make(residual_out, e, {p.tokens, p.hidden});
    }
    if (stores_norm(p.pattern) || all) make(norm_out, e, {p.tokens, p.hidden});
    if (quantization == Quantization::kNone) return;
    make(quant_out, DType::kU8, {p.tokens, is_fp4(quantization) ? p.hidden / 2 : p.hidden});
    make_scales(quantization);
  }

  void make_scales(Quantization quantization) {
    const AllReduceProblem& p = spec_.problem;
    switch (quantization) {
      case Quantization::kFp8Tensor:
        return make(global_scale, DType::kF32, {1});
      case Quantization::kFp8Token:
        return make(scale_out, DType::kF32, {p.tokens});
      case Quantization::kFp8GroupUe8m0:
        return make(scale_out, DType::kI32,
                    {group_words(ceil_div(p.hidden / p.group, int64_t{4}))});
      case Quantization::kFp8Block1x128:
        return make(scale_out, DType::kF32, {p.tokens, ceil_div(p.hidden, int64_t{128})});
      default:
        break;
    }
    const int64_t blocks = p.hidden / scale_block(quantization);
    make(scale_out, DType::kU8, {scale_image_size(p.scale_layout, p.tokens, blocks)});
    if (quantization == Quantization::kNvfp4) make(global_scale, DType::kF32, {1});
    if (quantization == Quantization::kNvfp4PerToken) {
      make(row_scale_out, DType::kF32, {p.tokens});
    }
  }

  // Every other case has the short last column.
  [[nodiscard]] int64_t group_words(int64_t columns) const {
    const int64_t step = round_up(spec_.problem.tokens, int64_t{4});
    return spec_.seed % 2 == 0 ? columns * step : (columns - 1) * step + spec_.problem.tokens;
  }

  static void fill_floats(Tensor& tensor, Random& random, Fill fill) {
    if (tensor.view.is_absent()) return;
    fill_elements(fill, tensor.view.dtype, random, tensor.view.num_elements(), tensor.view.data);
  }

  // The output's memory becomes that of its input as well.
  void share_memory() {
    const bool is_plain = spec_.problem.pattern == AllReducePattern::kAllReduce;
    Tensor& in = is_plain ? input : residual_in;
    Tensor& out = is_plain ? ar_out : residual_out;
    if (in.view.is_absent() || out.view.is_absent()) return;
    out.buffer = GuardedBuffer();
    out.view = in.view;
  }

  AllReduceCaseSpec spec_;
  int number_;
};

AllReduceCase::AllReduceCase(const AllReduceCaseSpec& spec) : spec_(spec) {
  ranks_.reserve(static_cast<size_t>(spec.ranks));
  for (int rank = 0; rank < spec.ranks; ++rank) ranks_.emplace_back(spec_, rank);
}
AllReduceCase::~AllReduceCase() = default;
AllReduceCase::AllReduceCase(AllReduceCase&&) noexcept = default;

AllReduceArgs AllReduceCase::args(int rank) const {
  return ranks_[static_cast<size_t>(rank)].args([](const Tensor& tensor) { return tensor.view; });
}

AllReduceArgs AllReduceCase::args(int rank, const DeviceCopies& copies) const {
  return ranks_[static_cast<size_t>(rank)].args(
      [&](const Tensor& tensor) { return copies.view(tensor.view); });
}

std::vector<AllReduceArgs> AllReduceCase::all_args() const {
  std::vector<AllReduceArgs> all;
  for (int rank = 0; rank < spec_.ranks; ++rank) all.push_back(args(rank));
  return all;
}

std::vector<AllReduceArgs> AllReduceCase::all_args(const DeviceCopies& copies) const {
  std::vector<AllReduceArgs> all;
  for (int rank = 0; rank < spec_.ranks; ++rank) all.push_back(args(rank, copies));
  return all;
}

Buffers AllReduceCase::buffers() const {
  Buffers buffers;
  for (const Rank& rank : ranks_) {
    for (const Tensor* tensor : rank.all()) {
      if (tensor->buffer.data() != nullptr) buffers.push_back(&tensor->buffer);
    }
  }
  return buffers;
}

std::vector<AllReduceCase::Output> AllReduceCase::outputs(int rank) const {
  const Rank& r = ranks_[static_cast<size_t>(rank)];
  std::vector<Output> outputs;
  const auto add = [&](const char* name, const Tensor& tensor) {
    if (tensor.view.is_absent()) return;
    const auto* first = static_cast<const uint8_t*>(tensor.view.data);
    const int64_t bytes = tensor.view.num_elements() * bits(tensor.view.dtype) / 8;
    outputs.push_back({name, {first, first + bytes}});
  };
  add("ar_out", r.ar_out);
  add("residual_out", r.residual_out);
  add("norm_out", r.norm_out);
  add("quant_out", r.quant_out);
  add("scale_out", r.scale_out);
  add("row_scale_out", r.row_scale_out);
  return outputs;
}

bool AllReduceCase::intact() const {
  return std::ranges::all_of(buffers(), [](const GuardedBuffer* b) { return b->intact(); });
}

void AllReduceCase::refill(uint64_t seed) {
  for (Rank& rank : ranks_) rank.fill(seed);
}

void expect_same_outputs(const AllReduceCase& expected, const AllReduceCase& actual) {
  const std::string what = to_string(expected.spec());
  for (int rank = 0; rank < expected.spec().ranks; ++rank) {
    const auto want = expected.outputs(rank);
    const auto got = actual.outputs(rank);
    ASSERT_EQ(want.size(), got.size());
    for (size_t i = 0; i < want.size(); ++i) {
      const auto [a, b] = std::ranges::mismatch(want[i].bytes, got[i].bytes);
      const auto place = a - want[i].bytes.begin();
      ASSERT_EQ(want[i].bytes.size(), got[i].bytes.size());
      EXPECT_TRUE(a == want[i].bytes.end())
          << what << ", rank " << rank << ": " << want[i].name << " differs at byte " << place
          << " of " << want[i].bytes.size() << ": expected " << int{*a} << ", got " << int{*b};
    }
  }
}

}  // namespace narrowfloat::testing
