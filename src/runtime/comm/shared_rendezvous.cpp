// A bootstrap in a page of memory that forked processes or threads share.
//
//   page:  PageHeader | Slot of rank 0 | Slot of rank 1 | ...
//
// Messages travel in rounds of up to 4096 bytes. In round n a rank waits until all have read round
// n - 1, writes its chunk into its own slot and sets `written` to n; then it waits until all have
// written round n, copies their chunks, and sets its `read` to n. The first chunk of a message
// carries its length. Rounds are counted modulo 2^32; ranks are never more than one apart.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <sched.h>
#include <sys/mman.h>
#include <utility>

#include "base/throw_error.h"
#include "runtime/comm/checked_bootstrap.h"
#include "runtime/comm/job_names.h"
#include "runtime/comm/rank_groups.h"
#include "runtime/comm/wait_deadline.h"

namespace narrowfloat {
namespace {

constexpr size_t kChunkBytes = 4096;
constexpr int kMaxSharedRanks = 4096;

struct alignas(64) PageHeader {
  char job_id[60];
  uint32_t failed;  // 1 + the first rank on which a call has failed; 0: none.
};

struct Slot {
  alignas(64) uint32_t written;
  uint32_t read;
  uint32_t joined;  // A bootstrap of this rank was made.
  uint32_t ended;   // It was destroyed.
  uint64_t message_bytes;
  char failure[512];  // If a call has failed here: why, with a 0 at the end.
  alignas(64) std::byte chunk[kChunkBytes];
};

static_assert(std::atomic_ref<uint32_t>::is_always_lock_free, "shared between processes");

PageHeader* page_header(void* page) { return static_cast<PageHeader*>(page); }
Slot* page_slots(void* page) { return reinterpret_cast<Slot*>(page_header(page) + 1); }

size_t page_bytes(int ranks) {
  return sizeof(PageHeader) + static_cast<size_t>(ranks) * sizeof(Slot);
}

uint32_t load_acquire(uint32_t& word) {
  return std::atomic_ref<uint32_t>(word).load(std::memory_order_acquire);
}

void store_release(uint32_t& word, uint32_t value) {
  std::atomic_ref<uint32_t>(word).store(value, std::memory_order_release);
}

class SharedBootstrap final : public CheckedBootstrap {
 public:
  SharedBootstrap(RankInfo info, Milliseconds deadline, void* page)
      : CheckedBootstrap(std::move(info), deadline, "bootstrap in shared memory"), page_(page) {
    if (std::atomic_ref<uint32_t>(own().joined).exchange(1) != 0) {
      throw_invalid("SharedRendezvous: rank {} has its bootstrap already; each rank takes one",
                    rank());
    }
  }
  ~SharedBootstrap() override { store_release(own().ended, 1); }

 private:
  using Counter = uint32_t Slot::*;

  [[nodiscard]] Slot& slot(int rank) const { return page_slots(page_)[rank]; }
  [[nodiscard]] Slot& own() const { return slot(rank()); }

  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    const WaitDeadline limit(deadline());
    size_t offset = 0;
    do {
      const size_t bytes = std::min(mine.size() - offset, kChunkBytes);
      wait_for_all(&Slot::read, round_, limit);
      ++round_;
      own().message_bytes = mine.size();
      std::copy_n(mine.begin() + static_cast<ptrdiff_t>(offset), bytes, own().chunk);
      store_release(own().written, round_);
      wait_for_all(&Slot::written, round_, limit);
      if (offset == 0) check_sizes();
      for (int rank = 0; rank < size(); ++rank) {
        std::copy_n(slot(rank).chunk, bytes,
                    part(all, rank).begin() + static_cast<ptrdiff_t>(offset));
      }
      store_release(own().read, round_);
      offset += bytes;
    } while (offset < mine.size());
    // A late rank finds the message of ranks that have given up.
    throw_if_failed_elsewhere(failed_rank());
  }

  [[nodiscard]] uint32_t failed_rank() const { return load_acquire(page_header(page_)->failed); }

