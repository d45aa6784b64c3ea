// The two loops of parallel.h on oneTBB, and the limit on its threads.
#include "runtime/parallel.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include <tbb/blocked_range.h>
#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/parallel_reduce.h>
#include <tbb/task_arena.h>

#include "base/throw_error.h"
#include "narrowfloat/runtime.h"
#include "runtime/float_environment.h"

namespace narrowfloat {
namespace {

using Range = tbb::blocked_range<int64_t>;

std::mutex& control_mutex() {
  static std::mutex mutex;
  return mutex;
}

// The limit set by set_num_threads(); null for all cores.
std::unique_ptr<tbb::global_control>& control() {
  static std::unique_ptr<tbb::global_control> limit;
  return limit;
}

}  // namespace

void set_num_threads(int count) {
  if (count < 0) throw_invalid("num_threads: expected >= 0 (0 means all cores), got {}", count);
  const std::lock_guard lock(control_mutex());
  // The smallest active limit holds, so the new one is made before the old one is destroyed: a
  // concurrent call never runs unlimited.
  std::unique_ptr<tbb::global_control> limit;
  if (count > 0) {
    limit = std::make_unique<tbb::global_control>(tbb::global_control::max_allowed_parallelism,
                                                  static_cast<size_t>(count));
  }
  control() = std::move(limit);
}

int num_threads() {
  const auto limit =
      tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism);
  return std::min(static_cast<int>(limit), tbb::info::default_concurrency());
}

void parallel_for(int64_t count, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  const auto work = [&](const Range& range) {
    const FloatEnvironmentGuard guard;
    body(range.begin(), range.end());
  };
  // One thread has no use for tasks, which cost it a microsecond.
  if (count <= grain || num_threads() == 1) {
    if (count > 0) work(Range(0, count));
    return;
  }
  // The loop is isolated: a thread that waits here must not pick up the caller's own tasks, which
  // would run in this floating-point environment.
  tbb::this_task_arena::isolate(
      [&] { tbb::parallel_for(Range(0, count, static_cast<size_t>(grain)), work); });
}

uint32_t parallel_max(int64_t count, int64_t grain, FunctionRef<uint32_t(int64_t, int64_t)> body) {
  const auto work = [&](const Range& range, uint32_t so_far) {
    const FloatEnvironmentGuard guard;
    return std::max(so_far, body(range.begin(), range.end()));
  };
  return tbb::this_task_arena::isolate([&] {
    return tbb::parallel_reduce(Range(0, count, static_cast<size_t>(grain)), uint32_t{0}, work,
                                [](uint32_t a, uint32_t b) { return std::max(a, b); });
  });
}

}  // namespace narrowfloat
