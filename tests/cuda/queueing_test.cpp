// However a call is queued, it gives the bytes it gives alone: in graphs, with programmatic launch,
// beside other streams and threads, on a device that is not current. And it allocates nothing.
#include <algorithm>
#include <memory>
#include <thread>

#include "cuda/gpu_test.h"
#include "cuda/operation_calls.h"

namespace narrowfloat::testing {
namespace {

constexpr uint64_t kSeed = 41;

class GpuQueueing : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    ASSERT_FALSE(calls().empty());
  }
  // The same calls for all tests.
  static const std::vector<OperationCall>& calls() {
    static const std::vector<OperationCall> kCalls = sample_operation_calls(kSeed, 2);
    return kCalls;
  }
};

// Other data of the same kind.
void change_data(const OperationCall& call) {
  const auto bytes = call.inputs.front()->span();
  const size_t distance = std::min<size_t>(64, bytes.size() / 32 * 16);
  std::rotate(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(distance), bytes.end());
}

void expect_replays_equal(const OperationCall& call, bool programmatic_launch) {
  const CudaStream stream;
  const DeviceCopies device(call.buffers());
  const OutputBytes expected = run_alone(call, device, stream.get());
  const CapturedGraph graph(stream, [&] { call.queue(device, stream.get(programmatic_launch)); });
  EXPECT_GT(graph.num_nodes(), 0) << call.name;
  send(call, device);
  graph.replay();
  EXPECT_EQ(difference(expected, take_outputs(call, device)), "") << call.name;
  change_data(call);
  const OutputBytes changed = run_alone(call, device, stream.get());
  send(call, device);
  graph.replay(call.updates_in_place ? 1 : 10);
  EXPECT_EQ(difference(changed, take_outputs(call, device)), "") << call.name;
}

TEST_F(GpuQueueing, GraphsReplayTheCall) {
  for (const OperationCall& call : calls()) {
    expect_replays_equal(call, false);
    expect_replays_equal(call, true);
    if (HasFailure()) return;
  }
}

// Under initcheck: nothing is read before it is written, and every output byte is written.
TEST_F(GpuQueueing, OutputsNeedNoInitialization) {
  for (const OperationCall& call : calls()) {
    if (call.updates_in_place || !call.writes_everything) continue;
    const CudaStream stream;
    const OutputBytes expected = run_alone(call, DeviceCopies(call.buffers()), stream.get());
    const DeviceCopies device(call.buffers(), {.uninitialized = call.outputs});
    call.queue(device, stream.get());
    stream.synchronize();
    EXPECT_EQ(difference(expected, take_outputs(call, device)), "") << call.name;
  }
}

// All calls with a stream and copies of their own.
struct Lane {
  CudaStream stream;
  std::vector<std::unique_ptr<DeviceCopies>> copies;

  Lane(const std::vector<OperationCall>& calls, Device device) : stream(device) {
    for (const OperationCall& call : calls) {
      copies.push_back(
          std::make_unique<DeviceCopies>(call.buffers(), DeviceCopyStyle{.device = device}));
      send(call, *copies.back());
    }
  }
  void queue(const std::vector<OperationCall>& calls, size_t i, bool programmatic_launch) const {
    calls[i].queue(*copies[i], stream.get(programmatic_launch));
  }
};

std::vector<OutputBytes> outputs_alone(const std::vector<OperationCall>& calls) {
  const CudaStream stream;
  std::vector<OutputBytes> outputs;
  for (const OperationCall& call : calls) {
    outputs.push_back(run_alone(call, DeviceCopies(call.buffers()), stream.get()));
  }
  return outputs;
}

void expect_outputs(const std::vector<OperationCall>& calls,
                    const std::vector<OutputBytes>& expected, const Lane& lane) {
  lane.stream.synchronize();
  for (size_t i = 0; i < calls.size(); ++i) {
    EXPECT_EQ(difference(expected[i], take_outputs(calls[i], *lane.copies[i])), "")
        << calls[i].name;
  }
}

TEST_F(GpuQueueing, StreamsRunAtOnce) {
  const std::vector<OutputBytes> expected = outputs_alone(calls());
  const Lane first(calls(), gpu());
  const Lane second(calls(), gpu());
  for (size_t i = 0; i < calls().size(); ++i) {
    first.queue(calls(), i, false);
    second.queue(calls(), i, true);
  }
  expect_outputs(calls(), expected, first);
  expect_outputs(calls(), expected, second);
}

TEST_F(GpuQueueing, ThreadsQueueAtOnce) {
  const std::vector<OutputBytes> expected = outputs_alone(calls());
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int i = 0; i < 4; ++i) lanes.push_back(std::make_unique<Lane>(calls(), gpu()));
  std::vector<std::thread> threads;
  for (const auto& lane : lanes) {
    threads.emplace_back([&lane] {
      for (size_t i = 0; i < calls().size(); ++i) lane->queue(calls(), i, i % 2 == 0);
      lane->stream.synchronize();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& lane : lanes) expect_outputs(calls(), expected, *lane);
}

TEST_F(GpuQueueing, TheTensorsDeviceNeedNotBeCurrent) {
  if (const std::string reason = gpu_missing(1); !reason.empty()) GTEST_SKIP() << reason;
  const std::vector<OutputBytes> expected = outputs_alone(calls());
  const Lane lane(calls(), gpu(1));
  ASSERT_EQ(current_device(), 0);
  for (size_t i = 0; i < calls().size(); ++i) lane.queue(calls(), i, false);
  EXPECT_EQ(current_device(), 0);
  expect_outputs(calls(), expected, lane);
}

// Allocations out of a pool do not show in the free memory, but they do in a graph.
TEST_F(GpuQueueing, KernelsAndMemsetsAreAllThatIsQueued) {
  const CudaStream stream;
  for (const OperationCall& call : calls()) {
    const DeviceCopies device(call.buffers());
    run_alone(call, device, stream.get());  // The first launch of a kernel loads its code.
    const CapturedGraph graph(stream, [&] { call.queue(device, stream.get()); });
    EXPECT_EQ(graph.num_other_nodes(), 0) << call.name << ": " << graph.num_nodes() << " nodes";
  }
}

TEST_F(GpuQueueing, NothingIsAllocated) {
  const Lane lane(calls(), gpu());
  // The first launch of a kernel loads its code.
  for (size_t i = 0; i < calls().size(); ++i) lane.queue(calls(), i, true);
  lane.stream.synchronize();
  const int64_t before = free_device_memory();
  for (size_t i = 0; i < calls().size(); ++i) lane.queue(calls(), i, true);
  EXPECT_EQ(free_device_memory(), before);
  lane.stream.synchronize();
  EXPECT_EQ(free_device_memory(), before);
}

}  // namespace
}  // namespace narrowfloat::testing
