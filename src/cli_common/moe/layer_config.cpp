// The table of shapes is data: a new model is a line.
#include "cli_common/moe/layer_config.h"

#include <algorithm>
#include <array>
#include <charconv>

#include <fmt/format.h>

#include "cli_common/moe/random_weights.h"
#include "cli_common/output.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

constexpr int64_t kMaxShapeExtent = 1 << 20;
constexpr int64_t kMaxShapeExperts = 4096;

// A family is how a model routes and activates, where it is not softmax, renormalised, and SwiGLU.
enum class Family { kPlain, kDeepSeek, kKimi, kGptOss, kLlama4 };

struct NamedShape {
  std::string_view name;
  int64_t hidden, inter;
  int32_t experts, top_k;
  MoeMode mode;
  Family family = Family::kPlain;
};
constexpr std::array kShapes = {
    NamedShape{"deepseek-v3", 7168, 2048, 256, 8, MoeMode::kFp8Block, Family::kDeepSeek},
    NamedShape{"kimi-k2", 7168, 2048, 384, 8, MoeMode::kFp8Block, Family::kKimi},
    NamedShape{"gpt-oss-20b", 2880, 2880, 32, 4, MoeMode::kMxfp4Bf16, Family::kGptOss},
    NamedShape{"gpt-oss-120b", 2880, 2880, 128, 4, MoeMode::kMxfp4Bf16, Family::kGptOss},
    NamedShape{"qwen3-30b-a3b", 2048, 768, 128, 8, MoeMode::kBf16},
    NamedShape{"mixtral-8x7b", 4096, 14336, 8, 2, MoeMode::kBf16},
    NamedShape{"llama-4-scout", 5120, 8192, 16, 1, MoeMode::kBf16, Family::kLlama4},
    NamedShape{"llama-4-maverick", 5120, 8192, 128, 1, MoeMode::kBf16, Family::kLlama4},
};

[[noreturn]] void refuse_shape(std::string_view text, std::string_view reason) {
  throw Error(
      ErrorKind::kInvalidArgument,
      fmt::format("got '{}', expected one of {}, or four numbers H,I,E,k such as "
                  "1024,512,32,4 (hidden and intermediate size, experts, experts a token){}",
                  text, moe_shape_names(), reason));
}

MoeShape shape_of(const NamedShape& named) {
  MoeShape shape;
  shape.name = named.name;
  shape.hidden = named.hidden;
  shape.inter = named.inter;
  shape.routing.experts = named.experts;
  shape.routing.top_k = named.top_k;
  shape.mode = named.mode;
  switch (named.family) {
    case Family::kPlain:
      break;
    case Family::kDeepSeek:
      shape.routing.method = RoutingMethod::kDeepSeekV3;
      shape.routing.n_group = 8;
      shape.routing.topk_group = 4;
      shape.routing.routed_scale = 2.5F;
      break;
    case Family::kKimi:
      shape.routing.method = RoutingMethod::kDeepSeekV3;
      shape.routing.routed_scale = 2.827F;
      break;
    case Family::kGptOss:
      shape.activation = Activation::swiglu_oai(1.702F, 1.0F, 7.0F);
      shape.gate_order = GateOrder::kInterleaved;
      shape.has_bias = true;
      break;
    case Family::kLlama4:
      shape.routing.method = RoutingMethod::kLlama4;
      shape.weight_on_input = true;
      break;
  }
  return shape;
}

std::vector<int64_t> parse_numbers(std::string_view text) {
  std::vector<int64_t> numbers;
  const char* const end = text.data() + text.size();
  for (const char* at = text.data(); at != end;) {
    int64_t value = 0;
    const auto result = std::from_chars(at, end, value);
    if (result.ec != std::errc{} || value < 1) refuse_shape(text, "");
    numbers.push_back(value);
    at = result.ptr;
    if (at != end && (*at != ',' || ++at == end)) refuse_shape(text, "");
  }
  return numbers;
}

// The bytes of a run's buffers: sums of the first GEMM, intermediate and slot results of every row.
double buffer_bytes(const MoeConfig& config, int64_t tokens) {
  const auto slots = static_cast<double>(tokens * config.routing.top_k);
  const auto width =
      static_cast<double>(2 * config.inter * 8 + config.inter * 4 + config.hidden * 4);
  return slots * width + static_cast<double>(tokens * config.hidden * 8);
}

// Groups need at least two experts each, and the kept ones k together.
void fit_groups(RoutingConfig& routing) {
  if (routing.n_group <= 1) return;
  const int32_t per_group = routing.experts / routing.n_group;
  const bool fits = routing.experts % routing.n_group == 0 && per_group >= 2 &&
                    per_group * routing.topk_group >= routing.top_k;
  if (!fits) routing.n_group = routing.topk_group = 1;
}

