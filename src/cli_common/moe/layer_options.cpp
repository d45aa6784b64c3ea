// Values that no layer can have are refused here, so that the message names the option.
#include "cli_common/moe/layer_options.h"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

namespace narrowfloat::cli {
namespace {

constexpr int64_t kMaxRanks = 4096;

int32_t parse_token_tile(const std::string& text) {
  constexpr std::string_view kExpected = "a power of two from 1 to 1024";
  const int64_t tile = parse_count(text, 1, 1024, kExpected);
  if (std::has_single_bit(static_cast<uint64_t>(tile))) return static_cast<int32_t>(tile);
  throw Error(ErrorKind::kInvalidArgument, fmt::format("got '{}', expected {}", text, kExpected));
}

ExpertShard parse_shard(const std::string& text) {
  constexpr std::string_view kExpected =
      "R/N, rank R (from 0) of N that share the experts, such as 0/8";
  const size_t slash = std::min(text.find('/'), text.size());
  const std::string_view after = std::string_view(text).substr(std::min(slash + 1, text.size()));
  try {
    const int64_t num_ranks = parse_count(after, 1, kMaxRanks, kExpected);
    const int64_t rank =
        parse_count(std::string_view(text).substr(0, slash), 0, num_ranks - 1, kExpected);
    return {static_cast<int32_t>(rank), static_cast<int32_t>(num_ranks)};
  } catch (const Error&) {  // It quotes a part of the text.
    throw Error(ErrorKind::kInvalidArgument, fmt::format("got '{}', expected {}", text, kExpected));
  }
}

}  // namespace

std::vector<int64_t> parse_token_list(const std::string& text) {
  return parse_count_list(
      text, kMaxTokens, fmt::format("numbers of tokens such as 1,8,64, each 1 to {}", kMaxTokens));
}

std::string mode_list() {
  std::string list;
  for (const MoeModeInfo& info : all_moe_modes()) {
    list += fmt::format("{}{}", list.empty() ? "" : ", ", info.name);
  }
  return list;
}

void add_modes(CLI::App& app, std::vector<MoeMode>& modes, bool& is_all, const std::string& help) {
  const auto take = [&modes, &is_all](const std::string& text) {
    if (text == "all") {
      is_all = true;
    } else {
      modes.push_back(parse_moe_mode(text));
    }
  };
  with_words(add_repeated(app, "--mode", take, help)->option_text("MODE,..."),
             mode_list() + ", all");
}

void add_layer(CLI::App& app, LayerArguments& layer) {
  const auto parse = [](const std::string& text) {
    parse_moe_shape(text);
    return text;
  };
  add_parsed_into(app, "--shape", parse, layer.shape,
                  fmt::format("{}, or H,I,E,k: hidden and intermediate size, experts, experts a "
                              "token",
                              moe_shape_names()))
      ->required()
      ->option_text("SHAPE REQUIRED");
  add_modes(
      app, layer.modes, layer.is_all_modes,
      fmt::format(
          "May be repeated, or a list with commas; all, or of {}. Default: that of the model's own "
          "checkpoint, bf16 for H,I,E,k",
          mode_list()));
  add_parsed_into(app, "--ep", parse_shard, layer.shard,
                  "Rank R of N ranks that share the experts; default 0/1")
      ->option_text("R/N");
}

void add_tokens(CLI::App& app, std::vector<int64_t>& tokens, const std::string& defaults) {
  add_parsed_into(app, "--tokens", parse_token_list, tokens,
                  fmt::format("Tokens of a run, one case each; default {}", defaults))
      ->option_text("T,...");
}

void add_routing(CLI::App& app, std::string& routing) {
  app.add_option("--routing", routing,
                 "uniform (default), zipf, or a safetensors file with *topk_ids (I32 [T, k]) or "
                 "*router_logits ([T, E])")
      ->option_text("ROUTING");
}

void add_memory(CLI::App& app, uint64_t& max_bytes, const std::string& what) {
  add_parsed_into(app, "--max-memory", parse_bytes, max_bytes,
                  fmt::format("Memory for weights and buffers; shapes that need more {}. 0, the "
                              "default, is six tenths of what is available",
                              what))
      ->option_text("BYTES");
}

void add_token_tile(CLI::App& app, std::optional<int32_t>& token_tile) {
  add_parsed_into(app, "--token-tile", parse_token_tile, token_tile,
                  "Rows of an expert are padded to a multiple; default: by the number of tokens")
      ->option_text("N");
}

void add_fast_sums(CLI::App& app, bool& fast_sums) {
  app.add_flag("--fast-sums", fast_sums,
               "GEMMs of a CPU sum as fast as it can, not with the same bytes on every CPU")
      ->option_text(" ");
}

void add_tuning(CLI::App& app, std::string& tuning) {
  app.add_option("--tuning", tuning,
                 "Token tiles of a file that moe tune wrote, where it has some for this layer")
      ->option_text("FILE");
}

}  // namespace narrowfloat::cli
