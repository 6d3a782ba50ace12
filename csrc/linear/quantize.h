// Per-row activation preparation, for *.isa.cpp files: call from within namespace pm::PM_ISA. A row's bytes are the same
// on every instruction set (for finite x).
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace pm::PM_ISA {

// x [k] -> q [k] int8 = round-to-nearest-even(x * 127 / absmax), scale = absmax / 127, and the sum of q. A row of zeros
// gives scale 0 and zeros. q has room for k rounded up to 32; what is beyond k is zeroed.
void quantize_row_token(const float* x, int64_t k, int8_t* q, float& scale, int32_t& sum);

// The same for each 32 values: ceil(k / 32) records, the last padded with zeros.
void quantize_row_group(const float* x, int64_t k, GroupRecord* out);

// x [k] -> bfloat16, round to nearest even; NaN stays NaN.
void round_row_bf16(const float* x, int64_t k, uint16_t* out);

// Writes one row of an Activation of `kind` at `row` (activation_row_bytes(kind, k) bytes, padding included).
void prepare_row(ActKind kind, const float* x, int64_t k, std::byte* row);

// In place: each run of `block` values (a power of two that divides k) is multiplied by the orthonormal Walsh-Hadamard
// matrix, in natural order. Its own inverse.
void hadamard_row(float* x, int64_t k, int64_t block);

}  // namespace pm::PM_ISA
