// Values of tensors are between 1/8 and 2, with random signs: no sum of eight ranks overflows, and
// every quantization uses its whole range of codes.
#include "bench_cli/allreduce_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include <fmt/format.h>

#include "narrowfloat/error.h"
#include "narrowfloat/format.h"

namespace narrowfloat::cli {
namespace {

using Pattern = AllReducePattern;
using Quantization = AllReduceQuantization;

constexpr int64_t kExperts = 4;  // MoE reduction: active experts of a rank.
constexpr int64_t kTopK = 8;     // MoE finalize: rows of a token.

// Sign, mantissa and the two lowest bits of the exponent are random.
RandomWords random_words(DType dtype, int seed) {
  RandomWords words{.seed = static_cast<uint64_t>(seed)};
  switch (dtype) {
    case DType::kF16:
      words.mask = 0x8FFF8FFF8FFF8FFFU;
      words.base = 0x3000300030003000U;
      break;
    case DType::kF32:
      words.mask = 0x81FFFFFF81FFFFFFU;
      words.base = 0x3E0000003E000000U;
      break;
    default:
      words.mask = 0x81FF81FF81FF81FFU;
      words.base = 0x3E003E003E003E00U;
  }
  return words;
}

template <typename Value, typename Make>
std::vector<std::byte> made(int64_t count, Make make) {
  std::vector<std::byte> bytes(static_cast<size_t>(count) * sizeof(Value));
  for (int64_t i = 0; i < count; ++i) {
    const Value value = make(i);
    std::memcpy(bytes.data() + static_cast<size_t>(i) * sizeof(Value), &value, sizeof(Value));
  }
  return bytes;
}

// A weight between 0 and 1.
float weight(uint64_t seed, int64_t index) {
  const uint64_t bits = random_word_bits(seed, static_cast<uint64_t>(index));
  return static_cast<float>(bits >> 40U) * 0x1p-24F;
}

TensorView shape_of(DType dtype, std::initializer_list<int64_t> shape) {
  return TensorView::contiguous(nullptr, dtype, shape);
}

std::optional<FormatId> block_format(Quantization quantization) {
  switch (quantization) {
    case Quantization::kNvfp4:
      return FormatId::kNvfp4;
    case Quantization::kNvfp4PerToken:
      return FormatId::kNvfp4PerToken;
    case Quantization::kMxfp8:
      return FormatId::kMxfp8;
    case Quantization::kMxfp4:
      return FormatId::kMxfp4;
    default:
      return {};
  }
}

double unit_in_last_place(DType dtype) {
  if (dtype == DType::kF32) return 0x1p-23;
  return dtype == DType::kF16 ? 0x1p-10 : 0x1p-7;
}

}  // namespace

bool has_layouts(Quantization quantization) { return block_format(quantization).has_value(); }

int64_t message_bytes(const AllReduceProblem& problem) {
  return problem.tokens * problem.hidden * (bits(problem.element) / 8);
}

uint64_t RankTensor::size_bytes() const {
  return static_cast<uint64_t>(view.num_elements() * bits(view.dtype) / 8);
}

RankTensors::RankTensors(const AllReduceProblem& problem, int ranks, int rank)
    : problem_(problem), ranks_(ranks) {
  // Checks the problem.
  static_cast<void>(explain_allreduce({.ranks = ranks, .device = {}, .problem = problem}));
  const DType element = problem.element;
  if (is_moe(problem.pattern)) {
    add_moe_inputs(rank);
  } else {
    add_words("input", &AllReduceArgs::input, shape_of(element, {problem.tokens, problem.hidden}),
              rank);
  }
  if (problem.pattern != Pattern::kAllReduce) {
    add_words("residual_in", &AllReduceArgs::residual_in,
              shape_of(element, {problem.tokens, problem.hidden}), kMostAllReduceRanks);
    add_words("gamma", &AllReduceArgs::gamma, shape_of(element, {problem.hidden}),
              kMostAllReduceRanks + 1);
  }
  const Quantization quantization = quantization_of(problem);
  if (quantization == Quantization::kFp8Tensor || quantization == Quantization::kNvfp4) {
    const float scale = quantization == Quantization::kNvfp4 ? 448.0F : 0.01F;
    add_content("global_scale", shape_of(DType::kF32, {1}),
                made<float>(1, [scale](int64_t /*index*/) { return scale; }));
    tensors_.back().member = &AllReduceArgs::global_scale;
  }
  add_outputs();
  place();
}

void RankTensors::add_words(std::string_view name, TensorView AllReduceArgs::*member,
                            TensorView view, int seed) {
  RankTensor tensor{.name = std::string(name), .view = view, .member = member, .content = {}};
  tensor.words = random_words(view.dtype, seed);
  tensors_.push_back(std::move(tensor));
}

void RankTensors::add_moe_words(std::string_view name, TensorView AllReduceMoe::*member,
                                TensorView view, int seed, int64_t parts) {
  RankTensor tensor{.name = std::string(name), .view = view, .moe_member = member, .content = {}};
  tensor.words = random_words(view.dtype, seed);
  tensor.parts = parts;
  tensors_.push_back(std::move(tensor));
}

void RankTensors::add_content(std::string_view name, TensorView view,
                              std::vector<std::byte> content) {
  tensors_.push_back({.name = std::string(name), .view = view, .content = std::move(content)});
}

void RankTensors::add_moe_inputs(int rank) {
  const int64_t tokens = problem_.tokens;
  const DType element = problem_.element;
  const auto seed = static_cast<uint64_t>(rank);
  // Tensors of a rank have seeds of their own, one for each part.
  const int first_seed = 64 * (rank + 1);
  const TensorView rows = shape_of(element, {tokens, problem_.hidden});
  if (problem_.pattern == Pattern::kMoeReduction) {
    add_moe_words("expert_rows", &AllReduceMoe::expert_rows,
                  shape_of(element, {kExperts, tokens, problem_.hidden}), first_seed, kExperts);
    add_content("expert_scales", shape_of(DType::kF32, {kExperts, tokens}),
                made<float>(kExperts * tokens, [&](int64_t i) {
                  return weight(seed, i % tokens * kExperts + i / tokens);
                }));
    tensors_.back().moe_member = &AllReduceMoe::expert_scales;
    add_moe_words("token_input", &AllReduceMoe::token_input, rows, first_seed + 32, 1);
    return;
  }
  add_moe_words("permuted_rows", &AllReduceMoe::permuted_rows,
                shape_of(element, {tokens * kTopK, problem_.hidden}), first_seed, 1);
  // A token has rows of its own, in an order of its own.
  add_content("slot_to_row", shape_of(DType::kI32, {tokens, kTopK}),
              made<int32_t>(tokens * kTopK, [&](int64_t i) {
                const int64_t token = i / kTopK;
                return static_cast<int32_t>(token * kTopK + (i + token) % kTopK);
              }));
  tensors_.back().moe_member = &AllReduceMoe::slot_to_row;
  add_content("slot_weights", shape_of(DType::kF32, {tokens, kTopK}),
              made<float>(tokens * kTopK, [&](int64_t i) { return weight(seed, i); }));
  tensors_.back().moe_member = &AllReduceMoe::slot_weights;
  add_moe_words("shared_expert", &AllReduceMoe::shared_expert, rows, first_seed + 32, 1);
}

void RankTensors::add_output(std::string_view name, TensorView AllReduceArgs::*member,
                             TensorView view) {
  tensors_.push_back({.name = std::string(name),
                      .view = view,
                      .member = member,
                      .is_output = true,
                      .content = {}});
}

// The outputs of MoE patterns are optional; these have the ones that a layer uses.
void RankTensors::add_outputs() {
  const TensorView rows = shape_of(problem_.element, {problem_.tokens, problem_.hidden});
  if (problem_.pattern == Pattern::kAllReduce) {
    add_output("ar_out", &AllReduceArgs::ar_out, rows);
    return;
  }
  add_output("residual_out", &AllReduceArgs::residual_out, rows);
  const bool is_plain_moe =
      is_moe(problem_.pattern) && problem_.moe_quantization == Quantization::kNone;
  if (stores_norm(problem_.pattern) || is_plain_moe) {
    add_output("norm_out", &AllReduceArgs::norm_out, rows);
  }
  if (quantization_of(problem_) != Quantization::kNone) add_quantized();
}

void RankTensors::add_quantized() {
  const int64_t tokens = problem_.tokens;
  const int64_t hidden = problem_.hidden;
  const Quantization quantization = quantization_of(problem_);
  const auto add_scales = [this](TensorView view) {
    add_output("scale_out", &AllReduceArgs::scale_out, view);
  };
  if (const std::optional<FormatId> format = block_format(quantization)) {
    const QuantizedLayout layout =
        quantized_layout(*format, tokens, hidden, {.scale_layout = problem_.scale_layout});
    add_output("quant_out", &AllReduceArgs::quant_out,
               shape_of(DType::kU8, {tokens, layout.values_bytes / tokens}));
    add_scales(shape_of(DType::kU8, {layout.scales_bytes}));
    if (quantization == Quantization::kNvfp4PerToken) {
      add_output("row_scale_out", &AllReduceArgs::row_scale_out, shape_of(DType::kF32, {tokens}));
    }
    return;
  }
  add_output("quant_out", &AllReduceArgs::quant_out, shape_of(DType::kU8, {tokens, hidden}));
  if (quantization == Quantization::kFp8Token) add_scales(shape_of(DType::kF32, {tokens}));
  if (quantization == Quantization::kFp8Block1x128) {
    add_scales(shape_of(DType::kF32, {tokens, (hidden + 127) / 128}));
  }
  if (quantization == Quantization::kFp8GroupUe8m0) {
    const int64_t columns = (hidden / problem_.group + 3) / 4;
    add_scales(shape_of(DType::kI32, {columns * ((tokens + 3) / 4 * 4)}));
  }
}

void RankTensors::place() {
  for (const RankTensor& tensor : tensors_) {
    uint64_t& end = tensor.is_output ? output_bytes_ : input_bytes_;
    offsets_.push_back(end);
    end += aligned(tensor.size_bytes());
  }
}

AllReduceArgs RankTensors::args(std::byte* inputs, std::byte* outputs, Device device) const {
  AllReduceArgs args;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const RankTensor& tensor = tensors_[i];
    TensorView view = tensor.view;
    view.data = (tensor.is_output ? outputs : inputs) + offsets_[i];
    view.device = device;
    if (tensor.member != nullptr) args.*tensor.member = view;
    if (tensor.moe_member != nullptr) args.moe.*tensor.moe_member = view;
  }
  return args;
}

