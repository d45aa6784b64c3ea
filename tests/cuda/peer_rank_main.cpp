// One rank of symmetric_memory_cuda_test.cpp, nccl_cuda_test.cpp and expert_ranks_cuda_test.cpp, a
// process of its own:
//
//     peer_rank memory RANK RANKS DEVICE DIRECTORY TRANSPORT BYTES
//     peer_rank nccl RANK RANKS DEVICE DIRECTORY
//     peer_rank experts RANK RANKS DEVICE DIRECTORY CALLS TRANSPORT
//                                                 the last rank makes one call less
//
// Ranks meet in DIRECTORY. What a rank found goes to the file result.RANK there: "ok" and the
// transport, or the kind and message of an error.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "formats/float16.h"
#include "narrowfloat/bootstrap.h"
#include "narrowfloat/expert_parallel.h"
#include "ops/allreduce/allreduce_sm90.h"
#include "ops/allreduce/nccl_watchdog.h"
#include "runtime/comm/symmetric_memory.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/device_memory.h"
#include "runtime/cuda/nccl.h"
#include "support/multicast_off.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kDeadline{60'000};

void require(bool condition, const std::string& what) {
  if (!condition) throw Error(ErrorKind::kCorruptData, what);
}

int64_t number(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc{} && end == text.data() + text.size(), "no number: " + text);
  return value;
}

AllReduceTransport transport_of(const std::string& text) {
  for (const auto transport :
       {AllReduceTransport::kAuto, AllReduceTransport::kCudaIpc, AllReduceTransport::kCudaVmm}) {
    if (name(transport) == text) return transport;
  }
  throw Error(ErrorKind::kInvalidArgument, "no transport: " + text);
}

uint8_t byte_of(int writer, int owner, int64_t index) {
  return static_cast<uint8_t>(index * 31 + index / 251 + writer * 11 + owner * 7 + 1);
}

// Each rank writes its part of every region.
struct RegionPart {
  int64_t begin = 0;
  int64_t size_bytes = 0;
};
RegionPart part_of(int writer, const SymmetricMemory& memory) {
  const int64_t begin = memory.size_bytes() * writer / memory.ranks();
  return {begin, memory.size_bytes() * (writer + 1) / memory.ranks() - begin};
}

std::vector<uint8_t> bytes_of(int writer, int owner, const RegionPart& part) {
  std::vector<uint8_t> bytes(static_cast<size_t>(part.size_bytes));
  for (int64_t i = 0; i < part.size_bytes; ++i) {
    bytes[static_cast<size_t>(i)] = byte_of(writer, owner, part.begin + i);
  }
  return bytes;
}

void write_parts(const SymmetricMemory& memory) {
  const RegionPart part = part_of(memory.rank(), memory);
  for (int owner = 0; owner < memory.ranks(); ++owner) {
    const std::vector<uint8_t> bytes = bytes_of(memory.rank(), owner, part);
    copy_to_device(memory.region(owner) + part.begin, bytes.data(), part.size_bytes,
                   memory.device(), {});
  }
}

void check_parts(const SymmetricMemory& memory) {
  for (int owner = 0; owner < memory.ranks(); ++owner) {
    for (int writer = 0; writer < memory.ranks(); ++writer) {
      const RegionPart part = part_of(writer, memory);
      std::vector<uint8_t> found(static_cast<size_t>(part.size_bytes));
      copy_to_host(found.data(), memory.region(owner) + part.begin, part.size_bytes,
                   memory.device(), {});
      require(found == bytes_of(writer, owner, part), "region " + std::to_string(owner) +
                                                          " has other bytes than rank " +
                                                          std::to_string(writer) + " wrote");
    }
  }
}

std::string share_memory(Bootstrap& bootstrap, Device device, const std::string& transport,
                         int64_t size_bytes) {
  const auto memory = make_symmetric_memory(bootstrap, device, transport_of(transport), size_bytes);
  require(memory->size_bytes() == size_bytes && memory->ranks() == bootstrap.size(), "facts");
  write_parts(*memory);
  bootstrap.barrier();
  check_parts(*memory);
  bootstrap.barrier();
  memory->unmap_peers();
  bootstrap.barrier();
  return "ok " + std::string(name(memory->transport()));
}

// A buffer on the device that holds floats.
class DeviceFloats {
 public:
  DeviceFloats(Device device, std::vector<float> values)
      : device_(device),
        count_(values.size()),
        data_(allocate_device_memory(device, size_bytes())) {
    copy_to_device(data_.get(), values.data(), size_bytes(), device, {});
  }
  [[nodiscard]] uint8_t* data() const { return data_.get(); }
  [[nodiscard]] int64_t size_bytes() const { return static_cast<int64_t>(count_ * sizeof(float)); }
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> values(count_);
    copy_to_host(values.data(), data_.get(), size_bytes(), device_, {});
    return values;
  }

 private:
  Device device_;
  size_t count_;
  std::shared_ptr<uint8_t> data_;
};

