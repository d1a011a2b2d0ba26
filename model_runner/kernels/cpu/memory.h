// Scratch memory in pieces.
#pragma once
#include <cstdint>

#include "rounding.h"

namespace SW_ISA {

// Hands out aligned pieces of memory that begins at `place`; where that is null, it finds out how much is needed.
struct Memory {
  char *place;
  int64_t used;

  char *operator()(int64_t bytes) {
    char *piece = place + used;
    used += round_up(bytes, 64);
    return piece;
  }
};

}  // namespace SW_ISA
