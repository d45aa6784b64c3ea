// Buffers of calls rotate: a set is inputs, then outputs, each aligned to 256 bytes. All sets hold
// the same input, so one result is right for all. Outputs are poisoned before every measurement,
// and the poison between buffers must survive.
#include "bench_cli/measure.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include <fmt/format.h>

#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

// A launch with little to do takes so long.
constexpr double kLaunchUs = 0.8;
// Smaller results are compared with the reference itself, which has one thread.
constexpr int64_t kReferenceElements = 1 << 20;
constexpr const char* kForce = "NARROWFLOAT_FORCE";

// Pins an operation to one implementation while it lives: results are compared with that. Other
// operations run on what they choose themselves. The library reads the variable on every call;
// commands have one thread that calls the library, so the environment may change under it.
class ForcedImplementation {
 public:
  ForcedImplementation(std::string_view op, std::string_view implementation) {
    if (const char* value = std::getenv(kForce)) previous_ = value;
    ::setenv(kForce, fmt::format("{}:{}", op, implementation).c_str(), 1);
  }
  ~ForcedImplementation() {
    if (previous_) {
      ::setenv(kForce, previous_->c_str(), 1);
    } else {
      ::unsetenv(kForce);
    }
  }
  ForcedImplementation(const ForcedImplementation&) = delete;
  ForcedImplementation& operator=(const ForcedImplementation&) = delete;

 private:
  std::optional<std::string> previous_;
};

bool is_input(const WorkBuffer& buffer) { return buffer.role == WorkBuffer::Role::kInput; }

double us_of(uint64_t size_bytes, double gb_per_s) {
  return gb_per_s > 0 ? static_cast<double>(size_bytes) / gb_per_s / 1e3 : 0;
}

void put(Machine& machine, const WorkBuffer& buffer, std::byte* to) {
  if (buffer.is_random()) {
    machine.fill_random(to, buffer.dtype, buffer.first_value, buffer.num_values());
  } else {
    machine.write(to, buffer.content.data(), buffer.size_bytes);
  }
}

// The time of the best shape. `second_read_bytes` are read once more before, by a kernel of its
// own.
double best_traffic_us(Machine& machine, const ReplayPlan& plan, uint64_t second_read_bytes,
                       const std::function<Traffic(int64_t call_idx)>& traffic) {
  double best = 0;
  for (const TrafficShape& shape : machine.traffic_shapes(traffic(0))) {
    const auto call = [&](int64_t i, Stream stream) {
      const Traffic once = traffic(i);
      if (second_read_bytes > 0) {
        const Traffic read{.from = once.from, .read_bytes = second_read_bytes, .to = once.to};
        machine.queue_traffic(read, shape, stream);
      }
      machine.queue_traffic(once, shape, stream);
    };
    const double median_us = machine.time_calls(call, plan).median_us;
    if (best == 0 || median_us < best) best = median_us;
  }
  return best;
}

// Buffers that are far larger than the cache, and the rates of traffic from one to the next.
class RateBuffers {
 public:
  RateBuffers(Machine& machine, int replays, bool has_large_pages)
      : machine_(machine),
        size_bytes_(machine.facts().stream_bytes),
        memory_(machine.reserve(kNumBuffers * size_bytes_)),
        plan_{.calls = kNumBuffers, .replays = replays} {
    if (has_large_pages) machine.take_large_pages(memory_, kNumBuffers * size_bytes_);
    machine.fill_bytes(memory_, 1, kNumBuffers * size_bytes_);
  }

  // Reads and writes such parts of the buffers.
  [[nodiscard]] double traffic_rate(double read_part, double write_part) const {
    const uint64_t reads = part_of(read_part);
    const uint64_t writes = part_of(write_part);
    return rate(reads + writes, best_traffic_us(machine_, plan_, 0, [&](int64_t i) {
                  return Traffic{
                      .from = at(i), .read_bytes = reads, .to = at(i + 1), .write_bytes = writes};
                }));
  }
  [[nodiscard]] double own_copy_rate() const {
    const auto call = [&](int64_t i, Stream stream) {
      machine_.queue_copy(at(i + 1), at(i), size_bytes_, stream);
    };
    return rate(2 * size_bytes_, machine_.time_calls(call, plan_).median_us);
  }

 private:
  static constexpr int64_t kNumBuffers = 4;

