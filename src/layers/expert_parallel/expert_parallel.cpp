// The public expert parallelism: creation, and calls on one rank.
#include "narrowfloat/expert_parallel.h"

#include <utility>

#include "base/throw_error.h"
#include "layers/expert_parallel/expert_rank.h"
#include "layers/expert_parallel/expert_transport.h"
#include "narrowfloat/runtime.h"
#include "runtime/comm/phase.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {
namespace {

void check_deadline(std::chrono::milliseconds deadline) {
  if (deadline.count() >= 0) return;
  throw_invalid("deadline: expected 0 (no deadline) or more milliseconds, got {}",
                deadline.count());
}

// Kernels read and write 16 bytes at a time.
void check_for_device(const ExpertParallelConfig& config, Device device) {
  if (device.type == DeviceType::kCpu) return;
#if defined(NARROWFLOAT_CUDA)
  const Support support = runs_own_code(device);
  if (!support.ok()) {
    throw_error(ErrorKind::kUnsupported, "device: {}: {}", to_string(device), support.reason());
  }
#else
  throw_error(ErrorKind::kUnsupported,
              "device: this build has no CUDA code, got {}; build with NARROWFLOAT_CUDA=ON",
              to_string(device));
#endif
  constexpr int64_t kMultiple = 8;
  if (config.hidden % kMultiple != 0) {
    throw_invalid("hidden: expected a multiple of {} on a GPU, got {}", kMultiple, config.hidden);
  }
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
    check_for_device(config, options.device);
    require_transport(bootstrap->size(), config, options);
  });
  bootstrap->require_equal(
      "expert parallelism: options",
      fmt::format("narrowfloat {}, {}, on {}, transport {}, {}, deadline {} ms", version(),
                  to_string(config), options.device.type == DeviceType::kCpu ? "CPUs" : "GPUs",
                  name(options.transport),
                  options.all_to_all ? "with all_to_all" : "without all_to_all",
                  options.deadline.count()));
  return Impl::wrap(connect_expert_rank(bootstrap, config, layout, options));
}

std::vector<ExpertParallel> ExpertParallel::create_local(int ranks,
                                                         const ExpertParallelConfig& config,
                                                         std::chrono::milliseconds deadline,
                                                         Device device) {
  check_deadline(deadline);
  if (ranks < 1 || ranks > SymmetricMemory::kMaxRanks) {
    throw_invalid("ranks: expected 1 to {}, got {}", SymmetricMemory::kMaxRanks, ranks);
  }
  const ExpertLayout layout = expert_layout(config, ranks);
  check_for_device(config, device);
  std::vector<ExpertParallel> group;
  for (auto& memory : make_local_memory(ranks, device, layout.size_bytes)) {
    group.push_back(
        Impl::wrap(make_expert_rank(config, layout, nullptr, std::move(memory), deadline)));
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
Device ExpertParallel::device() const { return impl().device(); }
ExpertTransport ExpertParallel::transport() const { return impl().transport(); }
const ExpertParallelConfig& ExpertParallel::config() const { return impl().config(); }
ExpertShard ExpertParallel::shard() const { return impl().shard(); }
int64_t ExpertParallel::max_rows() const { return impl().layout().max_rows(); }
int64_t ExpertParallel::memory_bytes() const { return impl().memory_bytes(); }
TensorView ExpertParallel::results() const { return impl().results(); }

ReceivedTokens ExpertParallel::dispatch(const CodedRows& rows, const TensorView& ids,
                                        const TensorView& weights, Stream stream) {
  start_dispatch(rows, ids, weights, stream);
  return impl().finish_dispatch(stream);
}

void ExpertParallel::combine(const ReceivedTokens& received, const TensorView& out, Stream stream) {
  impl().check_call(received.call);
  impl().check_output(impl().tokens(), out);
  impl().start_combine(stream);
  impl().finish_combine(out, stream);
}

void ExpertParallel::start_dispatch(const CodedRows& rows, const TensorView& ids,
                                    const TensorView& weights, Stream stream) {
  impl().check_dispatch(rows, ids, weights);
  impl().start_dispatch(rows, ids, weights, stream);
}

ReceivedTokens ExpertParallel::finish_dispatch(Stream stream) {
  return impl().finish_dispatch(stream);
}

void ExpertParallel::start_combine(const ReceivedTokens& received, Stream stream) {
  impl().check_call(received.call);
  impl().start_combine(stream);
}

void ExpertParallel::finish_combine(const TensorView& out, Stream stream) {
  impl().check_finish_combine(out);
  impl().finish_combine(out, stream);
}

int64_t ExpertParallel::required_workspace(const MoeLayer& layer) const {
  return impl().required_workspace(layer);
}

void ExpertParallel::run(const MoeLayer& layer, const CodedRows& rows, const TensorView& ids,
                         const TensorView& weights, const TensorView& out,
                         const TensorView& workspace, Stream stream) {
  Impl& self = impl();
  self.check_layer(layer, workspace);
  self.check_dispatch(rows, ids, weights);
  self.check_output(rows.values.shape[0], out);
  self.start_dispatch(rows, ids, weights, stream);
  const ReceivedTokens received = self.finish_dispatch(stream);
  try {
    self.run_experts(layer, received, workspace, stream);
  } catch (...) {
    self.give_up_after_error(stream);
    throw;
  }
  self.start_combine(stream);
  self.finish_combine(out, stream);
}

void ExpertParallel::run_experts(const MoeLayer& layer, const ReceivedTokens& received,
                                 const TensorView& workspace, Stream stream) {
  impl().check_call(received.call);
  impl().check_layer(layer, workspace);
  impl().run_experts(layer, received, workspace, stream);
}

void ExpertParallel::check_error() const { impl().check(); }
void ExpertParallel::give_up(Stream stream) { impl().give_up(stream); }

void ExpertParallel::destroy() {
  static_cast<void>(impl());  // Throws where it was destroyed already.
  const std::unique_ptr<Impl> ended = std::move(impl_);
  ended->disconnect();
}

}  // namespace narrowfloat