void check_all_reduce(NcclCommunicator& communicator, int rank, int ranks, Device device) {
  const DeviceFloats input(device, std::vector<float>(1000, static_cast<float>(rank + 1)));
  const DeviceFloats output(device, std::vector<float>(1000));
  communicator.all_reduce(input.data(), output.data(), 1000, DType::kF32, {});
  const float sum = static_cast<float>(ranks * (ranks + 1)) / 2.0F;
  require(output.values() == std::vector<float>(1000, sum), "all_reduce");
}

void check_all_gather(NcclCommunicator& communicator, int rank, int ranks, Device device) {
  constexpr size_t kCount = 300;
  std::vector<float> expected;
  for (int peer = 0; peer < ranks; ++peer) {
    expected.insert(expected.end(), kCount, static_cast<float>(peer * 3 + 1));
  }
  std::vector<float> start(expected.size());
  std::fill_n(start.begin() + static_cast<ptrdiff_t>(kCount) * rank, kCount,
              static_cast<float>(rank * 3 + 1));
  const DeviceFloats all(device, start);
  const auto part = static_cast<int64_t>(kCount * sizeof(float));
  communicator.all_gather(all.data() + part * rank, all.data(), part, {});
  require(all.values() == expected, "all_gather");
}

// Rank r sends r + 1 + p floats of value 10 r + p to rank p; nothing where r + p is divisible by 3.
int64_t exchanged_count(int from, int to) { return (from + to) % 3 == 0 ? 0 : from + 1 + to; }

void check_exchange(NcclCommunicator& communicator, int rank, int ranks, Device device) {
  std::vector<NcclCommunicator::Part> sends;
  std::vector<NcclCommunicator::Part> receives;
  std::vector<float> values;
  std::vector<float> expected;
  const auto append = [](std::vector<float>& floats, std::vector<NcclCommunicator::Part>& parts,
                         int from, int to) {
    const int64_t count = exchanged_count(from, to);
    parts.push_back({.offset = static_cast<int64_t>(floats.size() * sizeof(float)),
                     .size_bytes = count * static_cast<int64_t>(sizeof(float))});
    floats.insert(floats.end(), static_cast<size_t>(count), static_cast<float>(10 * from + to));
  };
  for (int peer = 0; peer < ranks; ++peer) {
    append(values, sends, rank, peer);
    append(expected, receives, peer, rank);
  }
  // An element of their own, so that no buffer is empty.
  values.push_back(-1.0F);
  expected.push_back(-2.0F);
  const DeviceFloats input(device, values);
  const DeviceFloats output(device, std::vector<float>(expected.size(), -2.0F));
  communicator.exchange(input.data(), sends, output.data(), receives, {});
  require(output.values() == expected, "exchange");
}

// A call over NCCL, as allreduce() makes it: the sum, then a kernel that tells of its end.
void sum_watched(const NcclWatchdog& watchdog, NcclCommunicator& communicator,
                 const DeviceFloats& floats, int64_t count, Device device) {
  watchdog.begin({});
  communicator.all_reduce(floats.data(), floats.data(), count, DType::kF32, {});
  RankArgs args;
  args.source.input = floats.data();
  args.epilogue.tokens = 1;
  args.epilogue.hidden = count;
  args.epilogue.ar_out = floats.data();
  args.end_of_exchange = watchdog.end({});
  launch_allreduce(DType::kF32,
                   {.protocol = AllReduceProtocol::kSingleRank, .device = device.index}, {&args, 1},
                   {});
}

// Calls that end in time are left alone, however long the pauses between them. The last rank stays
// away from the last one, which the others end by aborting their communicators.
void check_watchdog(NcclCommunicator& communicator, int rank, int ranks, Device device) {
  constexpr Milliseconds kPatience{500};
  constexpr int64_t kCount = 256;
  const NcclWatchdog watchdog(communicator, device, kPatience);
  const DeviceFloats floats(device, std::vector<float>(kCount, 1.0F));
  float expected = 1.0F;
  for (int i = 0; i < 4; ++i) {
    sum_watched(watchdog, communicator, floats, kCount, device);
    expected *= static_cast<float>(ranks);
    require(floats.values() == std::vector<float>(kCount, expected), "watched all_reduce");
    if (i % 2 == 1) std::this_thread::sleep_for(kPatience * 3 / 2);
  }
  communicator.check_error();
  if (rank == ranks - 1) return;
  sum_watched(watchdog, communicator, floats, kCount, device);
  wait_for_device(device);
  const auto refuses = [](auto call) {
    try {
      call();
    } catch (const Error& error) {
      const std::string message = error.what();
      return error.kind() == ErrorKind::kDevice &&
             message.find("call 4 over NCCL on") != std::string::npos &&
             message.find("did not end within 500 ms") != std::string::npos;
    }
    return false;
  };
  require(refuses([&] { communicator.check_error(); }), "check_error() after an abort");
  require(refuses([&] { sum_watched(watchdog, communicator, floats, kCount, device); }),
          "a call after an abort");
}

