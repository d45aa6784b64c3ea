// The commands of narrowfloat-bench. Each function declares one: its options, and what runs where
// it is chosen. Commands print to stdout and stderr, return the exit code of what they found, and
// throw narrowfloat::Error.
#pragma once

namespace narrowfloat::cli {

struct Commands;

void add_allreduce(const Commands& commands);
void add_bench(const Commands& commands);
void add_ep_model(const Commands& commands);
void add_eval(const Commands& commands);
void add_expert_parallel(const Commands& commands);
void add_moe_run(const Commands& commands);
void add_moe_bench(const Commands& commands);
void add_moe_gemm(const Commands& commands);

}  // namespace narrowfloat::cli
