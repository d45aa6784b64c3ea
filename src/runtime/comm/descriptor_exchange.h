// File descriptors from every rank to every other rank of one host, over Unix sockets.
#pragma once

#include <vector>

#include "narrowfloat/bootstrap.h"
#include "runtime/comm/file_descriptor.h"

namespace narrowfloat {

// Collective. Gives a duplicate of each rank's `descriptor`; the entry of the own rank is closed.
// Each pair of ranks has one connection, over an abstract socket with a random name. Both sides
// show that they run as the same user (SO_PEERCRED) and that they know a random number which the
// other one has published over the bootstrap, so that no other process can take part. Ranks have to
// share a network namespace. Waits for half of the bootstrap's deadline at most.
std::vector<FileDescriptor> exchange_descriptors(Bootstrap& bootstrap, int descriptor);

}  // namespace narrowfloat
