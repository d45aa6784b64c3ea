// See gpu_moe.h: what a result on a GPU is judged by.
#include <algorithm>
#include <cmath>

#include "cli_common/moe/figures.h"
#include "support/gpu_moe.h"
#include "support/moe_batch.h"

namespace narrowfloat::testing {
namespace {

void expect_near(std::string_view what, const cli::Distance& bound,
                 const std::vector<uint8_t>& reference, const std::vector<uint8_t>& actual,
                 const MoeConfig& config, DType dtype) {
  ASSERT_EQ(reference.size(), actual.size()) << what;
  const std::vector<float> expected = as_floats(reference, dtype);
  const std::vector<float> found = as_floats(actual, dtype);
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::isfinite(expected[i]), std::isfinite(found[i])) << what << " element " << i;
  }
  const Distance apart = distance(found, expected, config.hidden);
  const auto rows = static_cast<int64_t>(expected.size()) / config.hidden;
  EXPECT_TRUE(cli::is_within({apart.rel, apart.row}, bound, rows))
      << what << " of " << rows << " rows: rel " << apart.rel << ", of a row " << apart.row
      << "; the bounds are " << bound.rel << " and " << bound.row;
}

}  // namespace

void expect_close(const MoeCase& layer_case, const MoeConfig& config, const MoeResult& reference,
                  const MoeResult& actual) {
  EXPECT_EQ(actual.topk_ids, reference.topk_ids);
  EXPECT_EQ(actual.slot_to_row, reference.slot_to_row);
  EXPECT_EQ(actual.expert_weights, reference.expert_weights);
  // A flipped code weighs more in short rows.
  const auto inter = static_cast<double>(layer_case.shape().inter);
  const double width = std::max(1.0, std::sqrt(512.0 / inter));
  cli::Distance bound = cli::tolerance(config.mode);
  bound.row *= width;
  bound.rel = std::min(bound.row, bound.rel * width);
  expect_near("slot rows", bound, reference.slot_rows, actual.slot_rows, config, config.slot_dtype);
  expect_near("out", bound, reference.out, actual.out, config, config.out_dtype);
}

void expect_batch_close(const MoeCase& layer_case, const MoeLayer& layer, const MoeResult& oracle,
                        const MoeResult& result) {
  const MoeConfig& config = layer.config();
  const int64_t slots = config.routing.top_k + config.routing.shared_experts;
  const auto tokens_of = [&](const MoeResult& of) {
    return static_cast<int64_t>(of.topk_ids.size()) / (4 * slots);
  };
  const int64_t tokens = tokens_of(result);
  const int64_t own = std::min(tokens, tokens_of(oracle));
  EXPECT_TRUE(result.slot_to_row ==
              permuted_rows(result.topk_ids, config, layer.token_tile(tokens)));
  expect_periodic(result, tokens, own);
  const MoeResult first = with_tokens(result, layer, own);
  expect_close(layer_case, config, with_tokens(oracle, layer, own), first);
  EXPECT_TRUE(combined_slots(first, config) == first.out);
}

}  // namespace narrowfloat::testing
