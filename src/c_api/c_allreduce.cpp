// All-reduce of the C API.
#include <chrono>
#include <memory>
#include <utility>

#include "c_api/boundary.h"
#include "narrowfloat/allreduce.h"
#include "narrowfloat/bootstrap.h"

struct NfAllReduce {
  narrowfloat::AllReduceWorkspace workspace;
};

namespace narrowfloat::c_api {

namespace {

AllReducePattern parse_pattern(std::string_view text) {
  std::string names;
  for (int number = 0; number < kNumAllReducePatterns; ++number) {
    const auto pattern = static_cast<AllReducePattern>(number);
    if (is_moe(pattern)) continue;
    if (name(pattern) == text) return pattern;
    names += (names.empty() ? "" : ", ") + std::string(name(pattern));
  }
  throw_invalid("call.pattern", "expected one of " + names + ", got \"" + std::string(text) + "\"");
}

std::shared_ptr<Bootstrap> bootstrap_of(const NfAllReduceOptions& given) {
  const Bootstrap::Milliseconds deadline = given.deadline_ms != 0
                                               ? Bootstrap::Milliseconds(given.deadline_ms)
                                               : Bootstrap::kDefaultDeadline;
  if (given.directory == nullptr) return make_environment_bootstrap(deadline);
  RankInfo info;
  info.rank = info.local_rank = given.rank;
  info.size = given.ranks;
  info.job_id = text_or(given.job, "");
  return make_file_bootstrap(given.directory, info, deadline);
}

AllReduceWorkspaceOptions options_of(const NfAllReduceOptions& given) {
  AllReduceWorkspaceOptions options;
  options.device = to_device("options.device", given.device);
  if (given.dtype != nullptr) options.element = to_dtype("options.dtype", given.dtype);
  options.oneshot_bytes = given.oneshot_bytes;
  options.twoshot_bytes = given.twoshot_bytes;
  if (given.deadline_ms != 0) options.deadline = std::chrono::milliseconds(given.deadline_ms);
  return options;
}

AllReduceProblem problem_of(const NfAllReduceCall& given, const TensorView& input) {
  if (input.rank != 2) {
    throw_invalid("call.input", "expected [tokens, hidden], got " + to_string(input));
  }
  AllReduceProblem problem;
  problem.tokens = input.shape[0];
  problem.hidden = input.shape[1];
  problem.element = input.dtype;
  problem.pattern = parse_pattern(text_or(given.pattern, "allreduce"));
  problem.scale_layout = parse_scale_layout(text_or(given.scale_layout, "swizzled_128x4"));
  problem.group = given.group;
  return problem;
}

AllReduceArgs args_of(const NfAllReduceCall& given, const TensorView& input) {
  AllReduceArgs args;
  args.input = input;
  args.ar_out = to_view("call.out", given.out);
  args.residual_in = to_view("call.residual_in", given.residual_in);
  args.residual_out = to_view("call.residual_out", given.residual_out);
  args.gamma = to_view("call.gamma", given.gamma);
  args.norm_out = to_view("call.norm_out", given.norm_out);
  args.quant_out = to_view("call.quant_out", given.quant_out);
  args.scale_out = to_view("call.scale_out", given.scale_out);
  args.row_scale_out = to_view("call.row_scale_out", given.row_scale_out);
  args.global_scale = to_view("call.global_scale", given.global_scale);
  if (given.eps != 0) args.eps = given.eps;
  args.weight_bias = given.weight_bias;
  return args;
}

}  // namespace

}  // namespace narrowfloat::c_api

namespace nf = narrowfloat;

int32_t nf_allreduce_create(const NfAllReduceOptions* options, NfAllReduce** group) {
  return nf::c_api::guarded([&] {
    nf::c_api::require_given("group", group);
    const NfAllReduceOptions given = nf::c_api::read_struct("options", options);
    const nf::AllReduceWorkspaceOptions wanted = nf::c_api::options_of(given);
    auto made = std::make_unique<NfAllReduce>(
        NfAllReduce{nf::AllReduceWorkspace::create(nf::c_api::bootstrap_of(given), wanted)});
    *group = made.release();
  });
}

int32_t nf_allreduce_run(NfAllReduce* group, const NfAllReduceCall* call, void* stream) {
  return nf::c_api::guarded([&] {
    nf::c_api::require_given("group", group);
    const NfAllReduceCall given = nf::c_api::read_struct("call", call);
    const nf::TensorView input = nf::c_api::to_view("call.input", given.input);
    nf::allreduce(group->workspace, nf::c_api::problem_of(given, input),
                  nf::c_api::args_of(given, input), nf::c_api::to_stream(stream));
  });
}

int32_t nf_allreduce_check(const NfAllReduce* group) {
  return nf::c_api::guarded([&] {
    nf::c_api::require_given("group", group);
    group->workspace.check_error();
  });
}

int32_t nf_allreduce_destroy(NfAllReduce* group) {
  return nf::c_api::guarded([&] {
    nf::c_api::require_given("group", group);
    group->workspace.destroy();
  });
}

void nf_allreduce_free(NfAllReduce* group) { delete group; }
