// Which transport a group uses: the first of an ordered list that it can have.
#pragma once

#include <memory>
#include <string>

#include "layers/expert_parallel/expert_exchange.h"

namespace narrowfloat {

// The configuration in words; ranks compare them.
std::string to_string(const ExpertParallelConfig& config);

// Throws kUnsupported with the reason of each transport where none will do, as far as one rank can
// tell.
void require_transport(int ranks, const ExpertParallelConfig& config,
                       const ExpertParallelOptions& options);

// Makes a rank with peer memory, whose flags are cleared: no rank may send before all have been
// made. bootstrap: null for the ranks of one process.
std::unique_ptr<ExpertParallel::Impl> make_expert_rank(const ExpertParallelConfig& config,
                                                       const ExpertLayout& layout,
                                                       std::shared_ptr<Bootstrap> bootstrap,
                                                       std::shared_ptr<SymmetricMemory> memory,
                                                       std::chrono::milliseconds deadline);

// Collective: makes a rank with the first transport that works on all ranks.
std::unique_ptr<ExpertParallel::Impl> connect_expert_rank(
    const std::shared_ptr<Bootstrap>& bootstrap, const ExpertParallelConfig& config,
    const ExpertLayout& layout, const ExpertParallelOptions& options);

}  // namespace narrowfloat
