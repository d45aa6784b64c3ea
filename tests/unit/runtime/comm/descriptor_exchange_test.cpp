// File descriptors between forked processes, also where a stranger connects.
#include "runtime/comm/descriptor_exchange.h"

#include <cstring>
#include <filesystem>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <gtest/gtest.h>

#include "support/forked_ranks.h"

namespace narrowfloat::testing {
namespace {

// A file in memory that holds the number.
FileDescriptor file_with(int number) {
  FileDescriptor file(::memfd_create("test", MFD_CLOEXEC));
  require(file.is_open(), "memfd_create");
  require(::pwrite(file.get(), &number, sizeof(number), 0) == sizeof(number), "pwrite");
  return file;
}

int number_in(const FileDescriptor& file) {
  int number = -1;
  require(::pread(file.get(), &number, sizeof(number), 0) == sizeof(number), "pread");
  return number;
}

int64_t count_open_files() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

void exchange_and_check(Bootstrap& bootstrap) {
  const FileDescriptor own = file_with(100 + bootstrap.rank());
  const std::vector<FileDescriptor> received = exchange_descriptors(bootstrap, own.get());
  require(received.size() == static_cast<size_t>(bootstrap.size()), "number of descriptors");
  for (int peer = 0; peer < bootstrap.size(); ++peer) {
    const FileDescriptor& file = received[static_cast<size_t>(peer)];
    require(file.is_open() == (peer != bootstrap.rank()), "which descriptors are open");
    if (file.is_open()) require(number_in(file) == 100 + peer, "the descriptor of a peer");
  }
}

TEST(DescriptorExchange, GivesEachRankTheDescriptorsOfAllOthers) {
  for (const int ranks : {1, 2, 3, 8}) expect_success_on_all(ranks, exchange_and_check);
}

TEST(DescriptorExchange, LeavesNothingOpen) {
  expect_success_on_all(4, [](Bootstrap& bootstrap) {
    const int64_t before = count_open_files();
    exchange_and_check(bootstrap);
    require(count_open_files() == before, "open files");
  });
}

// Reads the addresses that ranks publish, and connects to the last rank as one that does not know
// its number: once with a descriptor and wrong numbers, once with too few bytes.
class StrangerBootstrap final : public ForwardingBootstrap {
 public:
  using ForwardingBootstrap::ForwardingBootstrap;
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    ForwardingBootstrap::all_gather(mine, all);
    constexpr std::string_view kPrefix = "narrowfloat-";
    if (mine.size() < kPrefix.size()) return;
    if (std::memcmp(mine.data(), kPrefix.data(), kPrefix.size()) != 0) return;
    const std::byte* last = all.data() + all.size() - mine.size();
    sockets_.push_back(connect_to({reinterpret_cast<const char*>(last), 44}));
    send_greeting(sockets_.back(), 20);
    sockets_.push_back(connect_to({reinterpret_cast<const char*>(last), 44}));
    send_greeting(sockets_.back(), 7);
  }
  [[nodiscard]] size_t num_connections() const { return sockets_.size(); }

 private:
  static FileDescriptor connect_to(std::string_view name) {
    FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    require(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0,
            "connect");
    return socket;
  }
  static void send_greeting(const FileDescriptor& socket, size_t num_bytes) {
    std::byte bytes[20]{};
    alignas(cmsghdr) std::byte ancillary[CMSG_SPACE(sizeof(int))]{};
    iovec data{.iov_base = bytes, .iov_len = num_bytes};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = ancillary;
    message.msg_controllen = sizeof(ancillary);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int descriptor = socket.get();
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
    require(::sendmsg(socket.get(), &message, MSG_NOSIGNAL) >= 0, "sendmsg");
  }

  std::vector<FileDescriptor> sockets_;
};

TEST(DescriptorExchange, DropsStrangers) {
  expect_success_on_all(3, [](Bootstrap& bootstrap) {
    if (bootstrap.rank() != 0) {
      exchange_and_check(bootstrap);
      return;
    }
    StrangerBootstrap stranger(bootstrap);
    exchange_and_check(stranger);
    require(stranger.num_connections() == 2, "the test has not connected");
  });
}

TEST(DescriptorExchange, FailsOnAllRanksWhereOneHasNoDescriptor) {
  expect_error_on_all(3, ErrorKind::kIo, {"exchanging file descriptors", "Bad file descriptor"},
                      [](Bootstrap& bootstrap) {
                        const FileDescriptor own = file_with(1);
                        ForwardingBootstrap hasty(bootstrap, std::chrono::milliseconds(1000));
                        exchange_descriptors(hasty, bootstrap.rank() == 0 ? -1 : own.get());
                      });
}

}  // namespace
}  // namespace narrowfloat::testing
