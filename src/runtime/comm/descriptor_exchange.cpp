// See descriptor_exchange.h. The lower rank of a pair connects and sends first. Messages fit into
// the buffers of their sockets, so all ranks send before they wait and cannot wait for each other
// in a circle.
#include "runtime/comm/descriptor_exchange.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>

#include "base/throw_error.h"
#include "runtime/comm/phase.h"
#include "runtime/comm/system_error.h"

namespace narrowfloat {
namespace {

using Clock = std::chrono::steady_clock;
using Nonce = std::array<std::byte, 16>;

// A rank publishes this over the bootstrap.
struct SocketAddress {
  std::array<char, 44> name{};
  Nonce nonce{};
};

// The message that a descriptor travels with.
struct Greeting {
  Nonce nonce{};  // The receiver's.
  int32_t rank = 0;
};

struct Arrival {
  Greeting greeting;
  FileDescriptor descriptor;
};

FileDescriptor new_socket() {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) throw_system_error("cannot create a Unix socket");
  return socket;
}

// A name that begins with a zero byte lies in the abstract namespace: it is no file.
template <typename Call>
int with_address(const SocketAddress& address, Call call) {
  sockaddr_un named{};
  named.sun_family = AF_UNIX;
  static_assert(sizeof(named.sun_path) > 1 + sizeof(address.name));
  std::memcpy(named.sun_path + 1, address.name.data(), address.name.size());
  const auto size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + sizeof(address.name));
  return call(reinterpret_cast<const sockaddr*>(&named), size);
}

FileDescriptor listen_at(const SocketAddress& address, int num_connections) {
  FileDescriptor socket = new_socket();
  const int bound = with_address(address, [&](const sockaddr* named, socklen_t size) {
    return ::bind(socket.get(), named, size);
  });
  if (bound != 0) throw_system_error("cannot bind a Unix socket");
  if (::listen(socket.get(), num_connections) != 0) {
    throw_system_error("cannot listen at a Unix socket");
  }
  return socket;
}

bool is_of_this_user(const FileDescriptor& socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    throw_system_error("cannot read who is at the other end of a Unix socket");
  }
  return peer.uid == ::geteuid();
}

FileDescriptor connect_to(const SocketAddress& address, int peer, Clock::time_point deadline) {
  FileDescriptor socket = new_socket();
  while (with_address(address, [&](const sockaddr* named, socklen_t size) {
           return ::connect(socket.get(), named, size);
         }) != 0) {
    // EAGAIN: its queue of connections is full.
    if ((errno != EAGAIN && errno != EINTR) || Clock::now() > deadline) {
      throw_system_error(fmt::format(
          "cannot connect to the Unix socket of rank {} (ranks in containers have to share a "
          "network namespace)",
          peer));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!is_of_this_user(socket)) {
    throw_error(ErrorKind::kIo, "the Unix socket of rank {} belongs to another user", peer);
  }
  return socket;
}

// False at the deadline.
bool wait_until_readable(const FileDescriptor& socket, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd entry{.fd = socket.get(), .events = POLLIN, .revents = 0};
    const int count = ::poll(&entry, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (count > 0) return true;
    if (count == 0) return false;
    if (errno != EINTR) throw_system_error("cannot wait for a Unix socket");
  }
}

// Ancillary data of one descriptor, aligned as sendmsg() and recvmsg() want it.
struct alignas(cmsghdr) Ancillary {
  std::array<std::byte, CMSG_SPACE(sizeof(int))> bytes{};
};

msghdr message_of(iovec& data, Ancillary& ancillary) {
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = ancillary.bytes.data();
  message.msg_controllen = CMSG_LEN(sizeof(int));
  return message;
}

void send_descriptor(const FileDescriptor& socket, Greeting greeting, int descriptor) {
  iovec data{.iov_base = &greeting, .iov_len = sizeof(greeting)};
  Ancillary ancillary;
  const msghdr message = message_of(data, ancillary);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
  ssize_t count = 0;
  do {
    count = ::sendmsg(socket.get(), &message, MSG_NOSIGNAL);
  } while (count < 0 && errno == EINTR);
  if (count != sizeof(greeting)) throw_system_error("cannot send a file descriptor");
}

// Empty for anything but a greeting with one descriptor. The buffer has no room for a second one,
// which the kernel then closes.
std::optional<Arrival> receive_descriptor(const FileDescriptor& socket) {
  Arrival arrival;
  iovec data{.iov_base = &arrival.greeting, .iov_len = sizeof(arrival.greeting)};
  Ancillary ancillary;
  msghdr message = message_of(data, ancillary);
  const ssize_t count = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (count < 0) return std::nullopt;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message);
      header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof(descriptor));
    arrival.descriptor = FileDescriptor(descriptor);
  }
  if (count != sizeof(Greeting) || !arrival.descriptor.is_open()) return std::nullopt;
  return arrival;
}

