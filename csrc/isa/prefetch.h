// Hints to the caches, the same for every instruction set. Any address will do.
//
// Always inline: GCC sees no effect in a function that only hints, and drops calls to it.
#pragma once

namespace pm::PM_ISA {

// Into the first level, or the second.
[[gnu::always_inline]] inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
[[gnu::always_inline]] inline void prefetch_second_level(const void* p) { __builtin_prefetch(p, 0, 2); }

// Into the first level, as this core's own.
[[gnu::always_inline]] inline void prefetch_to_write(const float* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*p));  // GCC takes the other hint where no -m flag names this one
#else
  __builtin_prefetch(p, 1, 3);
#endif
}

}  // namespace pm::PM_ISA
