// Threads take the next index from a counter: pieces need not cost the same.
#include "cli/threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {

void for_each_index(int64_t count, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (int64_t i = next++; i < count; i = next++) body(i);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    const int64_t num_threads_used = std::min<int64_t>(std::max(num_threads(), 1), count);
    for (int64_t i = 1; i < num_threads_used; ++i) threads.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace narrowfloat::cli
