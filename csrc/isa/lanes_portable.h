// Sixteen float lanes in plain C++, left to the compiler's vectoriser. See isa/lanes_avx512.h for the contract.
#pragma once

#include <cmath>
#include <cstdint>

namespace pm::PM_ISA {

constexpr int kMaxRows = 2;
constexpr int kMaxCols = 1;
constexpr int kSideBySide = 1;

struct F32x16 {
  float v[16];
};
struct W16 {
  uint32_t v[16];
};
struct I32x16 {
  int32_t v[16];
};
using Mask = uint16_t;

#define PM_INLINE [[gnu::always_inline]] static inline

template <class F>
PM_INLINE F32x16 lanes(F f) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
template <class F>
PM_INLINE Mask bits(F f) {
  uint32_t m = 0;
  for (int i = 0; i < 16; ++i) m |= static_cast<uint32_t>(f(i)) << i;
  return static_cast<Mask>(m);
}
PM_INLINE bool has(Mask m, int i) { return m >> i & 1; }

PM_INLINE F32x16 zero() { return F32x16{}; }
PM_INLINE F32x16 set1(float x) { return lanes([=](int) { return x; }); }
PM_INLINE F32x16 load(const float* p) { return lanes([=](int i) { return p[i]; }); }
PM_INLINE F32x16 load(const float* p, Mask m) { return lanes([=](int i) { return has(m, i) ? p[i] : 0.0f; }); }
PM_INLINE void store(float* p, F32x16 x) { __builtin_memcpy(p, x.v, sizeof x.v); }
PM_INLINE void store(float* p, F32x16 x, Mask m) {
  for (int i = 0; i < 16; ++i)
    if (has(m, i)) p[i] = x.v[i];
}
PM_INLINE F32x16 add(F32x16 a, F32x16 b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
PM_INLINE F32x16 sub(F32x16 a, F32x16 b) { return lanes([&](int i) { return a.v[i] - b.v[i]; }); }
PM_INLINE F32x16 mul(F32x16 a, F32x16 b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
PM_INLINE F32x16 div(F32x16 a, F32x16 b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
PM_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
PM_INLINE F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) { return lanes([&](int i) { return c.v[i] - a.v[i] * b.v[i]; }); }
PM_INLINE F32x16 max(F32x16 a, F32x16 b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
PM_INLINE F32x16 min(F32x16 a, F32x16 b) { return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
PM_INLINE F32x16 abs(F32x16 a) { return lanes([&](int i) { return std::fabs(a.v[i]); }); }
PM_INLINE float hsum(F32x16 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
PM_INLINE float hmax(F32x16 a) {
  float m = a.v[0];
  for (int i = 1; i < 16; ++i) m = m > a.v[i] ? m : a.v[i];
  return m;
}
PM_INLINE F32x16 select(Mask m, F32x16 yes, F32x16 no) { return lanes([&](int i) { return has(m, i) ? yes.v[i] : no.v[i]; }); }
PM_INLINE F32x16 zero_unless(Mask m, F32x16 a) { return lanes([&](int i) { return has(m, i) ? a.v[i] : 0.0f; }); }
PM_INLINE Mask greater(F32x16 a, F32x16 b) { return bits([&](int i) { return a.v[i] > b.v[i]; }); }
PM_INLINE Mask greater_equal(F32x16 a, F32x16 b) { return bits([&](int i) { return a.v[i] >= b.v[i]; }); }
PM_INLINE Mask finite(F32x16 a) { return bits([&](int i) { return a.v[i] - a.v[i] == 0.0f; }); }
PM_INLINE F32x16 round(F32x16 a) {  // valid for |a| < 2^22, which is all exp2 asks for
  return lanes([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
PM_INLINE float power_of_two(int e) {
  const uint32_t b = static_cast<uint32_t>(e + 127) << 23;
  float f;
  __builtin_memcpy(&f, &b, 4);
  return f;
}
PM_INLINE F32x16 scale2(F32x16 a, F32x16 n) {
  return lanes([&](int i) {
    const bool nan = n.v[i] != n.v[i];
    const int e = nan ? 0 : static_cast<int>(n.v[i]), half = e / 2;
    return nan ? n.v[i] : a.v[i] * power_of_two(half) * power_of_two(e - half);
  });
}

PM_INLINE float bits_to_float(uint32_t b) {
  float f;
  __builtin_memcpy(&f, &b, 4);
  return f;
}
PM_INLINE uint16_t float_to_bf16(float f) {  // nearest even; NaN stays NaN
  uint32_t x;
  __builtin_memcpy(&x, &f, 4);
  const uint32_t rounded = x + 0x7fff + (x >> 16 & 1);
  return static_cast<uint16_t>((f != f ? x | 0x400000 : rounded) >> 16);
}
PM_INLINE W16 load_words(const uint32_t* p) {
  W16 w;
  __builtin_memcpy(w.v, p, sizeof w.v);
  return w;
}
PM_INLINE F32x16 load_bf16(const uint16_t* p) {
  return lanes([=](int i) { return bits_to_float(static_cast<uint32_t>(p[i]) << 16); });
}
PM_INLINE void store_bf16(uint16_t* p, F32x16 a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_bf16(a.v[i]);
}
PM_INLINE void store_bf16(uint16_t* p, F32x16 a, Mask m) {
  for (int i = 0; i < 16; ++i)
    if (has(m, i)) p[i] = float_to_bf16(a.v[i]);
}
PM_INLINE W16 low_halves(W16 a) {
  for (int i = 0; i < 16; ++i) a.v[i] &= 0xffff;
  return a;
}

struct Bf16Word {
  float even, odd;
};
struct F32Word {
  float value;
};
PM_INLINE Bf16Word broadcast(const uint32_t* p, Bf16Word) {
  return {bits_to_float(*p << 16), bits_to_float(*p & 0xffff0000u)};
}
PM_INLINE F32Word broadcast(const uint32_t* p, F32Word) { return {bits_to_float(*p)}; }
PM_INLINE F32x16 dot(F32x16 acc, W16 w, Bf16Word b) {
  return lanes([&](int i) {
    return acc.v[i] + bits_to_float(w.v[i] << 16) * b.even + bits_to_float(w.v[i] & 0xffff0000u) * b.odd;
  });
}
PM_INLINE F32x16 dot(F32x16 acc, W16 w, F32Word b) {
  return lanes([&](int i) { return acc.v[i] + bits_to_float(w.v[i]) * b.value; });
}

template <class F>
PM_INLINE I32x16 int_lanes(F f) {
  I32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
constexpr int kKeyBias = 0;
struct I8Word {
  int32_t v[4];
};
struct I16Word {
  int32_t v[2];
};
PM_INLINE I8Word broadcast(const uint32_t* p, I8Word) {
  int8_t b[4];
  __builtin_memcpy(b, p, 4);
  return {{b[0], b[1], b[2], b[3]}};
}
PM_INLINE I16Word broadcast(const uint32_t* p, I16Word) {
  int16_t b[2];
  __builtin_memcpy(b, p, 4);
  return {{b[0], b[1]}};
}
PM_INLINE I32x16 dot(I32x16 acc, W16 w, I8Word b) {
  return int_lanes([&](int i) {
    int32_t sum = acc.v[i];
    for (int j = 0; j < 4; ++j) sum += (static_cast<int32_t>(w.v[i] >> (8 * j) & 255) - 128) * b.v[j];
    return sum;
  });
}
PM_INLINE I32x16 dot(I32x16 acc, W16 w, I16Word b) {
  return int_lanes([&](int i) {
    return acc.v[i] + static_cast<int16_t>(w.v[i] & 0xffff) * b.v[0] + static_cast<int16_t>(w.v[i] >> 16) * b.v[1];
  });
}
PM_INLINE W16 load_byte_pairs(const void* p) {
  int8_t b[32];
  __builtin_memcpy(b, p, sizeof b);
  W16 w;
  for (int i = 0; i < 16; ++i)
    w.v[i] = static_cast<uint16_t>(int16_t{b[2 * i]}) | static_cast<uint32_t>(static_cast<uint16_t>(int16_t{b[2 * i + 1]})) << 16;
  return w;
}
PM_INLINE W16 pair_bf16(F32x16 a, F32x16 b) {
  W16 w;
  for (int i = 0; i < 16; ++i) w.v[i] = float_to_bf16(a.v[i]) | static_cast<uint32_t>(float_to_bf16(b.v[i])) << 16;
  return w;
}
PM_INLINE void store_words(uint32_t* p, W16 a) { __builtin_memcpy(p, a.v, sizeof a.v); }
PM_INLINE I32x16 pair_bytes(I32x16 a, I32x16 b) {
  return int_lanes([&](int i) { return (a.v[i] & 255) + 256 * b.v[i]; });
}
PM_INLINE void transpose_words(const uint32_t* from, int64_t stride, uint32_t* to) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[16 * i + j] = from[stride * j + i];
}
PM_INLINE F32x16 turn_lanes(F32x16 v) {
  for (int d = 1; d < 16; d *= 2) v = lanes([&](int i) { return i & d ? v.v[i ^ d] - v.v[i] : v.v[i] + v.v[i ^ d]; });
  return v;
}
PM_INLINE I32x16 set1_i32(int32_t x) { return int_lanes([=](int) { return x; }); }
PM_INLINE I32x16 add(I32x16 a, I32x16 b) { return int_lanes([&](int i) { return a.v[i] + b.v[i]; }); }
PM_INLINE int32_t hsum_i32(I32x16 a) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += a.v[i];
  return sum;
}
PM_INLINE F32x16 to_float(I32x16 a) { return lanes([&](int i) { return static_cast<float>(a.v[i]); }); }
PM_INLINE I32x16 round_i32(F32x16 a) {
  return int_lanes([&](int i) {
    const float low = a.v[i] > -65536.0f ? a.v[i] : -65536.0f;  // also NaN
    const float x = (low < 65536.0f ? low : 65536.0f) + 12582912.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits - 0x4B400000;
  });
}
PM_INLINE void store_i8(void* p, I32x16 a) {
  int8_t b[16];
  for (int i = 0; i < 16; ++i) b[i] = static_cast<int8_t>(a.v[i]);
  __builtin_memcpy(p, b, sizeof b);
}
PM_INLINE void store_i16(void* p, I32x16 a) {
  int16_t b[16];
  for (int i = 0; i < 16; ++i) b[i] = static_cast<int16_t>(a.v[i]);
  __builtin_memcpy(p, b, sizeof b);
}

}  // namespace pm::PM_ISA
