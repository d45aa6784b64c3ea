// Grouped GEMM: both matrices of a Mixture-of-Experts layer, one after the other, without routing
// and activation.
//
//     grouped_gemm/<mode>/<shape>/T<tokens>                     the implementation the library
//     takes grouped_gemm_by/<implementation>/<mode>/<shape>/T<tokens>  each implementation, a small
//     shape
//
// Tokens pick k different experts at random, other ones in every call, so that weights of small
// batches come from memory. GFLOP_per_s counts two operations for each product; weights_GB_per_s
// counts the codes and scales of the experts that have rows, once.
#include <array>
#include <numeric>
#include <optional>

#include "base/int_math.h"
#include "bench_support.h"
#include "narrowfloat/gemm.h"
#include "narrowfloat/permute.h"
#include "ops/grouped_gemm/gemm_shape.h"

namespace narrowfloat::bench {
namespace {

struct Layer {
  std::string_view name;
  int64_t experts;
  int64_t top_k;
  int64_t hidden;
  int64_t inter;
};
constexpr Layer kGptOss{"gpt_oss", 32, 4, 2880, 2880};
constexpr Layer kMedium{"medium", 8, 2, 1024, 1024};
constexpr Layer kSmall{"small", 8, 2, 128, 128};

struct GemmCase {
  MoeMode mode;
  Layer layer;
  int64_t tokens;
  std::string implementation = {};  // Empty: the one the library chooses.

  [[nodiscard]] int64_t products() const {
    return 3 * tokens * layer.top_k * layer.hidden * layer.inter;
  }
};

// splitmix64, eight bytes at a time.
Bytes random_bytes(int64_t count, uint64_t seed) {
  Bytes out = make_bytes(count);
  const auto words = static_cast<size_t>(count / 8);
  for (size_t i = 0; i < words; ++i) {
    uint64_t z = (seed + i) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    std::memcpy(out.data() + i * 8, &z, 8);
  }
  return out;
}

// Codes of finite values, near 1 for BF16 and F32.
Bytes random_codes(DType dtype, int64_t count, uint64_t seed) {
  if (dtype == DType::kBF16 || dtype == DType::kF32) return make_input(dtype, count);
  Bytes codes = random_bytes(round_up(dtype == DType::kU8 ? count / 2 : count, 8), seed);
  if (dtype == DType::kF8E4M3) {
    for (std::byte& code : codes) code &= std::byte{0xBF};  // At most 1.875.
  }
  return codes;
}

// Scales between 1/4 and 4.
Bytes random_scales(ScaleType type, int64_t count, uint64_t seed) {
  Bytes random = random_bytes(round_up(count, 8), seed);
  if (type == ScaleType::kF32) {
    Bytes scales = make_bytes(count * 4);
    for (int64_t i = 0; i < count; ++i) {
      const float scale = 0.25F + static_cast<float>(random[static_cast<size_t>(i)]) / 256.0F;
      std::memcpy(scales.data() + i * 4, &scale, 4);
    }
    return scales;
  }
  const int base = type == ScaleType::kUE8M0 ? 125 : 40;
  const unsigned spread = type == ScaleType::kUE8M0 ? 4 : 32;
  for (std::byte& scale : random) {
    scale = static_cast<std::byte>(base + static_cast<int>(static_cast<unsigned>(scale) % spread));
  }
  return random;
}

GroupedWeights random_weights(const GemmCase& what, int64_t rows, int64_t cols) {
  const CodeStorage storage = storage_of(moe_mode_info(what.mode).weights);
  const ScaleGrid grid = scale_grid(storage, rows, cols);
  const int64_t experts = what.layer.experts;
  const Bytes codes = random_codes(storage.dtype, experts * rows * cols, 1);
  const int64_t count = experts * grid.rows * grid.blocks;
  const Bytes scales = random_scales(grid.type, count, 2);
  WeightView view{.values = TensorView::contiguous(
                      codes.data(), storage.dtype,
                      {experts, rows, storage.dtype == DType::kU8 ? cols / 2 : cols}),
                  .scales = {}};
  if (grid.is_present()) {
    view.scales = {.data = const_cast<std::byte*>(scales.data()),
                   .type = grid.type,
                   .layout = ScaleLayoutId::kLinear,
                   .device = {},
                   .batch = experts,
                   .rows = grid.rows,
                   .blocks = grid.blocks,
                   .capacity = count};
  }
  const Pinned pinned("grouped_gemm", what.implementation);
  return GroupedWeights::prepare(view, what.mode);
}

// Rows in the mode's format.
class Rows {
 public:
  Rows(MoeMode mode, int64_t rows, int64_t cols) {
    const CodeStorage storage = storage_of(moe_mode_info(mode).input);
    const ScaleGrid grid = scale_grid(storage, rows, cols);
    codes_ = random_codes(storage.dtype, rows * cols, 3);
    view_.values = TensorView::contiguous(codes_.data(), storage.dtype,
                                          {rows, storage.dtype == DType::kU8 ? cols / 2 : cols});
    if (grid.is_present()) {
      scales_ = random_scales(grid.type, rows * grid.blocks, 4);
      const DType dtype = grid.type == ScaleType::kF32 ? DType::kF32 : DType::kU8;
      view_.scales = TensorView::contiguous(scales_.data(), dtype, {rows, grid.blocks});
    }
    row_scale_.assign(static_cast<size_t>(rows), 1.0F);
    if (mode == MoeMode::kNvfp4PerToken) {
      view_.row_scale = TensorView::contiguous(row_scale_.data(), DType::kF32, {rows});
    }
  }
  [[nodiscard]] const CodedRows& view() const { return view_; }