// The descriptors of the lower ranks, each of which is answered with the own one. Connections of
// strangers are dropped.
void serve_lower_ranks(const FileDescriptor& listener, int rank, int descriptor,
                       const std::vector<SocketAddress>& addresses, Clock::time_point deadline,
                       std::vector<FileDescriptor>& received) {
  for (int missing = rank; missing > 0;) {
    if (!wait_until_readable(listener, deadline) || Clock::now() > deadline) {
      throw_error(ErrorKind::kDevice, "{} of {} lower ranks have not connected in time", missing,
                  rank);
    }
    const FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.is_open()) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) continue;
      throw_system_error("cannot accept a connection of a lower rank");
    }
    if (!is_of_this_user(socket) || !wait_until_readable(socket, deadline)) continue;
    std::optional<Arrival> arrival = receive_descriptor(socket);
    if (!arrival) continue;
    const Greeting& greeting = arrival->greeting;
    if (greeting.nonce != addresses[static_cast<size_t>(rank)].nonce) continue;
    if (greeting.rank < 0 || greeting.rank >= rank) continue;
    const auto peer = static_cast<size_t>(greeting.rank);
    if (received[peer].is_open()) continue;
    send_descriptor(socket, {.nonce = addresses[peer].nonce, .rank = rank}, descriptor);
    received[peer] = std::move(arrival->descriptor);
    --missing;
  }
}

FileDescriptor answer_of(const FileDescriptor& socket, int peer, const Nonce& nonce,
                         Clock::time_point deadline) {
  if (!wait_until_readable(socket, deadline)) {
    throw_error(ErrorKind::kDevice, "rank {} has not sent its file descriptor in time", peer);
  }
  std::optional<Arrival> arrival = receive_descriptor(socket);
  if (!arrival || arrival->greeting.nonce != nonce || arrival->greeting.rank != peer) {
    throw_error(ErrorKind::kIo, "rank {} has not sent a file descriptor", peer);
  }
  return std::move(arrival->descriptor);
}

}  // namespace

std::vector<FileDescriptor> exchange_descriptors(Bootstrap& bootstrap, int descriptor) {
  const int rank = bootstrap.rank();
  SocketAddress mine;
  FileDescriptor listener;
  run_phase(bootstrap, "listening for file descriptors", [&] {
    const std::string name = "narrowfloat-" + random_name();
    std::copy_n(name.begin(), mine.name.size(), mine.name.begin());
    fill_random(mine.nonce);
    listener = listen_at(mine, bootstrap.size());
  });
  const std::vector<SocketAddress> addresses = gather_values(bootstrap, mine);
  std::vector<FileDescriptor> received(addresses.size());
  run_phase(bootstrap, "exchanging file descriptors", [&] {
    const Clock::time_point deadline = Clock::now() + bootstrap.deadline() / 2;
    std::vector<FileDescriptor> sockets(addresses.size());
    for (int peer = rank + 1; peer < bootstrap.size(); ++peer) {
      const auto idx = static_cast<size_t>(peer);
      sockets[idx] = connect_to(addresses[idx], peer, deadline);
      send_descriptor(sockets[idx], {.nonce = addresses[idx].nonce, .rank = rank}, descriptor);
    }
    serve_lower_ranks(listener, rank, descriptor, addresses, deadline, received);
    for (int peer = rank + 1; peer < bootstrap.size(); ++peer) {
      const auto idx = static_cast<size_t>(peer);
      received[idx] = answer_of(sockets[idx], peer, mine.nonce, deadline);
    }
  });
  return received;
}

}  // namespace narrowfloat
