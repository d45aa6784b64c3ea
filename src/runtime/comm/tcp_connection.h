// Frames over a TCP connection that never blocks.
//
//   frame:  magic u32 | type u32 | payload length u64 | payload        all little-endian
//
// A Connection queues what the socket does not take at once. wait_for_connections() waits until any
// of several can go on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace narrowfloat {

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  void close();

 private:
  int release();
  int fd_;
};

enum class FrameType : uint32_t {
  kHello = 1,    // To rank 0: protocol, size and rank (u32 each), job id.
  kWelcome = 2,  // From rank 0: all ranks have come.
  kWaiting = 3,  // From rank 0: text, the ranks that it waits for.
  kMessage = 4,  // To rank 0: the message of a rank.
  kResult = 5,   // From rank 0: the messages of all ranks.
  kError = 6,    // Both ways: error kind (u32), text. The sender then closes the connection.
};

struct Frame {
  FrameType type{};
  uint64_t length = 0;             // As announced.
  std::vector<std::byte> payload;  // Empty if `length` is above the limit of the connection.
};

class Connection {
 public:
  // Takes a connected socket and makes it non-blocking.
  explicit Connection(Socket socket);

  [[nodiscard]] int fd() const { return socket_.fd(); }
  // Payloads above it are read and dropped, so a wrong peer cannot make this process allocate.
  void set_payload_limit(uint64_t bytes) { payload_limit_ = bytes; }

  void send(FrameType type, std::span<const std::byte> payload);
  // Sends what the socket takes.
  void flush();
  [[nodiscard]] bool has_unsent() const { return sent_ < outbox_.size(); }

  // The next frame, if it is complete.
  std::optional<Frame> receive();
  // After receive(): the peer has closed the connection or it broke, and all frames were taken.
  [[nodiscard]] bool is_closed() const { return !close_reason_.empty(); }
  [[nodiscard]] const std::string& close_reason() const { return close_reason_; }
  // The peer has sent something else than frames; the connection counts as closed.
  [[nodiscard]] bool is_foreign() const { return foreign_; }

 private:
  static constexpr size_t kHeaderBytes = 16;

  // Reads into `into`; 0 if nothing is there, or the connection has closed.
  size_t read_some(std::span<std::byte> into);
  bool read_header();
  bool read_payload();

  Socket socket_;
  uint64_t payload_limit_ = 1024;
  std::vector<std::byte> outbox_;
  size_t sent_ = 0;
  std::byte header_[kHeaderBytes] = {};
  size_t header_have_ = 0;
  Frame frame_;
  uint64_t payload_have_ = 0;
  std::string close_reason_;
  bool foreign_ = false;
};

// Waits until a listener has a connection, a connection has data or can send what is queued, or
// the time is over. Then flushes them.
void wait_for_connections(std::span<Connection* const> connections, std::span<const int> listeners,
                          int timeout_ms);
// The same for sending alone; what the peers send meanwhile stays unread.
void wait_until_sendable(std::span<Connection* const> connections, int timeout_ms);

// Little-endian numbers in payloads.
void append_u32(std::vector<std::byte>& payload, uint32_t value);
uint32_t read_u32(std::span<const std::byte> payload, size_t offset);
void append_text(std::vector<std::byte>& payload, const std::string& text);
std::string read_text(std::span<const std::byte> payload, size_t offset);

}  // namespace narrowfloat
