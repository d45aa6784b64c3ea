// Every row of allreduce_golden.txt, whose first lines describe the inputs and the rows: the model
// that the tests of the all-reduce compare with is judged by an independent generator.
#include <array>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "support/allreduce_golden.h"

namespace narrowfloat::testing {
namespace {

struct Case {
  std::string header;
  int64_t hidden = 0;
  int64_t token = 0;
  int ranks = 0;
  std::map<std::string, std::string> rows;
};

std::vector<Case> read_cases() {
  std::ifstream file(NARROWFLOAT_SOURCE_DIR "/tests/golden/allreduce_golden.txt");
  std::vector<Case> cases;
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    Case next{.header = line};
    std::string word;
    char equals = 0;
    std::istringstream text(line);
    text >> word;
    if (word == "case") {
      char name = 0;
      text >> name >> equals >> next.hidden >> name >> equals >> next.token >> name >> equals >>
          next.ranks;
      EXPECT_FALSE(text.fail()) << line;
      cases.push_back(next);
      continue;
    }
    // The label, at least two blanks, the entries.
    const size_t end = line.find("  ");
    const size_t first = line.find_first_not_of(' ', end);
    if (end == std::string::npos || first == std::string::npos || cases.empty()) {
      ADD_FAILURE() << "unknown line: " << line;
      continue;
    }
    cases.back().rows[line.substr(0, end)] = line.substr(first);
  }
  return cases;
}

// gen(id, i) of the file.
uint16_t generated(uint32_t id, uint32_t i) {
  uint32_t u = i * 2654435761U + id * 0x9E3779B9U + 12345U;
  u ^= u >> 15;
  u *= 0x85EBCA6BU;
  u ^= u >> 13;
  u *= 0xC2B2AE35U;
  u ^= u >> 16;
  return static_cast<uint16_t>((u >> 31 << 15) | ((118U + (u >> 24 & 7U)) << 7) |
                               (u >> 16 & 0x7FU));
}

std::vector<uint8_t> generated_tensor(uint32_t id, int64_t count) {
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = generated(id, static_cast<uint32_t>(i));
    bytes.push_back(static_cast<uint8_t>(bits));
    bytes.push_back(static_cast<uint8_t>(bits >> 8));
  }
  return bytes;
}

constexpr int64_t kTokens = 2;

int group_of(int64_t hidden) { return hidden == 32 ? 32 : hidden == 2880 ? 64 : 128; }

GoldenInputs inputs_of(const Case& golden, AllReducePattern pattern,
                       AllReduceAccumulation accumulation = AllReduceAccumulation::kFp32) {
  GoldenInputs in;
  in.problem.tokens = kTokens;
  in.problem.hidden = golden.hidden;
  in.problem.pattern = pattern;
  in.problem.accumulation = accumulation;
  in.problem.scale_layout = ScaleLayoutId::kLinear;
  for (int rank = 0; rank < golden.ranks; ++rank) {
    in.ranks.push_back(
        {.input = generated_tensor(static_cast<uint32_t>(rank), kTokens * golden.hidden)});
  }
  in.residual = generated_tensor(100, kTokens * golden.hidden);
  in.gamma = generated_tensor(200, golden.hidden);
  in.global_scale = pattern == AllReducePattern::kFp8 ? 0.0123F : 97.5F;
  if (pattern == AllReducePattern::kFp8Group) {
    in.problem.group = group_of(golden.hidden);
    in.scale_words = golden_group_words(kTokens, golden.hidden / in.problem.group, false);
  }
  return in;
}