  void throw_if_failed_elsewhere(uint32_t rank_plus_1) const {
    if (rank_plus_1 == 0) return;
    const int r = static_cast<int>(rank_plus_1) - 1;
    throw_error(ErrorKind::kDevice, "{}: rank {} has failed: {}", place(), r, slot(r).failure);
  }

  void announce_failure(const std::string& what) override {
    // The page began with zeros, so the last byte ends the text.
    std::copy_n(what.begin(), std::min(what.size(), sizeof(Slot::failure) - 1), own().failure);
    uint32_t none = 0;
    std::atomic_ref<uint32_t>(page_header(page_)->failed)
        .compare_exchange_strong(none, static_cast<uint32_t>(rank()) + 1);
  }

  void check_sizes() const {
    std::vector<uint64_t> sizes;
    sizes.reserve(static_cast<size_t>(size()));
    for (int rank = 0; rank < size(); ++rank) sizes.push_back(slot(rank).message_bytes);
    require_one_size(sizes);
  }

  [[nodiscard]] bool reached(int rank, Counter counter, uint32_t round) const {
    return static_cast<int32_t>(load_acquire(slot(rank).*counter) - round) >= 0;
  }

  void wait_for_all(Counter counter, uint32_t round, const WaitDeadline& limit) const {
    for (int rank = 0; rank < size(); ++rank) {
      int yields_left = 100;
      BackOff back_off(std::chrono::microseconds(20), std::chrono::milliseconds(1));
      while (!reached(rank, counter, round)) {
        const uint32_t failed = failed_rank();
        const bool has_ended = load_acquire(slot(rank).ended) != 0;
        // In this order: a rank may go on and fail or end between the looks.
        if (reached(rank, counter, round)) break;
        throw_if_failed_elsewhere(failed);
        if (has_ended) {
          throw_error(ErrorKind::kDevice,
                      "{}: rank {} has ended and takes no part; see its own error", place(), rank);
        }
        if (limit.passed()) throw_missing(counter, round);
        if (yields_left > 0) {
          --yields_left;
          ::sched_yield();
        } else {
          back_off.sleep(limit);
        }
      }
    }
  }

  [[noreturn]] void throw_missing(Counter counter, uint32_t round) const {
    std::vector<int> missing;
    for (int rank = 0; rank < size(); ++rank) {
      if (!reached(rank, counter, round)) missing.push_back(rank);
    }
    throw_error(ErrorKind::kDevice,
                "{}: waited {} ms for {} of {}; check that all ranks are alive and make the same "
                "calls",
                place(), deadline().count(),
                counter == &Slot::read ? "the last message to be read" : "the message",
                // The last of them may have come since.
                missing.empty() ? std::string("a late rank") : name_ranks(missing));
  }

  void* page_;
  uint32_t round_ = 0;
};

}  // namespace

SharedRendezvous::SharedRendezvous(int size) : size_(size), page_(nullptr) {
  if (size < 1 || size > kMaxSharedRanks) {
    throw_invalid("SharedRendezvous: size: expected 1 to {}, got {}", kMaxSharedRanks, size);
  }
  page_ =
      ::mmap(nullptr, page_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page_ == MAP_FAILED) {
    throw_error(ErrorKind::kIo, "SharedRendezvous: cannot map {} bytes of shared memory: {}",
                page_bytes(size), std::strerror(errno));
  }
  // The system gives zeros, which is the state before round 1.
  const std::string job_id = "shared-" + random_token();
  std::copy(job_id.begin(), job_id.end(), page_header(page_)->job_id);
}

SharedRendezvous::~SharedRendezvous() { ::munmap(page_, page_bytes(size_)); }

std::unique_ptr<Bootstrap> SharedRendezvous::bootstrap(int rank, Bootstrap::Milliseconds deadline) {
  RankInfo info{.rank = rank,
                .size = size_,
                .local_rank = std::max(rank, 0),
                .launcher = "arguments",
                .job_id = page_header(page_)->job_id};
  return std::make_unique<SharedBootstrap>(std::move(info), deadline, page_);
}

}  // namespace narrowfloat