void RankTensors::fill_inputs(Machine& machine, std::byte* inputs) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const RankTensor& tensor = tensors_[i];
    if (tensor.is_output) continue;
    std::byte* const to = inputs + offsets_[i];
    if (!tensor.content.empty()) {
      machine.write(to, tensor.content.data(), tensor.content.size());
      continue;
    }
    const uint64_t part_bytes = tensor.size_bytes() / static_cast<uint64_t>(tensor.parts);
    RandomWords words = tensor.words;
    for (int64_t part = 0; part < tensor.parts; ++part) {
      machine.fill_words(to + static_cast<uint64_t>(part) * part_bytes, words, part_bytes);
      ++words.seed;
    }
  }
}

// With messages of B bytes and N ranks, the exchange of a rank is:
//   one-shot     N - 1 pushes of B and N cleared slots; N - 1 slots are read, and the input again.
//                MoE patterns push to their own slot as well and read that
//   two-shot     B / N to each of N - 1 owners, N - 1 slots of B / N are read and cleared, and the
//                input's own range again; B / N of sums to N; the sums are read and cleared. MoE
//                patterns send to their own slot as well, read it and clear it
//   NCCL         counted as 2 B each way: its own traffic is not known
//   reference    stages B and reads all staging areas
RankTraffic RankTensors::traffic(AllReduceAlgorithm algorithm) const {
  const auto message = static_cast<uint64_t>(message_bytes(problem_));
  const auto ranks = static_cast<uint64_t>(ranks_);
  RankTraffic traffic;
  for (const RankTensor& tensor : tensors_) {
    (tensor.is_output ? traffic.write_bytes : traffic.read_bytes) += tensor.size_bytes();
  }
  if (ranks == 1) return traffic;
  switch (algorithm) {
    case AllReduceAlgorithm::kOneShot:
      traffic.exchange_read_bytes = ranks * message;
      traffic.exchange_write_bytes = (2 * ranks - (is_moe(problem_.pattern) ? 0 : 1)) * message;
      break;
    case AllReduceAlgorithm::kTwoShot:
      traffic.exchange_read_bytes = 2 * message;
      traffic.exchange_write_bytes =
          4 * message - (is_moe(problem_.pattern) ? 0 : 2 * message / ranks);
      break;
    case AllReduceAlgorithm::kReference:
      traffic.exchange_read_bytes = ranks * message;
      traffic.exchange_write_bytes = message;
      break;
    default:
      traffic.exchange_read_bytes = 2 * message;
      traffic.exchange_write_bytes = 2 * message;
  }
  return traffic;
}