std::string use_nccl(Bootstrap& bootstrap, Device device) {
  const auto communicator = NcclCommunicator::create(bootstrap, device, kDeadline / 4);
  for (int i = 0; i < 3; ++i) {
    check_all_reduce(*communicator, bootstrap.rank(), bootstrap.size(), device);
    check_all_gather(*communicator, bootstrap.rank(), bootstrap.size(), device);
    check_exchange(*communicator, bootstrap.rank(), bootstrap.size(), device);
  }
  communicator->check_error();
  // With one rank nothing waits for a peer.
  if (bootstrap.size() > 1) {
    check_watchdog(*communicator, bootstrap.rank(), bootstrap.size(), device);
  }
  bootstrap.barrier();
  return "ok";
}

// Memory on the device.
class DeviceTensor {
 public:
  DeviceTensor(Device device, DType dtype, int64_t rows, int64_t cols)
      : device_(device),
        size_bytes_(rows * cols * bits(dtype) / 8),
        data_(allocate_device_memory(device, std::max<int64_t>(size_bytes_, 1))),
        view_(TensorView::contiguous(data_.get(), dtype, {rows, cols}, device)) {}
  [[nodiscard]] const TensorView& view() const { return view_; }
  template <typename T>
  void send(const std::vector<T>& values) const {
    copy_to_device(data_.get(), values.data(), size_bytes_, device_, {});
  }
  template <typename T>
  [[nodiscard]] std::vector<T> values() const {
    std::vector<T> values(static_cast<size_t>(size_bytes_) / sizeof(T));
    copy_to_host(values.data(), data_.get(), size_bytes_, device_, {});
    return values;
  }

 private:
  Device device_;
  int64_t size_bytes_;
  std::shared_ptr<uint8_t> data_;
  TensorView view_;
};

constexpr int32_t kExpertsOfARank = 3;
constexpr int32_t kTopK = 4;
constexpr int64_t kMaxTokens = 65;
constexpr int64_t kHidden = 512;

// A call whose expert e returns the token times 2^(rank of e % 4): no rounding but that of the sum.
void exchange_tokens(ExpertParallel& group, Device device, Random& random) {
  const int32_t experts = group.config().experts;
  const int64_t tokens = random.chance(20) ? 0 : random.range(1, kMaxTokens);
  std::vector<uint16_t> rows;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (int64_t i = 0; i < tokens * kHidden; ++i) rows.push_back(float_to_bf16(random.normal()));
  for (int64_t i = 0; i < tokens * kTopK; ++i) {
    ids.push_back(static_cast<int32_t>(random.range(-1, experts - 1)));
    weights.push_back(random.normal());
  }
  const DeviceTensor sent(device, DType::kBF16, tokens, kHidden);
  const DeviceTensor sent_ids(device, DType::kI32, tokens, kTopK);
  const DeviceTensor sent_weights(device, DType::kF32, tokens, kTopK);
  const DeviceTensor out(device, DType::kF32, tokens, kHidden);
  sent.send(rows);
  sent_ids.send(ids);
  sent_weights.send(weights);
  const ReceivedTokens received = group.dispatch(
      {.values = sent.view(), .scales = {}, .row_scale = {}}, sent_ids.view(), sent_weights.view());
  const auto count = static_cast<size_t>(group.max_rows() * kHidden);
  std::vector<uint16_t> results(count);
  copy_to_host(results.data(), received.rows.values.data, static_cast<int64_t>(count) * 2, device,
               {});
  const auto factor = static_cast<float>(1 << group.rank() % 4);
  const bool is_topk = group.config().order == CombineOrder::kTopK;
  std::vector<uint16_t> slots;
  for (size_t row = 0; row < count; row += kHidden) {
    for (int32_t slot = 0; slot < (is_topk ? kTopK : 1); ++slot) {
      for (size_t i = row; i < row + kHidden; ++i) {
        slots.push_back(float_to_bf16(bf16_to_float(results[i]) * factor));
      }
    }
  }
  copy_to_device(group.results().data, slots.data(), static_cast<int64_t>(slots.size()) * 2, device,
                 {});
  group.combine(received, out.view());
  const std::vector<float> got = out.values<float>();
  group.check_error();
  for (int64_t token = 0; token < tokens; ++token) {
    // Weights of the slots, or 1 for each rank, in the order of the sum.
    std::vector<float> factors;
    std::vector<bool> is_sent(static_cast<size_t>(group.ranks()));
    for (int64_t slot = token * kTopK; slot < (token + 1) * kTopK; ++slot) {
      const int32_t id = ids[static_cast<size_t>(slot)];
      if (id < 0) continue;
      const int owner = id / kExpertsOfARank;
      is_sent[static_cast<size_t>(owner)] = true;
      if (!is_topk) continue;
      factors.push_back(weights[static_cast<size_t>(slot)]);
      factors.push_back(static_cast<float>(1 << owner % 4));
    }
    for (int owner = 0; owner < group.ranks() && !is_topk; ++owner) {
      if (!is_sent[static_cast<size_t>(owner)]) continue;
      factors.push_back(1.0F);
      factors.push_back(static_cast<float>(1 << owner % 4));
    }
    for (int64_t i = token * kHidden; i < (token + 1) * kHidden; ++i) {
      const float x = bf16_to_float(rows[static_cast<size_t>(i)]);
      float sum = 0.0F;
      for (size_t f = 0; f < factors.size(); f += 2) {
        sum = std::fma(factors[f], x * factors[f + 1], sum);
      }
      require(sum == got[static_cast<size_t>(i)], "combine: other bytes");
    }
  }
}