  [[nodiscard]] std::byte* at(int64_t i) const {
    return memory_ + static_cast<uint64_t>(i % kNumBuffers) * size_bytes_;
  }
  [[nodiscard]] uint64_t part_of(double part) const {
    return static_cast<uint64_t>(part * static_cast<double>(size_bytes_));
  }
  static double rate(uint64_t size_bytes, double us) {
    return billions_per_second(static_cast<double>(size_bytes), us * 1e-6);
  }

  Machine& machine_;
  uint64_t size_bytes_;
  std::byte* memory_;
  ReplayPlan plan_;
};

}  // namespace

struct Measurement::Place {
  std::byte* base = nullptr;
  int64_t sets = 0;
  uint64_t input_bytes = 0;   // The inputs of a set come first,
  uint64_t output_bytes = 0;  // then its outputs.
  std::vector<uint64_t> offsets;
  std::vector<std::vector<std::byte*>> addresses;  // For every set, those of its buffers.

  [[nodiscard]] uint64_t stride() const { return input_bytes + output_bytes; }
  [[nodiscard]] std::byte* set(int64_t index) const {
    return base + static_cast<uint64_t>(index) * stride();
  }
  [[nodiscard]] std::byte* outputs(int64_t index) const { return set(index) + input_bytes; }
  [[nodiscard]] Addresses of_call(int64_t call_idx) const {
    return addresses[static_cast<size_t>(call_idx % sets)];
  }
};

MachineRates measure_rates(Machine& machine, int replays) {
  const RateBuffers buffers(machine, replays, /*has_large_pages=*/false);
  MachineRates rates;
  rates.kernel_copy_gb_per_s = buffers.traffic_rate(1, 1);
  rates.read_gb_per_s = buffers.traffic_rate(1, 0);
  rates.mixed_gb_per_s = buffers.traffic_rate(1, 0.5);
  rates.own_copy_gb_per_s = buffers.own_copy_rate();
  rates.copy_gb_per_s = std::max(rates.kernel_copy_gb_per_s, rates.own_copy_gb_per_s);
  return rates;
}

double measure_read_rate(Machine& machine) {
  return RateBuffers(machine, kRateReplays, /*has_large_pages=*/true).traffic_rate(1, 0);
}

Json machine_json(const MachineFacts& facts, Device device) {
  return Json{{"device", to_string(device)},
              {"name", facts.name},
              {"compute_capability", facts.compute_capability},
              {"driver", facts.driver},
              {"cuda_runtime", facts.cuda_runtime},
              {"units", facts.num_units},
              {"max_clock_mhz", facts.max_clock_mhz},
              {"cache_bytes", facts.cache_bytes},
              {"memory_bytes", facts.memory_bytes}};
}

Json rates_json(const MachineRates& rates) {
  return Json{{"copy_gb_per_s", rates.copy_gb_per_s},
              {"kernel_copy_gb_per_s", rates.kernel_copy_gb_per_s},
              {"own_copy_gb_per_s", rates.own_copy_gb_per_s},
              {"read_gb_per_s", rates.read_gb_per_s},
              {"read_2_write_1_gb_per_s", rates.mixed_gb_per_s}};
}

const CallTime* SweepResult::headline() const {
  if (programmatic) return &*programmatic;
  return plain ? &*plain : nullptr;
}

std::optional<double> SweepResult::headline_memory_only() const {
  return programmatic ? memory_only_programmatic_us : memory_only_us;
}

double SweepResult::gb_per_s() const {
  const CallTime* const time = headline();
  if (time == nullptr || time->median_us <= 0) return 0;
  return static_cast<double>(total_bytes()) / time->median_us / 1e3;
}

SweepResult Measurement::measure(const SweepCase& what) {
  try {
    return measure_work(make_work(what, machine_.device(), values_));
  } catch (const Error& error) {
    SweepResult result;
    result.error = error.kind();
    result.wrong = error.what();
    return result;
  }
}

