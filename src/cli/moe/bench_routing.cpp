// Precomputed ids come with weight 1: the time does not depend on it.
#include "cli/moe/bench_routing.h"

#include <algorithm>

#include <fmt/format.h>

#include "cli/float_tensors.h"
#include "cli/moe/random_layer.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

constexpr double kZipfExponent = 1;
constexpr uint64_t kSeed = 42;
constexpr std::string_view kZipf = "zipf";
// Runs on few tokens take others each time: the same experts again and again would stay in caches.
constexpr int64_t kMinTokens = 256;

bool is_file(std::string_view kind) { return kind != "uniform" && kind != kZipf; }

const TensorInfo* find_by_ending(const SafetensorsReader& file, std::string_view ending) {
  for (const TensorInfo& tensor : file.tensors()) {
    if (tensor.name.ends_with(ending)) return &tensor;
  }
  return nullptr;
}

void check_cols(const SafetensorsReader& file, const TensorInfo& tensor, std::string_view what,
                int64_t cols) {
  if (tensor.shape.size() == 2 && tensor.shape[1] == cols) return;
  throw Error(
      ErrorKind::kCorruptData,
      fmt::format("{}: tensor '{}': expected [tokens, {}] ({}), got [{}]", printable(file.path()),
                  printable(tensor.name), cols, what, fmt::join(tensor.shape, ", ")));
}

template <typename Value>
std::vector<Value> selected_rows(const std::vector<Value>& values, int64_t cols,
                                 std::span<const int64_t> rows) {
  std::vector<Value> result;
  for (const int64_t row : rows) {
    const auto begin = values.begin() + row * cols;
    result.insert(result.end(), begin, begin + cols);
  }
  return result;
}

}  // namespace

BenchRouting::BenchRouting(const std::string& kind, const RoutingConfig& config, int64_t tokens,
                           int32_t shape_experts)
    : config_(config) {
  const int64_t wanted = std::max(tokens, kMinTokens);
  if (is_file(kind)) {
    read_file(kind, wanted, shape_experts);
    if (this->tokens() >= tokens) return;
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--routing {}: it routes {} tokens, --tokens asks for {}",
                            printable(kind), this->tokens(), tokens));
  }
  logits_ = random_logits(wanted, config.experts, kind == kZipf ? kZipfExponent : 0, kSeed);
}

int64_t BenchRouting::tokens() const {
  return ids_.empty() ? static_cast<int64_t>(logits_.size()) / config_.experts
                      : static_cast<int64_t>(ids_.size()) / config_.top_k;
}

void BenchRouting::read_file(const std::string& path, int64_t tokens, int32_t shape_experts) {
  const SafetensorsReader file(path);
  if (const TensorInfo* ids = find_by_ending(file, "topk_ids")) {
    read_ids(file, *ids, tokens);
    const int64_t largest = ids_.empty() ? -1 : *std::max_element(ids_.begin(), ids_.end());
    return require_experts(path, largest + 1, shape_experts);
  }
  const TensorInfo* logits = find_by_ending(file, "router_logits");
  if (logits == nullptr) {
    throw Error(
        ErrorKind::kCorruptData,
        fmt::format("{}: there is neither a tensor *topk_ids nor *router_logits", printable(path)));
  }
  check_cols(file, *logits, "experts", shape_experts);
  require_experts(path, shape_experts, shape_experts);
  const int64_t rows = std::min(tokens, logits->shape[0]);
  const auto elements = static_cast<uint64_t>(rows * config_.experts);
  logits_ = read_floats(file, *logits, elements * static_cast<uint64_t>(bits(logits->dtype)) / 8);
}

void BenchRouting::read_ids(const SafetensorsReader& file, const TensorInfo& tensor,
                            int64_t tokens) {
  check_cols(file, tensor, "experts a token", config_.top_k);
  if (tensor.dtype != DType::kI32) {
    throw Error(ErrorKind::kCorruptData,
                fmt::format("{}: tensor '{}': expected I32, got {}", printable(file.path()),
                            printable(tensor.name), name(tensor.dtype)));
  }
  const int64_t rows = std::min(tokens, tensor.shape[0]);
  ids_.resize(static_cast<size_t>(rows * config_.top_k));
  file.read(tensor, 0, std::as_writable_bytes(std::span(ids_)));
}

void BenchRouting::require_experts(const std::string& path, int64_t experts,
                                   int32_t shape_experts) const {
  if (experts <= config_.experts) return;
  const std::string_view remedy = config_.experts < shape_experts && experts <= shape_experts
                                      ? "fit; see --max-memory, --ep"
                                      : "are in the layer";
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("--routing {}: the file routes to {} experts, only {} {}",
                          printable(path), experts, config_.experts, remedy));
}

Routing BenchRouting::range(int64_t begin, int64_t count) const {
  Routing routing;
  if (ids_.empty()) {
    routing.logits = TensorView::contiguous(logits_.data() + begin * config_.experts, DType::kF32,
                                            {count, config_.experts});
  } else {
    routing.ids = TensorView::contiguous(ids_.data() + begin * config_.top_k, DType::kI32,
                                         {count, config_.top_k});
  }
  return routing;
}

Routing BenchRouting::of(std::span<const int64_t> tokens, BenchRouting& copy) const {
  copy.config_ = config_;
  copy.logits_.clear();
  copy.ids_.clear();
  if (ids_.empty()) {
    copy.logits_ = selected_rows(logits_, config_.experts, tokens);
  } else {
    copy.ids_ = selected_rows(ids_, config_.top_k, tokens);
  }
  return copy.range(0, static_cast<int64_t>(tokens.size()));
}

void check_routing(const std::string& kind, const RoutingConfig& config, int64_t tokens,
                   int32_t shape_experts) {
  if (is_file(kind)) BenchRouting(kind, config, tokens, shape_experts);
}

}  // namespace narrowfloat::cli
