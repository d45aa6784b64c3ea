// Host names, ports, and sockets made of them.
#include "runtime/comm/tcp_address.h"

#include <cerrno>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <utility>

#include <netinet/in.h>

#include "base/throw_error.h"

namespace narrowfloat {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// host: null for all interfaces. The resolver has time limits of its own. Null and the reason where
// the name cannot be resolved at the moment.
Addresses resolve(const char* host, int port, int flags, std::string& reason) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host, fmt::format("{}", port).c_str(), &hints, &list);
  if (error == 0) return Addresses(list);
  reason = error == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(error);
  if (error != EAI_AGAIN && (flags & AI_NUMERICHOST) == 0) {
    throw_error(ErrorKind::kIo, "bootstrap over TCP: cannot resolve the host \"{}\": {}",
                host == nullptr ? "*" : host, reason);
  }
  return nullptr;
}

Socket open_socket(const addrinfo& address, int flags) {
  return Socket(
      ::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | flags, address.ai_protocol));
}

bool bind_and_listen(const Socket& socket, const addrinfo& address, int backlog) {
  const int one = 1;
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (address.ai_family == AF_INET6) {
    // So that all interfaces of IPv6 and of IPv4 can both be bound.
    ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
  }
  return ::bind(socket.fd(), address.ai_addr, address.ai_addrlen) == 0 &&
         ::listen(socket.fd(), backlog) == 0;
}

// A port of the range that the system gives to clients can be connected to itself while nobody
// listens on it.
bool is_connected_to_itself(const Socket& socket) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_length = sizeof(own);
  socklen_t peer_length = sizeof(peer);
  return ::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         ::getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 &&
         own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

// 0, or the number of the error.
int connect_socket(const Socket& socket, const addrinfo& address, const WaitDeadline& limit) {
  int error = ::connect(socket.fd(), address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd polled{socket.fd(), POLLOUT, 0};
    // An address that does not answer must not use up the time for the next one.
    const int ready = ::poll(&polled, 1, limit.poll_timeout(std::chrono::seconds(5)));
    socklen_t length = sizeof(error);
    error = ETIMEDOUT;
    if (ready > 0) ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  return error == 0 && is_connected_to_itself(socket) ? ECONNREFUSED : error;
}

}  // namespace

std::vector<Socket> listen_on(const std::string& host, int port, int backlog) {
  std::string reason;
  Addresses addresses = resolve(host.c_str(), port, AI_NUMERICHOST, reason);
  if (!addresses) {
    addresses = resolve(host == "localhost" ? "localhost" : nullptr, port, AI_PASSIVE, reason);
  }
  std::vector<Socket> listeners;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket = open_socket(*address, SOCK_NONBLOCK);
    if (socket.is_open() && bind_and_listen(socket, *address, backlog)) {
      listeners.push_back(std::move(socket));
      continue;
    }
    reason = std::strerror(errno);
    // One of two protocol families may be missing; a port in use is a fault in any case.
    if (errno == EADDRINUSE) {
      listeners.clear();
      break;
    }
  }
  if (listeners.empty()) {
    throw_error(ErrorKind::kIo,
                "bootstrap over TCP: rank 0 cannot listen on {}:{}: {}; expected an address of the "
                "host of rank 0 and a free port",
                host, port, reason);
  }
  return listeners;
}

Socket accept_from(int listener) {
  return Socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

Socket connect_to(const std::string& host, int port, const WaitDeadline& limit,
                  std::string& reason) {
  const Addresses addresses = resolve(host.c_str(), port, 0, reason);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket = open_socket(*address, SOCK_NONBLOCK);
    const int error = socket.is_open() ? connect_socket(socket, *address, limit) : errno;
    if (error == 0) return socket;
    reason = std::strerror(error);
  }
  return Socket();
}

}  // namespace narrowfloat
