// Host names, ports, and sockets made of them.
#pragma once

#include <string>
#include <vector>

#include "runtime/comm/tcp_connection.h"
#include "runtime/comm/wait_deadline.h"

namespace narrowfloat {

// Listens on a numeric address or "localhost" there alone, on another name on all interfaces: the
// name of a host may mean the loopback on the host itself. Throws kIo.
std::vector<Socket> listen_on(const std::string& host, int port, int backlog);

// A connection that waits at the listener, or a closed socket.
Socket accept_from(int listener);

// One attempt at each address of the host. Returns a closed socket and the reason if none answers.
// Throws kIo where the name has no address.
Socket connect_to(const std::string& host, int port, const WaitDeadline& limit,
                  std::string& reason);

}  // namespace narrowfloat
