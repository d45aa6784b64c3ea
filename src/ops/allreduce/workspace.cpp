// Creation, life and errors of workspaces (docs/allreduce.md). Every phase of the creation ends
// with an agreement, so a rank that fails does not leave the others waiting.
#include "ops/allreduce/workspace.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "base/throw_error.h"
#include "ops/allreduce/allreduce_checks.h"
#include "runtime/comm/phase.h"
#include "runtime/cuda/cuda_devices.h"
#if defined(NARROWFLOAT_CUDA)
#include "ops/allreduce/allreduce_sm90.h"
#include "ops/allreduce/nccl_watchdog.h"
#include "runtime/cuda/device_memory.h"
#include "runtime/cuda/nccl.h"
#endif

namespace narrowfloat {
namespace {

bool is_cuda(Device device) { return device.type == DeviceType::kCuda; }

void check_options(const AllReduceWorkspaceOptions& options) {
  const DType element = options.element;
  if (element != DType::kF16 && element != DType::kBF16 && element != DType::kF32) {
    throw_invalid("element: expected F16, BF16 or F32, got {}", name(element));
  }
  if (options.oneshot_bytes < 0 || options.twoshot_bytes < 0 || options.nccl_bytes < 0) {
    throw_invalid(
        "oneshot_bytes, twoshot_bytes, nccl_bytes: expected 0 (the default) or more, got {}, {} "
        "and {}",
        options.oneshot_bytes, options.twoshot_bytes, options.nccl_bytes);
  }
  if (options.deadline.count() < 0) {
    throw_invalid("deadline: expected 0 (no deadline) or more milliseconds, got {}",
                  options.deadline.count());
  }
  if (!is_cuda(options.device)) return;
#if defined(NARROWFLOAT_CUDA)
  const Support support = runs_own_code(options.device);
  if (support.ok()) return;
  throw_error(ErrorKind::kUnsupported, "device: {}: {}", to_string(options.device),
              support.reason());
#else
  throw_error(ErrorKind::kUnsupported,
              "device: this build has no CUDA code, got {}; build with NARROWFLOAT_CUDA=ON",
              to_string(options.device));
#endif
}

// Puts the defaults in the place of zeros.
AllReduceWorkspaceOptions with_capacities(AllReduceWorkspaceOptions options, int ranks) {
  const AllReduceCapacities defaults = default_allreduce_capacities(std::min(ranks, kMaxRanks));
  if (options.oneshot_bytes == 0) options.oneshot_bytes = defaults.oneshot_bytes;
  if (options.twoshot_bytes == 0) options.twoshot_bytes = defaults.twoshot_bytes;
  if (options.nccl_bytes == 0) options.nccl_bytes = options.twoshot_bytes;
  return options;
}

std::string fingerprint(const AllReduceWorkspaceOptions& options) {
  return fmt::format(
      "narrowfloat {}, {} elements on {}, one-shot {} bytes, two-shot {} bytes, NCCL {} bytes{}, "
      "transport {}, deadline {} ms, agreement {}",
      version(), options.element == DType::kF32 ? "32-bit" : "16-bit",
      is_cuda(options.device) ? "GPUs" : "CPUs", options.oneshot_bytes, options.twoshot_bytes,
      options.nccl_bytes, options.use_nccl ? "" : " (off)", name(options.transport),
      options.deadline.count(), static_cast<int>(options.agreement));
}

LaunchLimits limits_of(Device device) {
#if defined(NARROWFLOAT_CUDA)
  if (is_cuda(device)) return {.sms = cuda_device(device.index).num_sms};
#endif
  static_cast<void>(device);
  return {.sms = 1, .max_cluster = 1};
}

// The minimum over the ranks.
LaunchLimits agree_on_limits(Bootstrap& bootstrap, const LaunchLimits& mine) {
  LaunchLimits least = mine;
  for (const LaunchLimits& limits : gather_values(bootstrap, mine)) {
    least.sms = std::min(least.sms, limits.sms);
    least.max_cluster = std::min(least.max_cluster, limits.max_cluster);
    least.max_warps = std::min(least.max_warps, limits.max_warps);
  }
  return least;
}

// Memory for an object of the host, as the memory that devices share with it is owned.
template <typename Object>
std::shared_ptr<uint8_t> allocate_on_host() {
  auto object = std::make_shared<Object>();
  return {object, reinterpret_cast<uint8_t*>(object.get())};
}

std::shared_ptr<uint8_t> allocate_fault([[maybe_unused]] Device device) {
#if defined(NARROWFLOAT_CUDA)
  if (is_cuda(device)) return allocate_mapped_memory(device, sizeof(AllReduceFault));
#endif
  return allocate_on_host<AllReduceFault>();
}

std::shared_ptr<uint8_t> allocate_control([[maybe_unused]] Device device) {
#if defined(NARROWFLOAT_CUDA)
  if (is_cuda(device)) return allocate_device_memory(device, sizeof(LocalControl));
#endif
  return allocate_on_host<LocalControl>();
}

std::string describe(const AllReduceFault& fault, const AllReduceWorkspaceOptions& options) {
  switch (fault.kind) {
    case AllReduceFault::kOneShotWait:
      return fmt::format("rank {} sent no data within {} ms (one-shot call {})", fault.peer,
                         options.deadline.count(), fault.epoch);
    case AllReduceFault::kTwoShotWait:
      return fmt::format("rank {} sent no data within {} ms (two-shot call {})", fault.peer,
                         options.deadline.count(), fault.epoch);
    case AllReduceFault::kBarrierWait:
      return fmt::format("rank {} did not reach a barrier within {} ms (barrier {})", fault.peer,
                         options.deadline.count(), fault.epoch);
    case AllReduceFault::kAborted:
      return "another rank gave up waiting";
    case AllReduceFault::kBadIndex:
      return fmt::format("slot_to_row of token {} has {}, which is no row of permuted_rows",
                         fault.peer, static_cast<int32_t>(fault.detail));
    default:
      return fmt::format("unknown fault {}", fault.kind);
  }
}

}  // namespace

// The ranges of all ranks together are a little more than the message.
int64_t nccl_scratch_bytes(int64_t nccl_bytes, int ranks) {
  return round_up(nccl_bytes, kControlLine) + ranks * kControlLine;
}

// --- Impl ----------------------------------------------------------------------------------------

AllReduceWorkspace::Impl::Impl(const AllReduceWorkspaceOptions& options, int rank, int ranks,
                               std::shared_ptr<Bootstrap> bootstrap,
                               std::unique_ptr<SymmetricMemory> memory, const LaunchLimits& limits)
    : options_(options),
      bootstrap_(std::move(bootstrap)),
      memory_(std::move(memory)),
      limits_(limits),
      fault_(allocate_fault(options.device)) {
  view_.rank = rank;
  view_.ranks = ranks;
  view_.fault = reinterpret_cast<AllReduceFault*>(fault_.get());
  view_.deadline_ns = static_cast<uint64_t>(options.deadline.count()) * 1'000'000U;
  if (memory_ == nullptr) {
    control_ = allocate_control(options.device);
    view_.control = reinterpret_cast<LocalControl*>(control_.get());
    return;
  }
  view_.layout = peer_region(ranks, {options.oneshot_bytes, options.twoshot_bytes});
  for (int peer = 0; peer < ranks; ++peer) view_.regions[peer] = memory_->region(peer);
  view_.control = reinterpret_cast<LocalControl*>(memory_->own() + view_.layout.control);
}

AllReduceWorkspace::Impl::~Impl() = default;

void AllReduceWorkspace::Impl::unmap_peers() {
  if (memory_ != nullptr) memory_->unmap_peers();
}

AllReduceTransport AllReduceWorkspace::Impl::transport() const {
  return memory_ == nullptr ? AllReduceTransport::kNone : memory_->transport();
}

void AllReduceWorkspace::Impl::wait_for_calls() const {
#if defined(NARROWFLOAT_CUDA)
  if (is_cuda(options_.device)) wait_for_device(options_.device);
#endif
}

void AllReduceWorkspace::Impl::clear() {
  const uint32_t sentinel =
      options_.element == DType::kF32 ? sentinel_word<4>() : sentinel_word<2>();
  // Everything before the buffers is zero, or the control words alone.
  uint8_t* const zeros = memory_ == nullptr ? control_.get() : memory_->own();
  const int64_t num_zeros =
      memory_ == nullptr ? int64_t{sizeof(LocalControl)} : view_.layout.oneshot;
  uint8_t* const cells = zeros + num_zeros;
  uint8_t* const sums = zeros + view_.layout.result;
  const int64_t words = (view_.layout.result - view_.layout.oneshot) / 4;
  const int64_t sum_words = (view_.layout.size_bytes - view_.layout.result) / 4;
#if defined(NARROWFLOAT_CUDA)
  if (is_cuda(options_.device)) {
    wait_for_calls();
    std::memset(fault_.get(), 0, sizeof(AllReduceFault));
    fill_words(zeros, num_zeros / 4, 0, options_.device, {});
    fill_words(cells, words, sentinel, options_.device, {});
    fill_words(sums, sum_words, kWordWithoutSums, options_.device, {});
    wait_for_device(options_.device);
    return;
  }
#endif
  std::memset(fault_.get(), 0, sizeof(AllReduceFault));
  std::memset(zeros, 0, static_cast<size_t>(num_zeros));
  std::fill_n(reinterpret_cast<uint32_t*>(cells), words, sentinel);
  std::fill_n(reinterpret_cast<uint32_t*>(sums), sum_words, kWordWithoutSums);
}

void AllReduceWorkspace::Impl::reconnect_nccl() {
#if defined(NARROWFLOAT_CUDA)
  if (bootstrap_ == nullptr) return;
  bool is_broken = false;
  try {
    if (nccl_ != nullptr) nccl_->check_error();
  } catch (const Error&) {
    is_broken = true;
  }
  const std::vector<uint8_t> broken = gather_values(*bootstrap_, uint8_t{is_broken});
  if (std::ranges::find(broken, 1) == broken.end()) return;
  nccl_watchdog_.reset();
  nccl_.reset();
  connect_nccl();
#endif
}

void AllReduceWorkspace::Impl::connect_nccl() {
#if defined(NARROWFLOAT_CUDA)
  if (!is_cuda(options_.device) || !options_.use_nccl || bootstrap_ == nullptr) return;
  // Every rank must have found it, or none uses it.
  const std::vector<std::string> found =
      bootstrap_->gather_texts(nccl_info().found ? nccl_info().version : "");
  if (std::ranges::find(found, "") != found.end()) return;
  nccl_ = NcclCommunicator::create(*bootstrap_, options_.device, bootstrap_->deadline());
  run_phase(*bootstrap_, "allocation of NCCL's scratch memory", [&] {
    nccl_scratch_ = allocate_device_memory(
        options_.device, 2 * nccl_scratch_bytes(options_.nccl_bytes, view_.ranks));
    nccl_watchdog_ = std::make_shared<NcclWatchdog>(*nccl_, options_.device, options_.deadline);
  });
#endif
}

void AllReduceWorkspace::Impl::throw_if_failed() const {
#if defined(NARROWFLOAT_CUDA)
  if (nccl_ != nullptr) nccl_->check_error();
#endif
  AllReduceFault& fault = *view_.fault;
  const uint32_t kind = std::atomic_ref(fault.kind).load(std::memory_order_acquire);
  if (kind == AllReduceFault::kNone) return;
  throw_error(ErrorKind::kDevice,
              "all-reduce: an earlier call on this workspace failed on rank {} of {}: {}; the "
              "outputs of that call are undefined; call reset() on all ranks, or end the job",
              view_.rank, view_.ranks, describe(fault, options_));
}

bool AllReduceWorkspace::Impl::must_agree() const {
  if (bootstrap_ == nullptr || view_.ranks == 1) return false;
  if (options_.agreement == AllReduceAgreement::kEveryCall) return true;
  return options_.agreement == AllReduceAgreement::kFirstCall && !has_agreed_;
}

void AllReduceWorkspace::Impl::agree_on(const AllReduceCall& call, const std::string& scalars,
                                        const Error* error) {
  bootstrap_->agree("all-reduce: arguments", error);
  bootstrap_->require_equal("all-reduce: problem", to_string(call.problem) + scalars);
  has_agreed_ = true;
}

AllReduceCall AllReduceWorkspace::Impl::call_of(const AllReduceProblem& problem) const {
  return {.problem = problem,
          .ranks = view_.ranks,
          .device = options_.device,
          .workspace_element = options_.element,
          .has_peer_memory = memory_ != nullptr || view_.ranks == 1,
          .capacities = {options_.oneshot_bytes, options_.twoshot_bytes},
          .nccl_bytes = nccl_bytes(),
          .limits = limits_};
}

AllReduceEngines AllReduceWorkspace::Impl::engines() const {
  return {.nccl = nccl_.get(),
          .nccl_watchdog = nccl_watchdog_.get(),
          .nccl_scratch = nccl_scratch_.get()};
}

// --- AllReduceWorkspace --------------------------------------------------------------------------

AllReduceWorkspace::AllReduceWorkspace(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AllReduceWorkspace::AllReduceWorkspace(AllReduceWorkspace&&) noexcept = default;
AllReduceWorkspace& AllReduceWorkspace::operator=(AllReduceWorkspace&&) noexcept = default;
AllReduceWorkspace::~AllReduceWorkspace() = default;

AllReduceWorkspace AllReduceWorkspace::create(std::shared_ptr<Bootstrap> bootstrap,
                                              const AllReduceWorkspaceOptions& options) {
  if (bootstrap == nullptr) throw_invalid("bootstrap: expected one, got null");
  Bootstrap& group = *bootstrap;
  const int ranks = group.size();
  AllReduceWorkspaceOptions all = options;
  run_phase(group, "all-reduce workspace: options", [&] {
    check_options(options);
    all = with_capacities(options, ranks);
    if (ranks <= kMaxRanks) {
      static_cast<void>(peer_region(ranks, {all.oneshot_bytes, all.twoshot_bytes}));
    }
  });
  group.require_equal("all-reduce workspace: options", fingerprint(all));
  const LaunchLimits limits = agree_on_limits(group, limits_of(all.device));

  std::unique_ptr<SymmetricMemory> memory;
  std::optional<Error> no_memory;
  if (all.transport != AllReduceTransport::kNone && ranks <= kMaxRanks) {
    const int64_t bytes = peer_region(ranks, {all.oneshot_bytes, all.twoshot_bytes}).size_bytes;
    try {
      memory = make_symmetric_memory(group, all.device, all.transport, bytes);
    } catch (const Error& error) {
      // All ranks got the same error. Without a transport that was asked for, NCCL is enough.
      const bool may_do_without = all.transport == AllReduceTransport::kAuto && all.use_nccl &&
                                  is_cuda(all.device) && error.kind() == ErrorKind::kUnsupported;
      if (!may_do_without) throw;
      no_memory = error;
    }
  }
  std::unique_ptr<Impl> impl;
  try {
    run_phase(group, "all-reduce workspace: memory", [&] {
      impl = std::make_unique<Impl>(all, group.rank(), ranks, bootstrap, std::move(memory), limits);
      impl->clear();
    });
    impl->connect_nccl();
  } catch (const PhaseError&) {
    // Nobody frees what a peer has mapped.
    if (impl != nullptr) impl->unmap_peers();
    group.barrier();
    throw;
  }
  // All ranks lack the same engines.
  if (no_memory && impl->nccl_bytes() == 0) throw *std::move(no_memory);
  // No rank may push before all have cleared.
  group.barrier();
  return AllReduceWorkspace(std::move(impl));
}

std::vector<AllReduceWorkspace> AllReduceWorkspace::create_local(
    int ranks, const AllReduceWorkspaceOptions& options) {
  check_options(options);
  const auto local = options.transport == AllReduceTransport::kAuto ||
                     options.transport == (is_cuda(options.device) ? AllReduceTransport::kVirtual
                                                                   : AllReduceTransport::kThreads);
  if (!local) {
    throw_invalid(
        "transport: ranks of one process have kAuto, kThreads (CPU) or kVirtual (GPU), "
        "got {}",
        name(options.transport));
  }
  if (ranks < 1 || ranks > kMaxRanks) {
    throw_invalid("ranks: expected 1 to {}, got {}", kMaxRanks, ranks);
  }
  const AllReduceWorkspaceOptions all = with_capacities(options, ranks);
  const int64_t bytes = peer_region(ranks, {all.oneshot_bytes, all.twoshot_bytes}).size_bytes;
  LaunchLimits limits = limits_of(all.device);
  // All ranks of a GPU are resident at once.
  limits.sms = std::max(limits.sms / ranks, 1);
  std::vector<AllReduceWorkspace> workspaces;
  int rank = 0;
  for (auto& memory : make_local_memory(ranks, all.device, bytes)) {
    auto impl = std::make_unique<Impl>(all, rank++, ranks, nullptr, std::move(memory), limits);
    impl->clear();
    workspaces.push_back(AllReduceWorkspace(std::move(impl)));
  }
  return workspaces;
}

namespace {

AllReduceWorkspace::Impl& require(const std::unique_ptr<AllReduceWorkspace::Impl>& impl) {
  if (impl == nullptr) throw_invalid("workspace: expected one, got one that was destroyed");
  return *impl;
}

}  // namespace

AllReduceWorkspace::Impl& AllReduceWorkspace::impl() const { return require(impl_); }
int AllReduceWorkspace::rank() const { return impl().rank(); }
int AllReduceWorkspace::ranks() const { return impl().ranks(); }
Device AllReduceWorkspace::device() const { return impl().options().device; }
AllReduceTransport AllReduceWorkspace::transport() const { return impl().transport(); }
AllReduceCapacities AllReduceWorkspace::capacities() const {
  return {impl().options().oneshot_bytes, impl().options().twoshot_bytes};
}
int64_t AllReduceWorkspace::nccl_bytes() const { return impl().nccl_bytes(); }

bool AllReduceWorkspace::fits(int64_t tokens, int64_t hidden, DType element) const {
  AllReduceProblem problem{.tokens = tokens, .hidden = hidden, .element = element};
  problem.exactness = AllReduceExactness::kFast;
  check_allreduce_problem(problem);
  const AllReduceCall call = impl().call_of(problem);
  return std::ranges::any_of(allreduce_impls(), [&](const AllReduceImpl& candidate) {
    return candidate.supports(call).ok();
  });
}

void AllReduceWorkspace::check_error() const { impl().throw_if_failed(); }

void AllReduceWorkspace::reset() {
  Impl& workspace = impl();
  Bootstrap* const group = workspace.bootstrap();
  if (group == nullptr) return workspace.clear();
  // No rank may clear while another still runs a call that failed, and none may call before all
  // have cleared.
  run_phase(*group, "all-reduce workspace: wait before reset", [&] { workspace.wait_for_calls(); });
  run_phase(*group, "all-reduce workspace: reset", [&] { workspace.clear(); });
  workspace.reconnect_nccl();
}

void AllReduceWorkspace::destroy() {
  Impl& workspace = impl();
  if (Bootstrap* const group = workspace.bootstrap()) {
    // Nobody stores into memory that is gone, and nobody frees what a peer has mapped.
    group->barrier();
    workspace.unmap_peers();
    group->barrier();
  }
  impl_.reset();
}

}  // namespace narrowfloat
