// Building PackedLinear: allocate for the final shape, then write rows as they stream in from a file. Rows of several
// tensors (q, k and v; gate and up) may be written into one packed matrix, and no second copy is ever held.
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace pm {

struct PackSpec {
  WeightKind kind;
  int64_t rows;           // of W, before gating halves the outputs
  int64_t k;
  bool gated = false;     // rows is 2F: gate rows 0 .. F-1, up rows F .. 2F-1
  bool bias = false;
  int group = 0;          // group kinds: 16 (group8 only) or 32 * 2^n
  bool has_min = false;   // group kinds
  int bits = 8;           // group8 with minima: of its largest integer; no matter for others
};

// Throws std::invalid_argument, naming the value and the limit, when the kernels have no such form.
PackedLinear new_packed(const PackSpec& spec);

enum class SourceType : uint8_t { f32, f16, bf16 };

// A row-major block of source rows; `ld` elements from row to row.
struct FloatRows {
  const void* data;
  SourceType type;
  int64_t ld;
};

// Each writes source rows [first, first + count) of W, on all threads.
void write_float_rows(PackedLinear& w, int64_t first, int64_t count, const FloatRows& rows);  // f32, bf16
// int8 weights from floats: scale = absmax / 127 of each row, round to nearest even.
void write_rounded_int8_rows(PackedLinear& w, int64_t first, int64_t count, const FloatRows& rows);
void write_int8_rows(PackedLinear& w, int64_t first, int64_t count, const int8_t* q, int64_t ld, const float* scale);
// q [count, k] holds one value per byte (0 .. 15 for group4). scale and min are [count, ceil(k / group)] float. Without
// min, w = scale * (q - zero): zero must be 8 for group4; for group8, q - zero must fit int8. Scales are stored as
// float16 times a power of two per output, so float16 scales of a file are kept exactly, others to 11 bits.
void write_group_rows(PackedLinear& w, int64_t first, int64_t count, const uint8_t* q, int64_t ld, const float* scale,
                      const float* min, int zero);
void write_bias(PackedLinear& w, int64_t first, int64_t count, const float* bias);

// The weights as stored, dequantised: one source row [k]; or source rows rows[0 .. count) (all in order when null) into
// out [count, k]. An embedding lookup; tests.
void unpack_row(const PackedLinear& w, int64_t row, float* out);
void unpack(const PackedLinear& w, const int32_t* rows, int64_t count, float* out);

}  // namespace pm
