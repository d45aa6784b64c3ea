// device_copies.h for the CPU: nothing is copied.
#include "support/device_copies.h"

namespace narrowfloat::testing {

struct DeviceCopies::State {};

Device device_under_test() { return {}; }
std::string device_prefix() { return "cpu_"; }
std::string device_missing() { return {}; }
int64_t device_gap(int64_t elements) { return elements; }

DeviceCopies::DeviceCopies(const Buffers& /*buffers*/, const DeviceCopyStyle& /*style*/) {}
DeviceCopies::~DeviceCopies() = default;

TensorView DeviceCopies::view(const TensorView& host) const { return host; }
ScaleView DeviceCopies::view(const ScaleView& host) const { return host; }
QuantizedView DeviceCopies::view(const QuantizedView& host) const { return host; }
CodedRows DeviceCopies::view(const CodedRows& host) const { return host; }
PerExpert DeviceCopies::view(const PerExpert& host) const { return host; }
Stream DeviceCopies::stream() const { return {}; }
Device DeviceCopies::device() const { return {}; }
void DeviceCopies::send() const {}
bool DeviceCopies::take_back() const { return true; }
void* DeviceCopies::moved(void* host) const { return host; }

}  // namespace narrowfloat::testing