Measurement::Place Measurement::place(const Work& work) {
  Place place;
  place.offsets.resize(work.buffers.size());
  uint64_t end = 0;
  const auto add = [&](bool wants_input) {
    for (size_t i = 0; i < work.buffers.size(); ++i) {
      if (is_input(work.buffers[i]) != wants_input) continue;
      place.offsets[i] = end;
      end += aligned(work.buffers[i].size_bytes);
    }
  };
  add(true);
  place.input_bytes = end;
  add(false);
  place.output_bytes = end - place.input_bytes;
  place.sets = arguments_.is_cache_warm ? 1 : sets_beyond_cache(machine_.facts(), end);
  place.base =
      machine_.reserve(place.stride() * static_cast<uint64_t>(place.sets) + kBufferAlignment);
  for (int64_t set = 0; set < place.sets; ++set) {
    std::vector<std::byte*>& addresses = place.addresses.emplace_back();
    for (const uint64_t offset : place.offsets) addresses.push_back(place.set(set) + offset);
  }
  return place;
}

void Measurement::fill_inputs(const Work& work, const Place& place) {
  for (size_t i = 0; i < work.buffers.size(); ++i) {
    if (is_input(work.buffers[i])) put(machine_, work.buffers[i], place.addresses[0][i]);
  }
  for (int64_t set = 1; set < place.sets; ++set) {
    machine_.copy(place.set(set), place.set(0), place.input_bytes);
  }
}

void Measurement::fill_outputs(const Work& work, const Place& place) {
  machine_.fill_bytes(place.outputs(0), kPoison, place.output_bytes);
  for (size_t i = 0; i < work.buffers.size(); ++i) {
    const bool is_updated = work.buffers[i].role == WorkBuffer::Role::kUpdated;
    if (is_updated) put(machine_, work.buffers[i], place.addresses[0][i]);
  }
  for (int64_t set = 1; set < place.sets; ++set) {
    machine_.copy(place.outputs(set), place.outputs(0), place.output_bytes);
  }
}

std::vector<Bytes> Measurement::expected_outputs(const Work& work, std::string& checked_with) {
  // On the host the baseline is measured itself: only the reference can tell that it is wrong.
  const bool is_too_slow = work.elements > kReferenceElements && !machine_.is_host();
  checked_with = work.has_baseline && is_too_slow ? "cpu_baseline" : "cpu_reference";
  std::vector<Bytes> outputs(work.buffers.size());
  const auto random = [this](const WorkBuffer& buffer) {
    return values_.get(buffer.dtype, buffer.first_value, buffer.num_values());
  };
  // All values are made first, because making more may move those made before.
  for (const WorkBuffer& buffer : work.buffers) {
    if (buffer.is_random()) random(buffer);
  }
  std::vector<std::byte*> addresses;
  for (size_t i = 0; i < work.buffers.size(); ++i) {
    const WorkBuffer& buffer = work.buffers[i];
    const std::span<const std::byte> content =
        buffer.is_random() ? random(buffer) : std::span<const std::byte>(buffer.content);
    if (is_input(buffer)) {
      addresses.push_back(const_cast<std::byte*>(content.data()));  // Inputs are only read.
      continue;
    }
    outputs[i].assign(content.begin(), content.end());
    outputs[i].resize(buffer.size_bytes, std::byte{kPoison});
    addresses.push_back(outputs[i].data());
  }
  const ForcedImplementation forced(work.operation, checked_with);
  work.call(addresses, {}, {});
  return outputs;
}

std::string Measurement::difference(const Work& work, const Place& place,
                                    const std::vector<Bytes>& expected, std::string& note) {
  for (int64_t set = 1; set < place.sets; ++set) {
    if (!machine_.is_equal(place.outputs(set), place.outputs(0), place.output_bytes)) {
      return fmt::format("calls {} and 0 on the same input differ", set);
    }
  }
  Bytes got(place.output_bytes);
  machine_.read(got.data(), place.outputs(0), got.size());
  for (size_t i = 0; i < work.buffers.size(); ++i) {
    const WorkBuffer& buffer = work.buffers[i];
    if (is_input(buffer)) continue;
    const auto all = std::span<const std::byte>(got).subspan(place.offsets[i] - place.input_bytes);
    const auto bytes = all.first(buffer.size_bytes);
    const auto padding =
        all.subspan(buffer.size_bytes, aligned(buffer.size_bytes) - buffer.size_bytes);
    if (std::any_of(padding.begin(), padding.end(),
                    [](std::byte byte) { return byte != std::byte{kPoison}; })) {
      return fmt::format("{}: something was written after its end", buffer.name);
    }
    if (work.compare) {
      const std::string wrong = work.compare(buffer, bytes, expected[i], note);
      if (!wrong.empty()) return fmt::format("{}: {}", buffer.name, wrong);
    } else if (!std::equal(bytes.begin(), bytes.end(), expected[i].begin())) {
      const auto first = std::mismatch(bytes.begin(), bytes.end(), expected[i].begin());
      return fmt::format("{}: byte {} is {:#04x}, not {:#04x}", buffer.name,
                         first.first - bytes.begin(), std::to_integer<int>(*first.first),
                         std::to_integer<int>(*first.second));
    }
  }
  return "";
}

