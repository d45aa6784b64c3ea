// The table is data: a new model is a line.
#include "cli/moe/shape.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <vector>

#include <fmt/format.h>

#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

constexpr int64_t kMaxShapeExtent = 1 << 20;
constexpr int64_t kMaxShapeExperts = 4096;

// How a model routes and activates, where it is not softmax, renormalised, and SwiGLU.
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

[[noreturn]] void refuse(std::string_view text, std::string_view reason) {
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
    if (result.ec != std::errc{} || value < 1) refuse(text, "");
    numbers.push_back(value);
    at = result.ptr;
    if (at != end && (*at != ',' || ++at == end)) refuse(text, "");
  }
  return numbers;
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
  if (numbers.size() != 4) refuse(text, "");
  if (numbers[0] > kMaxShapeExtent || numbers[1] > kMaxShapeExtent ||
      numbers[2] > kMaxShapeExperts) {
    refuse(text,
           fmt::format("; at most {}, {}, {}", kMaxShapeExtent, kMaxShapeExtent, kMaxShapeExperts));
  }
  if (numbers[3] > numbers[2]) refuse(text, "; k is at most E");
  MoeShape shape;
  shape.name = text;
  shape.hidden = numbers[0];
  shape.inter = numbers[1];
  shape.routing.experts = static_cast<int32_t>(numbers[2]);
  shape.routing.top_k = static_cast<int32_t>(numbers[3]);
  return shape;
}

}  // namespace narrowfloat::cli
