// device_copies.h for the first GPU.
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

#include "support/device_buffer.h"
#include "support/device_copies.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kRowAlignment = 16;

// At the same place within 64 bytes as the host's buffer, up to the alignment.
DeviceBuffer device_copy(const GuardedBuffer& host, const DeviceCopyStyle& style) {
  const auto place = static_cast<int64_t>(reinterpret_cast<uintptr_t>(host.data()) % 64);
  const bool is_initialized = std::ranges::count(style.uninitialized, &host) == 0;
  DeviceBuffer device(host.size(), {.device = style.device,
                                    .offset = place / style.alignment * style.alignment,
                                    .guard_after = host.guard() == Guard::kCanary,
                                    .is_initialized = is_initialized});
  if (is_initialized) device.write(host.data(), host.size());
  return device;
}

}  // namespace

struct DeviceCopies::State {
  struct Copied {
    const GuardedBuffer* host;
    DeviceBuffer device;
  };

  bool on_host = false;
  bool programmatic_launch = false;
  Device device;
  std::optional<CudaStream> stream;
  std::vector<Copied> buffers;
};

Device device_under_test() { return gpu(); }
std::string device_prefix() { return gpu_implementation(""); }
std::string device_missing() { return gpu_missing(); }

int64_t device_gap(int64_t elements) {
  return (elements + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

DeviceCopies::DeviceCopies(const Buffers& buffers, const DeviceCopyStyle& style)
    : state_(std::make_unique<State>()) {
  state_->on_host = style.on_host;
  state_->programmatic_launch = style.programmatic_launch;
  state_->device = style.device;
  if (style.on_host) return;
  state_->stream.emplace(style.device);
  for (const GuardedBuffer* buffer : buffers) {
    if (buffer->data() != nullptr) state_->buffers.push_back({buffer, device_copy(*buffer, style)});
  }
}

DeviceCopies::~DeviceCopies() = default;

void* DeviceCopies::moved(void* host) const {
  if (host == nullptr || state_->on_host) return host;
  for (const State::Copied& copy : state_->buffers) {
    const int64_t at = static_cast<uint8_t*>(host) - copy.host->data();
    if (at >= 0 && at <= copy.host->size()) return copy.device.data() + at;
  }
  throw std::logic_error("a view of memory that DeviceCopies was not given");
}

TensorView DeviceCopies::view(const TensorView& host) const {
  if (host.is_absent() || state_->on_host) return host;
  TensorView device = host;
  device.data = moved(host.data);
  device.device = state_->device;
  return device;
}

ScaleView DeviceCopies::view(const ScaleView& host) const {
  if (state_->on_host) return host;
  ScaleView device = host;
  device.data = moved(host.data);
  device.device = state_->device;
  return device;
}

QuantizedView DeviceCopies::view(const QuantizedView& host) const {
  QuantizedView device = host;
  device.values = view(host.values);
  device.scales = view(host.scales);
  device.global_scale = view(host.global_scale);
  return device;
}

CodedRows DeviceCopies::view(const CodedRows& host) const {
  return {
      .values = view(host.values), .scales = view(host.scales), .row_scale = view(host.row_scale)};
}

PerExpert DeviceCopies::view(const PerExpert& host) const {
  if (host.values.is_absent()) return host;
  return PerExpert(view(host.values));
}

Stream DeviceCopies::stream() const {
  if (state_->on_host) return {};
  return state_->stream->get(state_->programmatic_launch);
}

Device DeviceCopies::device() const { return state_->on_host ? Device{} : state_->device; }

void DeviceCopies::send() const {
  for (const State::Copied& copy : state_->buffers)
    copy.device.write(copy.host->data(), copy.host->size());
}

bool DeviceCopies::take_back() const {
  if (state_->on_host) return true;
  state_->stream->synchronize();
  bool intact = true;
  for (const State::Copied& copy : state_->buffers) {
    intact = copy.device.intact(copy.host->data()) && intact;
  }
  return intact;
}

}  // namespace narrowfloat::testing
