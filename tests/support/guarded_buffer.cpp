// See guarded_buffer.h. One mapping per buffer; its last page is unreadable in both styles.
#include "support/guarded_buffer.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

namespace narrowfloat::testing {
namespace {

constexpr uint8_t kCanary = 0xA5;
constexpr int64_t kCanaryBytes = 64;
constexpr int64_t kPage = 4096;
constexpr size_t kNoteSize = 1024;
std::array<char, kNoteSize> crash_note{};

extern "C" void narrowfloat_test_fault(int signal) {
  const char* note = crash_note.data();
  if (write(STDERR_FILENO, note, std::strlen(note)) < 0) _exit(3);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

GuardedBuffer::GuardedBuffer(int64_t bytes, const BufferStyle& style)
    : size_(bytes), guard_(style.guard) {
  const int64_t canary_after = guard_ == Guard::kCanary ? 2 * kCanaryBytes : 0;
  const int64_t usable = (bytes + kCanaryBytes + canary_after + kPage - 1) / kPage * kPage;
  total_ = usable + kPage;
  void* mapping = mmap(nullptr, static_cast<size_t>(total_), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<uint8_t*>(mapping);
  if (mprotect(base_ + usable, kPage, PROT_NONE) != 0) throw std::bad_alloc();
  data_ = guard_ == Guard::kPage ? base_ + usable - bytes
                                 : base_ + kCanaryBytes + style.misalignment % kCanaryBytes;
  std::ranges::fill(front(), kCanary);
  std::ranges::fill(back(), kCanary);
  if (bytes > 0) std::memset(data_, style.poison, static_cast<size_t>(bytes));
}

GuardedBuffer::~GuardedBuffer() { release(); }

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept { *this = std::move(other); }

GuardedBuffer& GuardedBuffer::operator=(GuardedBuffer&& other) noexcept {
  if (this == &other) return *this;
  release();
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  base_ = std::exchange(other.base_, nullptr);
  total_ = other.total_;
  guard_ = other.guard_;
  return *this;
}

void GuardedBuffer::release() {
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(total_));
  base_ = nullptr;
}

std::span<uint8_t> GuardedBuffer::front() const {
  return {data_ - kCanaryBytes, static_cast<size_t>(kCanaryBytes)};
}

std::span<uint8_t> GuardedBuffer::back() const {
  const int64_t bytes = guard_ == Guard::kCanary ? kCanaryBytes : 0;
  return {data_ + size_, static_cast<size_t>(bytes)};
}

bool GuardedBuffer::intact() const {
  if (data_ == nullptr) return true;
  const auto stands = [](uint8_t byte) { return byte == kCanary; };
  return std::ranges::all_of(front(), stands) && std::ranges::all_of(back(), stands);
}

void set_crash_note(const char* note) {
  std::strncpy(crash_note.data(), note, kNoteSize - 2);
  crash_note[std::min(std::strlen(note), kNoteSize - 2)] = '\n';
  // Kept by sanitizers that have handlers of their own: theirs print more.
#if !defined(__SANITIZE_ADDRESS__)
  std::signal(SIGSEGV, narrowfloat_test_fault);
  std::signal(SIGBUS, narrowfloat_test_fault);
#endif
}

}  // namespace narrowfloat::testing
