// Per-row activation preparation, for *.isa.cpp files: call from within namespace pm::PM_ISA.
//
// Plain loops over float: each compiles to the set's own vectors. Maxima are order-free, rounding is per element and the
// sums are integers, so a row's bytes do not depend on the vector width.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear/linear.h"

namespace pm::PM_ISA {

// Largest |x[i]|. NaN counts as nothing here (and quantises to -127).
inline float row_absmax(const float* x, int64_t n) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int l = 0; l < 16; ++l) {
      const float a = std::fabs(x[i + l]);
      lanes[l] = a > lanes[l] ? a : lanes[l];
    }
  }
  for (; i < n; ++i) {
    const float a = std::fabs(x[i]);
    lanes[0] = a > lanes[0] ? a : lanes[0];
  }
  float most = 0;
  for (float lane : lanes) most = lane > most ? lane : most;
  return most;
}

// q = round-to-nearest-even(x * inverse), within ±127. Adding 1.5 * 2^23 rounds in the float unit itself and leaves the
// integer in the low bits, which vectorises on every set.
inline int32_t round_q(float x, float inverse) {
  float scaled = x * inverse;
  scaled = scaled > -127.0f ? scaled : -127.0f;  // also NaN
  scaled = scaled < 127.0f ? scaled : 127.0f;
  const float shifted = scaled + 12582912.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits - 0x4B400000;
}

// x [k] -> q [k] int8, scale = absmax / 127, and the sum of q. A zero row gives scale 0 and zeros.
inline void quantize_row_token(const float* x, int64_t k, int8_t* q, float& scale, int32_t& sum) {
  const float absmax = row_absmax(x, k);
  const float inverse = absmax > 0 ? 127.0f / absmax : 0.0f;
  scale = absmax / 127.0f;
  int32_t total = 0;
  for (int64_t i = 0; i < k; ++i) {
    const int32_t value = round_q(x[i], inverse);
    q[i] = static_cast<int8_t>(value);
    total += value;
  }
  sum = total;
}

// x [k] -> ceil(k / 32) records; the last is padded with zeros.
inline void quantize_row_group(const float* x, int64_t k, GroupRecord* out) {
  for (int64_t start = 0; start < k; start += kActGroup, ++out) {
    float padded[kActGroup];
    const float* group = x + start;
    if (k - start < kActGroup) {
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, group, static_cast<size_t>(k - start) * sizeof(float));
      group = padded;
    }
    const float absmax = row_absmax(group, kActGroup);
    const float inverse = absmax > 0 ? 127.0f / absmax : 0.0f;
    int32_t first = 0, second = 0;
    for (int i = 0; i < 16; ++i) {
      const int32_t value = round_q(group[i], inverse);
      out->q[i] = static_cast<int8_t>(value);
      first += value;
    }
    for (int i = 16; i < 32; ++i) {
      const int32_t value = round_q(group[i], inverse);
      out->q[i] = static_cast<int8_t>(value);
      second += value;
    }
    out->scale = absmax / 127.0f;
    out->scaled_sum = out->scale * static_cast<float>(first + second);
    out->neg_sum = -(first + second);
    out->neg_half_sum = -first;
  }
}

// x [k] -> bfloat16, round to nearest even; NaN stays NaN.
inline void round_row_bf16(const float* x, int64_t k, uint16_t* out) {
  for (int64_t i = 0; i < k; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    out[i] = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
  }
}

// Writes one row of an Activation of `kind` at `row` (activation_row_bytes(kind, k) bytes, padding included).
inline void prepare_row(ActKind kind, const float* x, int64_t k, std::byte* row) {
  switch (kind) {
    case ActKind::f32: {
      const int64_t bytes = k * 4, padded = (bytes + 63) / 64 * 64;
      std::memcpy(row, x, static_cast<size_t>(bytes));
      std::memset(row + bytes, 0, static_cast<size_t>(padded - bytes));
      break;
    }
    case ActKind::bf16: {
      const int64_t bytes = k * 2, padded = (bytes + 63) / 64 * 64;
      round_row_bf16(x, k, reinterpret_cast<uint16_t*>(row));
      std::memset(row + bytes, 0, static_cast<size_t>(padded - bytes));
      break;
    }
    case ActKind::i8_token: {
      const int64_t padded = (k + 63) / 64 * 64;
      auto* head = reinterpret_cast<TokenHead*>(row);
      quantize_row_token(x, k, reinterpret_cast<int8_t*>(row + kTokenHead), head->scale, head->sum);
      std::memset(row + kTokenHead + k, 0, static_cast<size_t>(padded - k));
      break;
    }
    case ActKind::i8_group: quantize_row_group(x, k, reinterpret_cast<GroupRecord*>(row)); break;
  }
}

// In place: each run of `block` values (a power of two that divides k) is multiplied by the orthonormal
// Walsh-Hadamard matrix, in natural order. Its own inverse.
inline void hadamard_row(float* x, int64_t k, int64_t block) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(block));
  for (int64_t start = 0; start < k; start += block) {
    float* v = x + start;
    for (int64_t half = 1; half < block; half *= 2) {
      for (int64_t i = 0; i < block; i += 2 * half) {
        for (int64_t j = i; j < i + half; ++j) {
          const float a = v[j], b = v[j + half];
          v[j] = a + b;
          v[j + half] = a - b;
        }
      }
    }
    for (int64_t i = 0; i < block; ++i) v[i] *= scale;
  }
}

}  // namespace pm::PM_ISA
