// Precomputed ids come with weight 1: the time does not depend on it.
#include "cli/moe/bench_routing.h"

#include <algorithm>

#include <fmt/format.h>

#include "cli/float_tensors.h"
#include "cli/moe/random_layer.h"
#include "narrowfloat/error.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

constexpr double kZipfExponent = 1;
constexpr uint64_t kSeed = 42;
// Runs on few tokens take others each time: the same experts again and again would stay in caches.
constexpr int64_t kMinRandomTokens = 256;

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

BenchRouting::BenchRouting(const std::string& kind, const RoutingConfig& config, int64_t tokens)
    : config_(config) {
  if (kind == "uniform") {
    logits_ = random_logits(std::max(tokens, kMinRandomTokens), config.experts, 0, kSeed);
  } else if (kind == "zipf") {
    logits_ =
        random_logits(std::max(tokens, kMinRandomTokens), config.experts, kZipfExponent, kSeed);
  } else {
    read_file(kind);
    if (this->tokens() >= tokens) return;
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--routing {}: it routes {} tokens, --tokens asks for {}",
                            printable(kind), this->tokens(), tokens));
  }
}

int64_t BenchRouting::tokens() const {
  return ids_.empty() ? static_cast<int64_t>(logits_.size()) / config_.experts
                      : static_cast<int64_t>(ids_.size()) / config_.top_k;
}

void BenchRouting::read_file(const std::string& path) {
  const SafetensorsReader file(path);
  if (const TensorInfo* ids = find_by_ending(file, "topk_ids")) {
    check_cols(file, *ids, "experts a token", config_.top_k);
    if (ids->dtype != DType::kI32) {
      throw Error(ErrorKind::kCorruptData,
                  fmt::format("{}: tensor '{}': expected I32, got {}", printable(path),
                              printable(ids->name), name(ids->dtype)));
    }
    ids_.resize(static_cast<size_t>(ids->num_elements()));
    file.read(*ids, 0, std::as_writable_bytes(std::span(ids_)));
    return;
  }
  const TensorInfo* logits = find_by_ending(file, "router_logits");
  if (logits == nullptr) {
    throw Error(
        ErrorKind::kCorruptData,
        fmt::format("{}: there is neither a tensor *topk_ids nor *router_logits", printable(path)));
  }
  check_cols(file, *logits, "experts", config_.experts);
  logits_ = read_floats(file, *logits);
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

}  // namespace narrowfloat::cli
