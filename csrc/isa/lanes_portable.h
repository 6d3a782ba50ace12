// Sixteen float lanes in plain C++, left to the compiler's vectoriser. See isa/lanes_avx512.h for the contract.
#pragma once

#include <cmath>
#include <cstdint>

namespace pm::PM_ISA {

constexpr int kMaxRows = 2;
constexpr int kMaxCols = 1;

struct F16 {
  float v[16];
};
struct W16 {
  uint32_t v[16];
};
using Mask = uint16_t;

#define PM_INLINE [[gnu::always_inline]] static inline

template <class F>
PM_INLINE F16 lanes(F f) {
  F16 r;
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

PM_INLINE F16 zero() { return F16{}; }
PM_INLINE F16 set1(float x) { return lanes([=](int) { return x; }); }
PM_INLINE F16 load(const float* p) { return lanes([=](int i) { return p[i]; }); }
PM_INLINE F16 load(const float* p, Mask m) { return lanes([=](int i) { return has(m, i) ? p[i] : 0.0f; }); }
PM_INLINE void store(float* p, F16 x) { __builtin_memcpy(p, x.v, sizeof x.v); }
PM_INLINE void store(float* p, F16 x, Mask m) {
  for (int i = 0; i < 16; ++i)
    if (has(m, i)) p[i] = x.v[i];
}
PM_INLINE F16 add(F16 a, F16 b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
PM_INLINE F16 sub(F16 a, F16 b) { return lanes([&](int i) { return a.v[i] - b.v[i]; }); }
PM_INLINE F16 mul(F16 a, F16 b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
PM_INLINE F16 div(F16 a, F16 b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
PM_INLINE F16 fma(F16 a, F16 b, F16 c) { return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
PM_INLINE F16 fnma(F16 a, F16 b, F16 c) { return lanes([&](int i) { return c.v[i] - a.v[i] * b.v[i]; }); }
PM_INLINE F16 max(F16 a, F16 b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
PM_INLINE F16 min(F16 a, F16 b) { return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
PM_INLINE F16 abs(F16 a) { return lanes([&](int i) { return std::fabs(a.v[i]); }); }
PM_INLINE float hsum(F16 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
PM_INLINE float hmax(F16 a) {
  float m = a.v[0];
  for (int i = 1; i < 16; ++i) m = m > a.v[i] ? m : a.v[i];
  return m;
}
PM_INLINE F16 select(Mask m, F16 yes, F16 no) { return lanes([&](int i) { return has(m, i) ? yes.v[i] : no.v[i]; }); }
PM_INLINE F16 zero_unless(Mask m, F16 a) { return lanes([&](int i) { return has(m, i) ? a.v[i] : 0.0f; }); }
PM_INLINE Mask greater(F16 a, F16 b) { return bits([&](int i) { return a.v[i] > b.v[i]; }); }
PM_INLINE Mask greater_equal(F16 a, F16 b) { return bits([&](int i) { return a.v[i] >= b.v[i]; }); }
PM_INLINE Mask finite(F16 a) { return bits([&](int i) { return a.v[i] - a.v[i] == 0.0f; }); }
PM_INLINE F16 round(F16 a) {  // valid for |a| < 2^22, which is all exp2 asks for
  return lanes([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
PM_INLINE float power_of_two(int e) {
  const uint32_t b = static_cast<uint32_t>(e + 127) << 23;
  float f;
  __builtin_memcpy(&f, &b, 4);
  return f;
}
PM_INLINE F16 scale2(F16 a, F16 n) {
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
PM_INLINE F16 load_bf16(const uint16_t* p) {
  return lanes([=](int i) { return bits_to_float(static_cast<uint32_t>(p[i]) << 16); });
}
PM_INLINE void store_bf16(uint16_t* p, F16 a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_bf16(a.v[i]);
}
PM_INLINE void store_bf16(uint16_t* p, F16 a, Mask m) {
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
PM_INLINE F16 dot(F16 acc, W16 w, Bf16Word b) {
  return lanes([&](int i) {
    return acc.v[i] + bits_to_float(w.v[i] << 16) * b.even + bits_to_float(w.v[i] & 0xffff0000u) * b.odd;
  });
}
PM_INLINE F16 dot(F16 acc, W16 w, F32Word b) {
  return lanes([&](int i) { return acc.v[i] + bits_to_float(w.v[i]) * b.value; });
}

PM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace pm::PM_ISA