void check_extents(const MoeShape& shape, const MoeModeInfo& mode, const ExpertShard& shard) {
  if (shape.hidden % mode.multiple != 0 || shape.inter % mode.multiple != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--mode {}: hidden and intermediate size must be multiples of {}, {} "
                            "has {} and {}",
                            mode.name, mode.multiple, shape.name, shape.hidden, shape.inter));
  }
  if (shape.routing.experts % shard.num_ranks != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--ep {}/{}: the {} experts of {} cannot be shared evenly", shard.rank,
                            shard.num_ranks, shape.routing.experts, shape.name));
  }
}

}  // namespace

std::string moe_shape_names() {
  std::string names;
  for (const NamedShape& shape : kShapes) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", shape.name);
  }
  return names;
}

MoeShape parse_moe_shape(std::string_view text) {
  for (const NamedShape& shape : kShapes) {
    if (shape.name == text) return shape_of(shape);
  }
  const std::vector<int64_t> numbers = parse_numbers(text);
  if (numbers.size() != 4) refuse_shape(text, "");
  if (numbers[0] > kMaxShapeExtent || numbers[1] > kMaxShapeExtent ||
      numbers[2] > kMaxShapeExperts) {
    refuse_shape(text, fmt::format("; at most {}, {}, {}", kMaxShapeExtent, kMaxShapeExtent,
                                   kMaxShapeExperts));
  }
  if (numbers[3] > numbers[2]) refuse_shape(text, "; k is at most E");
  MoeShape shape;
  shape.name = text;
  shape.hidden = numbers[0];
  shape.inter = numbers[1];
  shape.routing.experts = static_cast<int32_t>(numbers[2]);
  shape.routing.top_k = static_cast<int32_t>(numbers[3]);
  return shape;
}

std::vector<MoeMode> modes_of(const LayerArguments& layer, const MoeShape& shape, Device device,
                              std::vector<std::string>& notes) {
  const std::vector<MoeMode>& named = layer.modes;
  if (named.empty() && !layer.is_all_modes) return {shape.mode};
  std::vector<MoeMode> modes;
  for (const MoeModeInfo& info : all_moe_modes()) {
    const bool is_named = std::find(named.begin(), named.end(), info.id) != named.end();
    const bool fits = shape.hidden % info.multiple == 0 && shape.inter % info.multiple == 0;
    const bool is_here = device.type == DeviceType::kCpu || !info.is_on_cpu_alone;
    if (is_named || (layer.is_all_modes && fits && is_here)) {
      modes.push_back(info.id);
    } else if (layer.is_all_modes && !is_here) {
      notes.push_back(fmt::format("{}: left out, it runs on the CPU only", info.name));
    } else if (layer.is_all_modes) {
      notes.push_back(
          fmt::format("{}: left out, hidden and intermediate size must be multiples "
                      "of {}",
                      info.name, info.multiple));
    }
  }
  return modes;
}

uint64_t memory_limit(uint64_t asked_for, const Machine& machine) {
  // The rest is for the system and for this program.
  constexpr double kMemoryShare = 0.6;
  if (asked_for > 0) return asked_for;
  return static_cast<uint64_t>(static_cast<double>(machine.facts().memory_bytes) * kMemoryShare);
}

MoeConfig layer_config(const MoeShape& shape, MoeMode mode, const ExpertShard& shard,
                       int64_t max_tokens, uint64_t max_bytes) {
  check_extents(shape, moe_mode_info(mode), shard);
  MoeConfig config;
  config.hidden = shape.hidden;
  config.inter = shape.inter;
  config.mode = mode;
  config.activation = shape.activation;
  config.gate_order = shape.gate_order;
  config.weight_on_input = shape.weight_on_input;
  config.routing = shape.routing;
  config.local_experts = 1;
  const double for_weights = static_cast<double>(max_bytes) - buffer_bytes(config, max_tokens);
  const double each = 2 * RandomWeights::bytes(config);  // As made, and packed.
  const int32_t wanted = shape.routing.experts / shard.num_ranks;
  const int32_t fewest = (shape.routing.top_k + shard.num_ranks - 1) / shard.num_ranks;
  const auto affordable = static_cast<int64_t>(std::max(for_weights, 0.0) / each);
  if (affordable < fewest) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--shape {}: even {} experts in mode {} need {}, more than the {} that "
                            "may be used; see --max-memory, --tokens and --ep",
                            shape.name, fewest, name(mode),
                            format_bytes(static_cast<uint64_t>(fewest * each +
                                                               buffer_bytes(config, max_tokens))),
                            format_bytes(max_bytes)));
  }
  config.local_experts = static_cast<int32_t>(std::min<int64_t>(affordable, wanted));
  const int32_t groups = std::max(config.routing.n_group, 1);
  // Whole groups, so that the router stays the model's.
  if (config.local_experts < wanted && config.local_experts * shard.num_ranks > 2 * groups &&
      groups % shard.num_ranks == 0) {
    config.local_experts -= config.local_experts % (groups / shard.num_ranks);
  }
  config.routing.experts = config.local_experts * shard.num_ranks;
  config.expert_offset = config.local_experts * shard.rank;
  fit_groups(config.routing);
  return config;
}

}  // namespace narrowfloat::cli