std::string RankTensors::difference(const std::byte* got, const std::byte* expected) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const RankTensor& tensor = tensors_[i];
    if (!tensor.is_output) continue;
    // Bytes after the end of a tensor are poison on both sides.
    const std::byte* const begin = got + offsets_[i];
    const std::byte* const end = begin + aligned(tensor.size_bytes());
    const auto [at, wanted] = std::mismatch(begin, end, expected + offsets_[i]);
    if (at == end) continue;
    const auto place = static_cast<uint64_t>(at - begin);
    if (place >= tensor.size_bytes()) {
      return fmt::format("{}: something was written after its end", tensor.name);
    }
    return fmt::format("{}: byte {} is {:#04x}, not {:#04x}", tensor.name, place,
                       std::to_integer<int>(*at), std::to_integer<int>(*wanted));
  }
  return "";
}

std::string RankTensors::distance(const std::byte* got, const std::byte* expected) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const RankTensor& tensor = tensors_[i];
    if (!tensor.is_output) continue;
    const auto floats = [&](const std::byte* from) {
      return to_floats({from + offsets_[i], tensor.size_bytes()}, tensor.view.dtype);
    };
    const std::vector<float> values = floats(got);
    const std::vector<float> wanted = floats(expected);
    double largest = 0;
    for (const float value : wanted) largest = std::max(largest, std::abs(double{value}));
    const double bound = ranks_ * unit_in_last_place(tensor.view.dtype) * largest;
    for (size_t at = 0; at < values.size(); ++at) {
      if (std::abs(double{values[at]} - double{wanted[at]}) <= bound) continue;
      return fmt::format("{}: value {} is {}, not within {:.3g} of {}", tensor.name, at, values[at],
                         bound, wanted[at]);
    }
    return "";
  }
  return "";
}

