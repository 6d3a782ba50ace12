// What the machine can do at best, for the benchmarks to be held against.
#pragma once

#include <cstdint>

namespace pm {

struct CeilingTable {
  // Runs `rounds` times 12 independent dot-product instructions; the result only keeps the work alive.
  float (*int8)(int64_t rounds);
  float (*bf16)(int64_t rounds);  // null where the set has no bf16 dot product
  float (*f32)(int64_t rounds);
  int lanes;
  uint64_t (*read)(const void* data, int64_t bytes);  // a multiple of 512 bytes
};
const CeilingTable& pick_ceiling();

// Best of several tries within about `seconds`, on all threads. Operations are multiplications plus additions, a second
// ("int8", "bf16", "f32"); for "read" bytes a second over `bytes` of memory. 0 where the set has no such instruction.
// Throws std::invalid_argument for another kind.
double measure_ceiling(const char* kind, double seconds, int64_t bytes);

}  // namespace pm
