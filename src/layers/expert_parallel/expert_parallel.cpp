// The public expert parallelism: creation, and calls on one rank.
#include "narrowfloat/expert_parallel.h"

#include <utility>

#include "base/throw_error.h"
#include "layers/expert_parallel/expert_rank.h"
#include "layers/expert_parallel/expert_transport.h"
#include "narrowfloat/runtime.h"
#include "runtime/comm/phase.h"

namespace narrowfloat {
namespace {

void check_deadline(std::chrono::milliseconds deadline) {
  if (deadline.count() >= 0) return;
  throw_invalid("deadline: expected 0 (no deadline) or more milliseconds, got {}",
                deadline.count());
}

}  // namespace

ExpertParallel::ExpertParallel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ExpertParallel::ExpertParallel(ExpertParallel&&) noexcept = default;
ExpertParallel& ExpertParallel::operator=(ExpertParallel&&) noexcept = default;
ExpertParallel::~ExpertParallel() = default;

ExpertParallel ExpertParallel::create(std::shared_ptr<Bootstrap> bootstrap,
                                      const ExpertParallelConfig& config,
                                      const ExpertParallelOptions& options) {
  if (bootstrap == nullptr) throw_invalid("bootstrap: expected one, got null");
  ExpertLayout layout;
  run_phase(*bootstrap, "expert parallelism: options", [&] {
    static_cast<void>(name(options.transport));
    check_deadline(options.deadline);
    layout = expert_layout(config, bootstrap->size());
    require_transport(bootstrap->size(), config, options);
  });
  bootstrap->require_equal(
      "expert parallelism: options",
      fmt::format("narrowfloat {}, {}, transport {}, {}, deadline {} ms", version(),
                  to_string(config), name(options.transport),
                  options.all_to_all ? "with all_to_all" : "without all_to_all",
                  options.deadline.count()));
  std::unique_ptr<Impl> impl;
  std::unique_ptr<ExpertExchange> exchange = make_exchange(bootstrap, config, layout, options);
  run_phase(*bootstrap, "expert parallelism: memory", [&] {
    impl = std::make_unique<Impl>(config, layout, bootstrap->rank(), std::move(exchange));
  });
  return ExpertParallel(std::move(impl));
}

std::vector<ExpertParallel> ExpertParallel::create_local(int ranks,
                                                         const ExpertParallelConfig& config,
                                                         std::chrono::milliseconds deadline) {
  check_deadline(deadline);
  if (ranks < 1 || ranks > SymmetricMemory::kMaxRanks) {
    throw_invalid("ranks: expected 1 to {}, got {}", SymmetricMemory::kMaxRanks, ranks);
  }
  const ExpertLayout layout = expert_layout(config, ranks);
  std::vector<ExpertParallel> group;
  for (auto& memory : make_local_memory(ranks, Device{}, layout.size_bytes)) {
    const int rank = memory->rank();
    group.push_back(ExpertParallel(std::make_unique<Impl>(
        config, layout, rank, make_peer_exchange(layout, nullptr, std::move(memory), deadline))));
  }
  return group;
}

ExpertParallel::Impl& ExpertParallel::impl() const {
  if (impl_ == nullptr)
    throw_invalid("expert parallelism: expected an object that is not destroyed");
  return *impl_;
}

int ExpertParallel::rank() const { return impl().rank(); }
int ExpertParallel::ranks() const { return impl().layout().ranks; }
ExpertTransport ExpertParallel::transport() const { return impl().exchange().transport(); }
const ExpertParallelConfig& ExpertParallel::config() const { return impl().config(); }
ExpertShard ExpertParallel::shard() const { return impl().shard(); }
int64_t ExpertParallel::max_rows() const { return impl().layout().max_rows(); }
int64_t ExpertParallel::memory_bytes() const { return impl().memory_bytes(); }
TensorView ExpertParallel::results() const { return impl().results(); }

ReceivedTokens ExpertParallel::dispatch(const CodedRows& rows, const TensorView& ids,
                                        const TensorView& weights) {
  return impl().dispatch(rows, ids, weights);
}

void ExpertParallel::combine(const ReceivedTokens& received, const TensorView& out) {
  impl().check_call(received.call);
  impl().check_output(impl().tokens(), out);
  impl().combine(out);
}

int64_t ExpertParallel::required_workspace(const MoeLayer& layer) const {
  return impl().required_workspace(layer);
}

void ExpertParallel::run(const MoeLayer& layer, const CodedRows& rows, const TensorView& ids,
                         const TensorView& weights, const TensorView& out,
                         const TensorView& workspace) {
  Impl& self = impl();
  self.check_layer(layer, workspace);
  self.check_dispatch(rows, ids, weights);
  self.check_output(rows.values.shape[0], out);
  const ReceivedTokens received = self.dispatch(rows, ids, weights);
  try {
    self.run_experts(layer, received, workspace);
  } catch (...) {
    self.give_up();
    throw;
  }
  self.combine(out);
}

void ExpertParallel::give_up() { impl().give_up(); }

void ExpertParallel::destroy() {
  static_cast<void>(impl());  // Throws where it was destroyed already.
  const std::unique_ptr<Impl> ended = std::move(impl_);
  ended->exchange().disconnect();
}

}  // namespace narrowfloat
