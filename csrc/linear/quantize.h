// Per-row activation preparation, for *.isa.cpp files: call from within namespace pm::PM_ISA. A row's bytes are the same
// on every instruction set (for finite x).
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace pm::PM_ISA {

// Writes one row of an Activation of `kind` at `row` (activation_row_bytes(kind, k) bytes, padding included).
void prepare_row(ActKind kind, const float* x, int64_t k, std::byte* row);

// In place: each run of `block` values (a power of two that divides k) is multiplied by the orthonormal Walsh-Hadamard
// matrix, in natural order. Its own inverse.
void hadamard_row(float* x, int64_t k, int64_t block);

}  // namespace pm::PM_ISA