 private:
  Bytes codes_;
  Bytes scales_;
  std::vector<float> row_scale_;
  CodedRows view_;
};

// One routing of all tokens.
class RoutedTokens {
 public:
  RoutedTokens(const GemmCase& what, std::mt19937& generator)
      : layout_(permutation_layout(what.tokens, what.layer.top_k,
                                   static_cast<int32_t>(what.layer.experts),
                                   default_token_tile(what.tokens, what.layer.top_k,
                                                      static_cast<int32_t>(what.layer.experts)))),
        buffer_(make_bytes(layout_.bytes)),
        permutation_(layout_.bind(buffer_.data())) {
    std::vector<int32_t> experts(static_cast<size_t>(what.layer.experts));
    std::iota(experts.begin(), experts.end(), 0);
    std::vector<int32_t> ids;
    for (int64_t token = 0; token < what.tokens; ++token) {
      std::shuffle(experts.begin(), experts.end(), generator);
      ids.insert(ids.end(), experts.begin(), experts.begin() + what.layer.top_k);
    }
    permute(TensorView::contiguous(ids.data(), DType::kI32, {what.tokens, what.layer.top_k}), 0,
            static_cast<int32_t>(what.layer.experts), permutation_);
    std::sort(ids.begin(), ids.end());
    experts_hit_ = std::unique(ids.begin(), ids.end()) - ids.begin();
  }
  [[nodiscard]] const PermutationLayout& layout() const { return layout_; }
  [[nodiscard]] const Permutation& permutation() const { return permutation_; }
  [[nodiscard]] int64_t experts_hit() const { return experts_hit_; }

 private:
  PermutationLayout layout_;
  Bytes buffer_;
  Permutation permutation_;
  int64_t experts_hit_ = 0;
};

class PreparedGemm {
 public:
  explicit PreparedGemm(const GemmCase& what)
      : what_(what),
        w1_(random_weights(what, 2 * what.layer.inter, what.layer.hidden)),
        w2_(random_weights(what, what.layer.hidden, what.layer.inter)) {
    std::mt19937 generator(5);
    for (int i = 0; i < 8; ++i) routings_.emplace_back(what, generator);
    const int64_t rows = routings_[0].layout().max_rows;
    tokens_.emplace(what.mode, what.tokens, what.layer.hidden);
    slots_.emplace(what.mode, rows, what.layer.inter);
    output_.resize(static_cast<size_t>(rows * 2 * what.layer.inter));
    const int64_t size = std::max(grouped_gemm_workspace(w1_, what.tokens, Accumulation::kFp32),
                                  grouped_gemm_workspace(w2_, rows, Accumulation::kFp32));
    workspace_.reset(static_cast<std::byte*>(
        std::aligned_alloc(256, static_cast<size_t>(std::max<int64_t>(256, size)))));
    workspace_view_ = TensorView::contiguous(workspace_.get(), DType::kU8, {size});
  }

