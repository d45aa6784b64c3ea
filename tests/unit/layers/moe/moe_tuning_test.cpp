// Files of token tiles, the choice between them and the rule, and layers that take them.
#include "narrowfloat/moe_tuning.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

MoeConfig layer_config() {
  MoeConfig config;
  config.hidden = 64;
  config.inter = 32;
  config.routing.experts = 8;
  config.routing.top_k = 2;
  config.local_experts = 8;
  return config;
}

MoeTuningEntry entry_for(const MoeConfig& config, int64_t first, int64_t last, int32_t tile) {
  return {.key = moe_tuning_key(config),
          .first_tokens = first,
          .last_tokens = last,
          .token_tile = tile,
          .rule_tile = 8,
          .us = 1.25,
          .rule_us = 2.5};
}

ErrorKind kind_of(const std::string& text) {
  try {
    (void)MoeTuning::parse(text);
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "accepted: " << text;
  return ErrorKind::kDevice;
}

std::string with(const std::string& text, const std::string& old, const std::string& fresh) {
  const size_t at = text.find(old);
  EXPECT_NE(at, std::string::npos) << old;
  return text.substr(0, at) + fresh + text.substr(at + old.size());
}

TEST(MoeTuning, AFileReadAndWrittenAgainIsTheSame) {
  const MoeConfig config = layer_config();
  const MoeTuning tuning({entry_for(config, 4, 7, 32), entry_for(config, 8, 8, 16)});
  const std::string text = tuning.to_json();
  const MoeTuning again = MoeTuning::parse(text);
  EXPECT_EQ(again.to_json(), text);
  ASSERT_EQ(again.entries().size(), 2);
  EXPECT_EQ(again.entries()[0].key, moe_tuning_key(config));
  EXPECT_EQ(again.entries()[0].last_tokens, 7);
  EXPECT_EQ(again.entries()[1].token_tile, 16);
  EXPECT_EQ(again.entries()[1].rule_us, 2.5);
  EXPECT_EQ(MoeTuning::parse(MoeTuning().to_json()).entries().size(), 0);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 8) << "an entry a line";
}

TEST(MoeTuning, MalformedFilesAreRefused) {
  const std::string text = MoeTuning({entry_for(layer_config(), 4, 7, 32)}).to_json();
  const std::vector<std::string> malformed{
      "",
      "[]",
      "{}",
      with(text, "narrowfloat moe tuning", "something else"),
      with(text, "\"format_version\": 2", "\"format_version\": 1"),
      with(text, "\"format_version\": 2", "\"format_version\": 3"),
      with(text, "\"entries\": [", "\"entries\": [7,"),
      with(text, "\"hidden\":64,", ""),
      with(text, "\"hidden\":64", "\"hidden\":\"64\""),
      with(text, "\"hidden\":64", "\"hidden\":-64"),
      with(text, "\"hidden\":64", "\"hidden\":6.5"),
      with(text, "\"hidden\":64", "\"hidden\":64,\"depth\":1"),
      with(text, "\"hidden\":64", "\"hidden\":64,\"hidden\":64"),
      with(text, "\"mode\":\"bf16\"", "\"mode\":\"int3\""),
      with(text, "\"activation\":\"swiglu\",", ""),
      with(text, "\"activation\":\"swiglu\"", "\"activation\":\"swish\""),
      with(text, "\"token_tile\":32", "\"token_tile\":24"),
      with(text, "\"token_tile\":32", "\"token_tile\":4096"),
      with(text, "\"first_tokens\":4", "\"first_tokens\":8"),
      with(text, "\"first_tokens\":4", "\"first_tokens\":0"),
      with(text, "\"us\":1.25", "\"us\":0"),
      with(text, "\"us\":1.25", "\"us\":2.45"),  // Not by the margin.
      text.substr(0, text.size() / 2),
  };
  for (const std::string& one : malformed) EXPECT_EQ(kind_of(one), ErrorKind::kCorruptData) << one;
}

TEST(MoeTuning, AFileThatDoesNotNameTheActivationSaysSo) {
  const std::string text = MoeTuning({entry_for(layer_config(), 4, 7, 32)}).to_json();
  std::string old = with(text, "\"format_version\": 2", "\"format_version\": 1");
  old = with(old, "\"activation\":\"swiglu\",", "");
  try {
    (void)MoeTuning::parse(old);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("activation"), std::string::npos) << error.what();
  }
}

TEST(MoeTuning, EntriesMustNotOverlap) {
  const MoeConfig config = layer_config();
  EXPECT_THROW(MoeTuning({entry_for(config, 4, 7, 32), entry_for(config, 7, 9, 16)}), Error);
  MoeTuningEntry other = entry_for(config, 7, 9, 16);
  other.key.mode = MoeMode::kMxfp8;
  EXPECT_EQ(MoeTuning({entry_for(config, 4, 7, 32), other}).entries().size(), 2);
}