// Calls of both orders, then one that the last rank stays away from.
std::string exchange_experts(const std::shared_ptr<Bootstrap>& bootstrap, Device device,
                             int64_t calls, ExpertTransport transport) {
  for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
    ExpertParallel group = ExpertParallel::create(bootstrap,
                                                  {.hidden = kHidden,
                                                   .experts = kExpertsOfARank * bootstrap->size(),
                                                   .top_k = kTopK,
                                                   .max_tokens = kMaxTokens,
                                                   .order = order},
                                                  {.device = device,
                                                   .transport = transport,
                                                   .all_to_all = {},
                                                   .deadline = Milliseconds(10'000)});
    require(group.transport() == transport, "another transport");
    Random random(static_cast<uint64_t>(bootstrap->rank()) + 1);
    for (int64_t call = 0; call < calls; ++call) exchange_tokens(group, device, random);
    group.destroy();
  }
  if (bootstrap->size() == 1) return "ok";
  ExpertParallel group = ExpertParallel::create(
      bootstrap,
      {.hidden = kHidden,
       .experts = kExpertsOfARank * bootstrap->size(),
       .top_k = kTopK,
       .max_tokens = kMaxTokens},
      {.device = device, .transport = transport, .all_to_all = {}, .deadline = Milliseconds(300)});
  std::string error = "rank " + std::to_string(bootstrap->size() - 1) + " stayed away";
  if (bootstrap->rank() < bootstrap->size() - 1) {
    Random random(1);
    try {
      exchange_tokens(group, device, random);
      error = "no error";
    } catch (const Error& failed) {
      error = std::string(to_string(failed.kind())) + ": " + failed.what();
    }
  }
  group.destroy();
  return error;
}

std::string run(const std::vector<std::string>& arguments) {
  const std::string multicast = turn_multicast_off();
  require(multicast.empty(), multicast);
  const RankInfo info{.rank = static_cast<int>(number(arguments.at(1))),
                      .size = static_cast<int>(number(arguments.at(2))),
                      .local_rank = static_cast<int>(number(arguments.at(1))),
                      .launcher = "arguments",
                      .job_id = "peer_rank"};
  const Device device{DeviceType::kCuda, static_cast<int>(number(arguments.at(3)))};
  const std::shared_ptr<Bootstrap> bootstrap =
      make_file_bootstrap(arguments.at(4), info, kDeadline);
  if (arguments.at(0) == "nccl") return use_nccl(*bootstrap, device);
  if (arguments.at(0) == "experts") {
    return exchange_experts(bootstrap, device, number(arguments.at(5)),
                            parse_expert_transport(arguments.at(6)));
  }
  return share_memory(*bootstrap, device, arguments.at(5), number(arguments.at(6)));
}

int report(const std::vector<std::string>& arguments) {
  std::string result;
  try {
    result = run(arguments);
  } catch (const Error& error) {
    result = std::string(to_string(error.kind())) + ": " + error.what();
  }
  const std::string file = arguments.at(4) + "/result." + arguments.at(1);
  std::ofstream(file + ".partial") << result;
  std::filesystem::rename(file + ".partial", file);
  return 0;
}

}  // namespace
}  // namespace narrowfloat::testing

int main(int argc, char** argv) {
  try {
    return narrowfloat::testing::report({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "peer_rank: %s\n", error.what());
    return 1;
  }
}
