// Frames over a TCP connection that never blocks.
#include "runtime/comm/tcp_connection.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include <netinet/in.h>
#include <netinet/tcp.h>

#include "base/throw_error.h"

namespace narrowfloat {
namespace {

constexpr uint32_t kFrameMagic = 0x3142464EU;  // "NFB1"

void append_little_endian(std::vector<std::byte>& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<std::byte>(value >> (8 * i)));
}

uint64_t read_little_endian(std::span<const std::byte> in, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= std::to_integer<uint64_t>(in[i]) << (8 * i);
  return value;
}

void poll_sockets(std::vector<pollfd>& polled, int timeout_ms) {
  if (::poll(polled.data(), polled.size(), timeout_ms) < 0 && errno != EINTR) {
    throw_error(ErrorKind::kIo, "bootstrap over TCP: poll failed: {}", std::strerror(errno));
  }
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

int Socket::release() { return std::exchange(fd_, -1); }

Connection::Connection(Socket socket) : socket_(std::move(socket)) {
  const int one = 1;
  // Frames are small and each is waited for. Without the option they are only slower.
  ::setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  if (::fcntl(fd(), F_SETFL, ::fcntl(fd(), F_GETFL) | O_NONBLOCK) != 0) {
    throw_error(ErrorKind::kIo, "bootstrap over TCP: cannot make a socket non-blocking: {}",
                std::strerror(errno));
  }
}

void Connection::send(FrameType type, std::span<const std::byte> payload) {
  append_little_endian(outbox_, kFrameMagic, 4);
  append_little_endian(outbox_, static_cast<uint32_t>(type), 4);
  append_little_endian(outbox_, payload.size(), 8);
  outbox_.insert(outbox_.end(), payload.begin(), payload.end());
  flush();
}

void Connection::flush() {
  while (has_unsent()) {
    const ssize_t count =
        ::send(fd(), outbox_.data() + sent_, outbox_.size() - sent_, MSG_NOSIGNAL);
    if (count < 0 && would_block()) return;
    // A broken connection: receive() still finds what the peer has sent before, and then the end.
    if (count < 0) break;
    sent_ += static_cast<size_t>(count);
  }
  outbox_.clear();
  sent_ = 0;
}

size_t Connection::read_some(std::span<std::byte> into) {
  const ssize_t count = ::recv(fd(), into.data(), into.size(), 0);
  if (count > 0) return static_cast<size_t>(count);
  if (count == 0) close_reason_ = "the peer has closed the connection";
  if (count < 0 && !would_block()) close_reason_ = std::strerror(errno);
  return 0;
}

bool Connection::read_header() {
  while (header_have_ < kHeaderBytes) {
    const size_t count = read_some(std::span(header_).subspan(header_have_));
    if (count == 0) return false;
    header_have_ += count;
    if (header_have_ < kHeaderBytes) continue;
    if (read_little_endian(header_, 4) != kFrameMagic) {
      foreign_ = true;
      close_reason_ = "the peer does not speak this protocol";
      return false;
    }
    frame_.type = static_cast<FrameType>(read_little_endian(std::span(header_).subspan(4), 4));
    frame_.length = read_little_endian(std::span(header_).subspan(8), 8);
    if (frame_.length <= payload_limit_) frame_.payload.resize(frame_.length);
  }
  return true;
}

bool Connection::read_payload() {
  std::array<std::byte, 4096> dropped;
  while (payload_have_ < frame_.length) {
    std::span<std::byte> into = dropped;
    if (frame_.payload.empty()) {
      into = into.first(std::min<uint64_t>(into.size(), frame_.length - payload_have_));
    } else {
      into = std::span(frame_.payload).subspan(payload_have_);
    }
    const size_t count = read_some(into);
    if (count == 0) return false;
    payload_have_ += count;
  }
  return true;
}

std::optional<Frame> Connection::receive() {
  if (is_closed() || !read_header() || !read_payload()) return std::nullopt;
  header_have_ = 0;
  payload_have_ = 0;
  return std::exchange(frame_, Frame{});
}

void wait_for_connections(std::span<Connection* const> connections, std::span<const int> listeners,
                          int timeout_ms) {
  std::vector<pollfd> polled;
  for (const int listener : listeners) polled.push_back({listener, POLLIN, 0});
  for (const Connection* connection : connections) {
    const int events = connection->has_unsent() ? POLLIN | POLLOUT : POLLIN;
    polled.push_back({connection->fd(), static_cast<short>(events), 0});
  }
  poll_sockets(polled, timeout_ms);
  for (Connection* connection : connections) connection->flush();
}

void wait_until_sendable(std::span<Connection* const> connections, int timeout_ms) {
  std::vector<pollfd> polled;
  for (const Connection* connection : connections) polled.push_back({connection->fd(), POLLOUT, 0});
  poll_sockets(polled, timeout_ms);
  for (Connection* connection : connections) connection->flush();
}

void append_u32(std::vector<std::byte>& payload, uint32_t value) {
  append_little_endian(payload, value, 4);
}

uint32_t read_u32(std::span<const std::byte> payload, size_t offset) {
  return static_cast<uint32_t>(read_little_endian(payload.subspan(offset), 4));
}

void append_text(std::vector<std::byte>& payload, const std::string& text) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
  payload.insert(payload.end(), bytes.begin(), bytes.end());
}

std::string read_text(std::span<const std::byte> payload, size_t offset) {
  std::string text;
  for (const std::byte byte : payload.subspan(offset)) text.push_back(static_cast<char>(byte));
  return text;
}

}  // namespace narrowfloat