// At most 16 entries of `width` bytes and the hash of all, as the file shows them.
std::string shown(const std::vector<uint8_t>& row, size_t width, bool has_hash = true) {
  std::string text;
  std::array<char, 32> buffer{};
  for (size_t i = 0; i < row.size() / width; ++i) {
    if (i == 16) {
      text += "... ";
      break;
    }
    for (size_t byte = width; byte-- > 0;) {
      std::snprintf(buffer.data(), buffer.size(), "%02x", row[i * width + byte]);
      text += buffer.data();
    }
    text += " ";
  }
  text.pop_back();
  if (!has_hash) return text;
  uint64_t hash = 14695981039346656037U;
  for (const uint8_t byte : row) hash = (hash ^ byte) * 1099511628211U;
  std::snprintf(buffer.data(), buffer.size(), "   fnv %016llx",
                static_cast<unsigned long long>(hash));
  return text + buffer.data();
}

// The bytes of one of the two tokens.
std::vector<uint8_t> of_token(const std::vector<uint8_t>& tensor, int64_t token) {
  const auto half = static_cast<std::ptrdiff_t>(tensor.size() / kTokens);
  return {tensor.begin() + token * half, tensor.begin() + (token + 1) * half};
}

std::string bits_of(float value) {
  std::array<char, 16> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%08x", float_bits(value));
  return buffer.data();
}

// The exponents of a token's groups, unpacked from their words.
std::vector<uint8_t> exponents_of(const Case& golden, const std::vector<uint8_t>& words) {
  std::vector<uint8_t> exponents;
  for (int64_t group = 0; group < golden.hidden / group_of(golden.hidden); ++group) {
    const int64_t word = group / 4 * 4 + golden.token;
    exponents.push_back(words[static_cast<size_t>(4 * word + group % 4)]);
  }
  return exponents;
}

std::map<std::string, std::string> computed_rows(const Case& golden) {
  const auto run = [&](AllReducePattern pattern,
                       AllReduceAccumulation accumulation = AllReduceAccumulation::kFp32) {
    return allreduce_golden(inputs_of(golden, pattern, accumulation));
  };
  const auto token = static_cast<size_t>(golden.token);
  std::map<std::string, std::string> rows;
  const auto row = [&](const std::vector<uint8_t>& tensor, size_t width) {
    return shown(of_token(tensor, golden.token), width);
  };
  const GoldenOutputs fp8 = run(AllReducePattern::kFp8);
  rows["sum acc=fp32"] = row(fp8.ar_out, 2);
  rows["sum acc=element"] =
      row(run(AllReducePattern::kAllReduce, AllReduceAccumulation::kElement).ar_out, 2);
  rows["residual_out"] = row(fp8.residual_out, 2);
  rows["sum of squares"] = bits_of(fp8.sums_of_squares[token]);
  rows["inverse rms"] = bits_of(fp8.inverse_rms[token]);
  rows["norm_out"] = row(fp8.norm_out, 2);
  rows["fp8 static"] = row(fp8.quant_out, 1);
  const GoldenOutputs dynamic = run(AllReducePattern::kFp8Token);
  rows["fp8 dynamic scale"] = shown(of_token(dynamic.scale_out, golden.token), 4, false);
  rows["fp8 dynamic"] = row(dynamic.quant_out, 1);
  const GoldenOutputs group = run(AllReducePattern::kFp8Group);
  rows["fp8 group exps"] = shown(exponents_of(golden, group.scale_out), 1);
  rows["fp8 group"] = row(group.quant_out, 1);
  const GoldenOutputs nvfp4 = run(AllReducePattern::kNvfp4);
  rows["nvfp4 scales"] = row(nvfp4.scale_out, 1);
  rows["nvfp4 codes"] = row(nvfp4.quant_out, 1);
  return rows;
}

TEST(AllReduceGolden, HasEveryRowOfTheFile) {
  const std::vector<Case> cases = read_cases();
  ASSERT_EQ(cases.size(), 6U);
  for (const Case& golden : cases) {
    SCOPED_TRACE(golden.header);
    const auto computed = computed_rows(golden);
    EXPECT_EQ(golden.rows.size(), computed.size());
    for (const auto& [label, text] : computed) {
      ASSERT_TRUE(golden.rows.contains(label)) << label;
      // A remark may follow the value.
      const std::string expected = golden.rows.at(label);
      EXPECT_EQ(expected.substr(0, expected.find("   (")), text) << label;
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