TEST(MoeTuning, AMissingFileIsAnIoError) {
  try {
    (void)MoeTuning::load("/there/is/no/such/file.json");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
  }
}

TEST(TokenTileChoice, TheConfigurationComesFirstThenTheEntryThenTheRule) {
  MoeConfig config = layer_config();
  const MoeTuning tuning({entry_for(config, 4, 7, 32)});
  EXPECT_EQ(choose_token_tile(config, 7, {}, tuning).token_tile, 32);
  EXPECT_EQ(choose_token_tile(config, 7, {}, tuning).explanation.chosen, "tuned");
  const TokenTileChoice beyond = choose_token_tile(config, 8, {}, tuning);
  EXPECT_EQ(beyond.token_tile, default_token_tile(8, 2, 8));
  EXPECT_EQ(beyond.explanation.chosen, "rule");
  EXPECT_NE(beyond.explanation.candidates[1].reason.find("1 for 4 to 7 tokens"), std::string::npos);
  config.token_tile = 64;
  const TokenTileChoice fixed = choose_token_tile(config, 7, {}, tuning);
  EXPECT_EQ(fixed.token_tile, 64);
  EXPECT_EQ(fixed.explanation.chosen, "config");
  EXPECT_NE(fixed.explanation.candidates[1].reason.find("passed over"), std::string::npos);
}

TEST(TokenTileChoice, EntriesForSomethingElseAreLeftAlone) {
  const MoeConfig config = layer_config();
  std::vector<MoeTuningEntry> entries(6, entry_for(config, 1, 9, 64));
  entries[0].key.machine = "another";
  entries[1].key.version = "0.0.0";
  entries[2].key.mode = MoeMode::kNvfp4;
  entries[3].key.inter = 128;
  entries[4].key.local_experts = 4;
  entries[5].key.activation = ActivationKind::kGegluErf;
  const TokenTileChoice choice = choose_token_tile(config, 4, {}, MoeTuning(entries));
  EXPECT_EQ(choice.token_tile, default_token_tile(4, 2, 8));
  const std::string& reason = choice.explanation.candidates[1].reason;
  for (const std::string_view part :
       {"1 for machine 'another'", "1 for version 0.0.0", "1 for mode nvfp4",
        "1 for hidden size 64, intermediate 128", "1 for 4 of 8 experts, 2 a token",
        "1 for activation geglu"}) {
    EXPECT_NE(reason.find(part), std::string::npos) << part << " in " << reason;
  }
}

TEST(TunedLayer, RunsGiveTheSameBitsWithTheTilesOfATuning) {
  MoeCase layer_case(MoeMode::kNvfp4Bf16, {}, Activation::swiglu(), 1);
  const MoeLayer layer = layer_case.prepare();
  const int64_t tokens = layer_case.shape().tokens;
  MoeTuningEntry entry = entry_for(layer.config(), tokens, tokens, 64);
  const MoeLayer tuned = layer.with_tuning(MoeTuning({entry}));
  EXPECT_EQ(tuned.token_tile(tokens), 64);
  EXPECT_NE(layer.token_tile(tokens), 64);
  EXPECT_GT(tuned.max_rows(tokens), layer.max_rows(tokens));
  EXPECT_EQ(tuned.token_tile(tokens + 1), layer.token_tile(tokens + 1));
  EXPECT_EQ(tuned.weight_bytes(), layer.weight_bytes());
  EXPECT_EQ(layer_case.run(tuned).out, layer_case.run(layer).out);
}

TEST(TunedLayer, TheWorkspaceNeverDecreasesWithTheTokens) {
  MoeCase layer_case(MoeMode::kFp8Block, {}, Activation::swiglu(), 1);
  const MoeLayer layer = layer_case.prepare();
  const MoeConfig& config = layer.config();
  const MoeLayer tuned =
      layer.with_tuning(MoeTuning({entry_for(config, 3, 5, 128), entry_for(config, 90, 95, 8)}));
  EXPECT_GT(tuned.required_workspace(4), layer.required_workspace(4));
  int64_t before = 0;
  for (int64_t tokens = 1; tokens < 120; ++tokens) {
    const int64_t bytes = tuned.required_workspace(tokens);
    EXPECT_GE(bytes, before) << tokens;
    EXPECT_TRUE((tokens >= 3 && tokens <= 95) || bytes >= layer.required_workspace(tokens))
        << tokens;
    before = bytes;
  }
}

}  // namespace
}  // namespace narrowfloat::testing
