// NF_ASSERT: for bugs of this library, never for bad input. Active in every build type.
#pragma once

#include <cstdio>
#include <cstdlib>

#define NF_ASSERT(condition)                                                               \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      std::fprintf(stderr, "%s:%d: internal error: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)