ReplayPlan Measurement::plan_of(double us, int64_t sets, bool is_programmatic) const {
  if (arguments_.min_seconds) return machine_.plan_for(*arguments_.min_seconds, sets, us);
  return {.calls = calls_per_replay(us, arguments_.replay_ms, sets),
          .replays = arguments_.replays,
          .is_programmatic = is_programmatic};
}

double Measurement::memory_only_us(const Work& work, const Place& place, bool is_programmatic) {
  const auto key = std::make_tuple(work.read_bytes, work.second_read_bytes, work.write_bytes,
                                   place.sets, is_programmatic);
  const auto known = memory_only_.find(key);
  if (known != memory_only_.end()) return known->second;
  const double us = us_of(work.total_bytes(), rates_.copy_gb_per_s) + kLaunchUs;
  ReplayPlan plan = plan_of(2 * us, place.sets, is_programmatic);
  plan.replays = std::min(plan.replays, 3);
  const auto traffic = [&](int64_t call_idx) {
    const int64_t set = call_idx % place.sets;
    return Traffic{.from = place.set(set),
                   .read_bytes = work.read_bytes,
                   .to = place.outputs(set),
                   .write_bytes = work.write_bytes};
  };
  return memory_only_[key] = best_traffic_us(machine_, plan, work.second_read_bytes, traffic);
}

SweepResult Measurement::measure_work(const Work& work) {
  SweepResult result;
  result.implementation = work.implementation;
  result.read_bytes = work.read_bytes + work.second_read_bytes;
  result.write_bytes = work.write_bytes;
  const std::vector<Bytes> expected = expected_outputs(work, result.checked_with);
  const Place at = place(work);
  result.buffer_sets = at.sets;
  const Device device = machine_.device();
  const auto call = [&](int64_t i, Stream stream) { work.call(at.of_call(i), device, stream); };
  fill_inputs(work, at);
  fill_outputs(work, at);
  // The first call loads code; the second one tells kernels that are far slower than memory. A
  // single launch takes several times as long as one in a graph.
  machine_.run_once(call);
  const double one_us = machine_.run_once(call);
  const double us =
      std::max(us_of(work.total_bytes(), rates_.copy_gb_per_s) + kLaunchUs, one_us / 4);
  const bool has_updates =
      std::any_of(work.buffers.begin(), work.buffers.end(),
                  [](const WorkBuffer& b) { return b.role == WorkBuffer::Role::kUpdated; });
  const auto time_edges = [&](bool is_programmatic) {
    const ReplayPlan plan = plan_of(us, at.sets, is_programmatic);
    fill_outputs(work, at);
    const CallTime time = machine_.time_calls(call, plan);
    if (has_updates) {
      // Replays add up in updated buffers: the results are those of one more call on each set.
      fill_outputs(work, at);
      machine_.time_calls(call,
                          {.calls = at.sets, .replays = 0, .is_programmatic = is_programmatic});
    }
    if (result.wrong.empty()) {
      result.note.clear();
      result.wrong = difference(work, at, expected, result.note);
    }
    return time;
  };
  const bool can_be_programmatic = machine_.facts().has_programmatic_launch;
  if (arguments_.edges != EdgeChoice::kProgrammatic || !can_be_programmatic) {
    result.plain = time_edges(false);
    if (!arguments_.min_seconds) result.memory_only_us = memory_only_us(work, at, false);
  }
  if (arguments_.edges != EdgeChoice::kPlain && can_be_programmatic) {
    // The traffic of the other edges has overwritten the outputs; time_edges() poisons them again.
    result.programmatic = time_edges(true);
    result.memory_only_programmatic_us = memory_only_us(work, at, true);
  }
  return result;
}

}  // namespace narrowfloat::cli
