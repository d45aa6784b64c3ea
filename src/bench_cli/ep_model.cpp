// See ep_model.h.
#include "bench_cli/ep_model.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace narrowfloat::cli {
namespace {

// The expected maximum of `count` numbers of the standard normal distribution: the integral of the
// chance that it lies above x, less that of the chance that it lies below -x.
double expected_maximum(double count) {
  constexpr double kStep = 1.0 / 64;
  const auto below = [&](double x) { return std::pow(std::erfc(-x / std::sqrt(2.0)) / 2, count); };
  double sum = 0;
  for (double x = kStep / 2; x < 8; x += kStep) sum += 1 - below(x) - below(-x);
  return sum * kStep;
}

// Experts of the rank with the most of them that the tokens of all ranks choose, of which each
// token chooses a fraction. A rank's number is nearly normal, with the variance of independent
// experts; all wait for the rank with the most.
double experts_hit(double experts, double fraction, double tokens, double ranks) {
  const double chance = 1 - std::pow(1 - fraction, tokens);
  const double deviation = std::sqrt(experts * chance * (1 - chance));
  return std::min(experts, experts * chance + expected_maximum(ranks) * deviation);
}

LinkModel read_link(const Json& link) {
  return {link.at("latency_us").get<double>(), link.at("gb_per_s").get<double>()};
}

// Time that does not depend on the number of experts: where the line through the two smallest
// batches, whose experts have about one row each, meets no expert.
double fixed_us(const EpModel& model) {
  const MeasuredLayer& first = model.cases[0];
  const MeasuredLayer& second = model.cases[1];
  const double slope = (second.us - first.us) / (second.experts_hit - first.experts_hit);
  return std::max(0.0, first.us - slope * first.experts_hit);
}

// Time of an expert with `rows` rows: between measured numbers of rows a line over their
// logarithm, below them that of the fewest, beyond them in proportion to the rows.
double expert_us(const EpModel& model, double rows) {
  const double fixed = fixed_us(model);
  const auto rows_of = [&](const MeasuredLayer& layer) {
    return layer.tokens * static_cast<double>(model.top_k) / layer.experts_hit;
  };
  const auto us_of = [&](const MeasuredLayer& layer) {
    return (layer.us - fixed) / layer.experts_hit;
  };
  const std::vector<MeasuredLayer>& cases = model.cases;
  if (rows <= rows_of(cases.front())) return us_of(cases.front());
  if (rows >= rows_of(cases.back())) return us_of(cases.back()) * rows / rows_of(cases.back());
  const auto after = std::find_if(cases.begin(), cases.end(), [&](const MeasuredLayer& layer) {
    return rows_of(layer) > rows;
  });
  const MeasuredLayer& low = *(after - 1);
  const double position = std::log(rows / rows_of(low)) / std::log(rows_of(*after) / rows_of(low));
  return us_of(low) + position * (us_of(*after) - us_of(low));
}

double us(const LinkModel& link, double bytes) {
  return bytes > 0 ? link.latency_us + bytes / link.gb_per_s * 1e-3 : 0.0;
}

}  // namespace

EpModel find_ep_model(const Json& inputs, const std::string& gpu, const std::string& model,
                      const std::string& mode) {
  const Json& gpus = inputs.at("gpus");
  std::set<std::string> found;
  if (!gpus.contains(gpu)) {
    for (const auto& item : gpus.items()) found.insert(item.key());
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--gpu: got '{}', expected one of {}", gpu, fmt::join(found, ", ")));
  }
  const Json& machine = gpus.at(gpu);
  for (const Json& layer : machine.at("layers")) {
    const auto its_model = layer.at("model").get<std::string>();
    const auto its_mode = layer.at("mode").get<std::string>();
    found.insert(fmt::format("{} {}", its_model, its_mode));
    if (its_model != model || (!mode.empty() && its_mode != mode)) continue;
    EpModel result{.model = its_model,
                   .mode = its_mode,
                   .hidden = layer.at("hidden").get<int64_t>(),
                   .experts = layer.at("experts").get<int64_t>(),
                   .top_k = layer.at("top_k").get<int64_t>(),
                   .cases = {},
                   .ranks_per_host = machine.at("ranks_per_host").get<int64_t>(),
                   .host_link = read_link(machine.at("host_link")),
                   .network = read_link(machine.at("network")),
                   .quantize = read_link(machine.at("quantize")),
                   .token_sum_gb_per_s = machine.at("token_sum").at("gb_per_s").get<double>()};
    for (const Json& entry : layer.at("cases")) {
      result.cases.push_back({entry.at("tokens").get<double>(),
                              entry.at("experts_hit").get<double>(), entry.at("us").get<double>()});
    }
    return result;
  }
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("--shape, --mode: no times of '{} {}' on {}; there are {}", model, mode,
                          gpu, fmt::join(found, ", ")));
}

EpPrediction predict(const EpModel& model, int64_t ranks, int64_t tokens, const EpRows& rows) {
  EpPrediction result;
  result.local_experts = (model.experts + ranks - 1) / ranks;
  const auto num_ranks = static_cast<double>(ranks);
  const auto own_tokens = static_cast<double>(tokens);
  const auto top_k = static_cast<double>(model.top_k);
  const auto local = static_cast<double>(result.local_experts);
  const auto all_experts = static_cast<double>(model.experts);
  const double all_tokens = num_ranks * own_tokens;
  result.experts_hit = experts_hit(local, top_k / all_experts, all_tokens, num_ranks);
  const double rows_of_expert =
      all_tokens * top_k / experts_hit(all_experts, top_k / all_experts, all_tokens, 1);
  result.layer_us = fixed_us(model) + result.experts_hit * expert_us(model, rows_of_expert);

  // Rows of a token that travel to one other rank, and from there.
  const double sent = 1 - std::pow(1 - 1 / num_ranks, top_k);
  const double returned = rows.is_topk ? top_k / num_ranks : sent;
  result.ranks_of_token = (num_ranks - 1) * sent;
  const auto neighbours = static_cast<double>(std::min(ranks, model.ranks_per_host) - 1);
  const double strangers = num_ranks - 1 - neighbours;
  // Rows to ranks of the same host and to those of others travel at the same time.
  const auto exchange = [&](double rows_of_token, double row_bytes) {
    const double bytes = own_tokens * rows_of_token * row_bytes;
    return std::max(us(model.host_link, neighbours * bytes), us(model.network, strangers * bytes));
  };
  result.dispatch_us = exchange(sent, rows.dispatch_bytes);
  if (rows.is_quantized) {
    result.dispatch_us += us(model.quantize, own_tokens * static_cast<double>(2 * model.hidden));
  }
  result.combine_us = exchange(returned, rows.combine_bytes);
  if (rows.is_topk) {
    // A CTA sums the rows of a token, which takes longer than few tokens travel.
    const double sum_us = top_k * rows.combine_bytes / model.token_sum_gb_per_s * 1e-3;
    result.combine_us = std::max(result.combine_us, model.host_link.latency_us + sum_us);
  }
  return result;
}

}  // namespace narrowfloat::cli