bool RankTensors::has_first_row_of(const std::byte* outputs, const RankTensors& other,
                                   const std::byte* others) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const RankTensor& tensor = tensors_[i];
    const bool has_rows = tensor.view.rank == 2 && tensor.view.shape[0] == problem_.tokens;
    if (!tensor.is_output || !has_rows) continue;
    const uint64_t row_bytes = tensor.size_bytes() / static_cast<uint64_t>(problem_.tokens);
    if (std::memcmp(outputs + offsets_[i], others + other.offsets_[i], row_bytes) != 0) {
      return false;
    }
  }
  return true;
}

std::vector<std::byte> reference_outputs(const AllReduceProblem& problem, int ranks) {
  AllReduceProblem reference = problem;
  reference.algorithm = AllReduceAlgorithm::kReference;
  reference.exactness = AllReduceExactness::kExact;
  AllReduceWorkspaceOptions options;
  options.element = problem.element;
  options.oneshot_bytes = 1;
  options.twoshot_bytes = message_bytes(problem);
  options.deadline = std::chrono::minutes(10);  // Ranks may share few cores.
  std::vector<AllReduceWorkspace> workspaces = AllReduceWorkspace::create_local(ranks, options);
  const std::unique_ptr<Machine> host = open_host();
  std::vector<std::vector<std::byte>> inputs;
  std::vector<std::vector<std::byte>> outputs;
  std::vector<AllReduceArgs> args;
  for (int rank = 0; rank < ranks; ++rank) {
    const RankTensors tensors(problem, ranks, rank);
    inputs.emplace_back(tensors.input_bytes());
    outputs.emplace_back(tensors.output_bytes(), std::byte{kPoison});
    tensors.fill_inputs(*host, inputs.back().data());
    args.push_back(tensors.args(inputs.back().data(), outputs.back().data(), {}));
  }
  allreduce_virtual_ranks(workspaces, reference, args);
  return std::move(outputs.front());
}

}  // namespace narrowfloat::cli