  void run(const RoutedTokens& routing) {
    multiply(w1_, tokens_->view(), true, routing);
    multiply(w2_, slots_->view(), false, routing);
  }

  // The oracle's bytes, where it is not too slow.
  [[nodiscard]] bool is_correct() {
    constexpr int64_t kMaxProducts = 20'000'000;
    if (what_.products() > kMaxProducts) return true;
    GemmCase oracle = what_;
    oracle.implementation = kOracle;
    PreparedGemm expected(oracle);
    expected.run(expected.routings_[0]);
    run(routings_[0]);
    return std::memcmp(output_.data(), expected.output_.data(), output_.size() * sizeof(float)) ==
           0;
  }

  void measure(benchmark::State& state) {
    std::vector<double> seconds;
    double weights = 0;
    size_t next = 0;
    run(routings_[0]);
    for ([[maybe_unused]] auto iteration : state) {
      const RoutedTokens& routing = routings_[next++ % routings_.size()];
      seconds.push_back(seconds_of([&] { run(routing); }));
      state.SetIterationTime(seconds.back());
      weights += static_cast<double>(routing.experts_hit()) /
                 static_cast<double>(what_.layer.experts) *
                 static_cast<double>(w1_.bytes() + w2_.bytes());
    }
    const auto products = static_cast<double>(what_.products());
    const auto report = [&](const std::string& prefix, double time) {
      state.counters[prefix + "GFLOP_per_s"] = 2 * products / time / 1e9;
      state.counters[prefix + "weights_GB_per_s"] =
          weights / static_cast<double>(seconds.size()) / time / 1e9;
    };
    report("", median(seconds));
    report("best_", *std::min_element(seconds.begin(), seconds.end()));
    state.SetLabel(std::string(w1_.implementation()));
  }

 private:
  void multiply(const GroupedWeights& weights, const CodedRows& rows, bool gathers,
                const RoutedTokens& routing) {
    GroupedGemmArgs args;
    args.a = rows;
    args.gather_tokens = gathers;
    args.permutation = routing.permutation();
    args.output = TensorView::contiguous(output_.data(), DType::kF32,
                                         {routing.layout().max_rows, weights.rows()});
    grouped_gemm(args, weights, workspace_view_);
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  GemmCase what_;
  GroupedWeights w1_;
  GroupedWeights w2_;
  std::vector<RoutedTokens> routings_;
  std::optional<Rows> tokens_;
  std::optional<Rows> slots_;
  std::vector<float> output_;
  std::unique_ptr<std::byte, Free> workspace_;
  TensorView workspace_view_;
};

void add(const GemmCase& what) {
  static std::pair<std::string, std::unique_ptr<PreparedGemm>> current;
  const std::string by = what.implementation.empty() ? "" : "_by/" + what.implementation;
  const std::string name = fmt::format("grouped_gemm{}/{}/{}/T{}", by, narrowfloat::name(what.mode),
                                       what.layer.name, what.tokens);
  const auto body = [name, what](benchmark::State& state) {
    if (current.first != name) {
      current.second.reset();
      current = {name, std::make_unique<PreparedGemm>(what)};
      if (!current.second->is_correct()) {
        any_wrong_bytes() = true;
        state.SkipWithError("differs from the oracle");
        return;
      }
    }
    current.second->measure(state);
  };
  benchmark::RegisterBenchmark(name.c_str(), body)->UseManualTime()->Unit(benchmark::kMillisecond);
}

void register_all() {
  for (const MoeMode mode : {MoeMode::kMxfp4Bf16, MoeMode::kMxfp4Mxfp8, MoeMode::kNvfp4}) {
    for (const int64_t tokens : {1, 8, 64, 512}) add({mode, kGptOss, tokens});
  }
  for (const MoeModeInfo& info : all_moe_modes()) {
    for (const int64_t tokens : {1, 128}) add({info.id, kMedium, tokens});
    for (const auto* implementation : {"cpu_baseline", "cpu_reference"}) {
      add({info.id, kSmall, 16, implementation});
    }
  }
}

}  // namespace
}  // namespace narrowfloat::bench

int main(int argc, char** argv) {
  return narrowfloat::bench::run_program(argc, argv, narrowfloat::bench::register_all);
}
