// Options that the commands about Mixture-of-Experts layers share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli_common/command_line.h"
#include "cli_common/moe/layer_config.h"

namespace narrowfloat::cli {

constexpr int64_t kMaxTokens = 1 << 20;
// "1,8,64".
std::vector<int64_t> parse_token_list(const std::string& text);

// "bf16, fp8_tensor, ...".
std::string mode_list();
// --mode, which may be repeated; the word "all" sets `is_all`.
void add_modes(CLI::App& app, std::vector<MoeMode>& modes, bool& is_all, const std::string& help);
// --shape, --mode, --ep.
void add_layer(CLI::App& app, LayerArguments& layer);
void add_tokens(CLI::App& app, std::vector<int64_t>& tokens, const std::string& defaults);
void add_routing(CLI::App& app, std::string& routing);
// --max-memory; `what` says what becomes of shapes that need more.
void add_memory(CLI::App& app, uint64_t& max_bytes, const std::string& what);
void add_token_tile(CLI::App& app, std::optional<int32_t>& token_tile);
void add_fast_sums(CLI::App& app, bool& fast_sums);
void add_tuning(CLI::App& app, std::string& tuning);

}  // namespace narrowfloat::cli
