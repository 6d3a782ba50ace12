// Four lanes in the compiler's own vector types, which it lowers to whatever the target has. The twin of the others:
// the same integers, and floats that differ by rounding only (no fused multiply-add).
#pragma once

namespace pm::PM_ISA {

constexpr int kLanes = 4;
typedef float F32 __attribute__((vector_size(16)));
typedef int32_t I32 __attribute__((vector_size(16)));
typedef uint32_t U32 __attribute__((vector_size(16)));

inline F32 load(const float* p) {
  F32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline I32 load_i32(const void* p) {
  I32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }
inline F32 load_part(const float* p, int n) {
  F32 v = {};
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
inline void store_part(float* p, F32 v, int n) {
  for (int i = 0; i < n; ++i) p[i] = v[i];
}

inline F32 splat(float x) { return F32{x, x, x, x}; }
inline I32 splat_i32(int32_t x) { return I32{x, x, x, x}; }
inline F32 zero_f32() { return F32{}; }
inline I32 zero_i32() { return I32{}; }
inline I32 splat_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return splat_i32(word);
}

inline F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
inline F32 vmin(F32 a, F32 b) { return a < b ? a : b; }
inline F32 vmax(F32 a, F32 b) { return a > b ? a : b; }
inline bool any_at_least(F32 a, F32 b) {
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) any = any || a[lane] >= b[lane];
  return any;
}
inline F32 to_f32(I32 v) { return __builtin_convertvector(v, F32); }
// Round to nearest even, for |v| < 2^22.
inline I32 round_i32(F32 v) {
  const F32 shifted = v + splat(12582912.0f);
  I32 bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return bits - splat_i32(0x4B400000);
}
inline F32 as_f32(I32 v) {
  F32 f;
  std::memcpy(&f, &v, sizeof f);
  return f;
}
inline I32 as_i32(F32 v) {
  I32 i;
  std::memcpy(&i, &v, sizeof i);
  return i;
}
inline I32 add(I32 a, I32 b) { return reinterpret_cast<I32>(reinterpret_cast<U32>(a) + reinterpret_cast<U32>(b)); }
inline I32 sub(I32 a, I32 b) { return reinterpret_cast<I32>(reinterpret_cast<U32>(a) - reinterpret_cast<U32>(b)); }
inline I32 and_(I32 a, I32 b) { return a & b; }
template <int N>
inline I32 shift_left(I32 v) { return reinterpret_cast<I32>(reinterpret_cast<U32>(v) << N); }
template <int N>
inline I32 shift_right(I32 v) { return reinterpret_cast<I32>(reinterpret_cast<U32>(v) >> N); }

// p * 2^n, for -126 <= n <= 127.
inline F32 times_power_of_two(F32 p, I32 n) { return p * as_f32(shift_left<23>(add(n, splat_i32(127)))); }
inline F32 reciprocal(F32 x) { return splat(1.0f) / x; }

template <int Distance>
inline F32 swap_lanes(F32 v) {
  return F32{v[0 ^ Distance], v[1 ^ Distance], v[2 ^ Distance], v[3 ^ Distance]};
}
template <int Distance>
inline F32 lane_signs() {
  constexpr auto s = [](int lane) { return (lane & Distance) != 0 ? -1.0f : 1.0f; };
  return F32{s(0), s(1), s(2), s(3)};
}

inline float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7FFFu;
  uint32_t bits;
  if (rest >= 0x7C00u) {
    bits = 0x7F800000u | (rest << 13);
  } else if (rest >= 0x0400u) {
    bits = (rest << 13) + (112u << 23);
  } else {
    const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline F32 load_f16(const uint16_t* p) {
  return F32{f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
}

inline I32 dot8(I32 acc, I32 w, I32 a) {
  const U32 u = reinterpret_cast<U32>(w), b = reinterpret_cast<U32>(a);
  const auto byte = [](U32 v) { return reinterpret_cast<I32>(v & 255u); };
  const auto signed_byte = [](U32 v) { return reinterpret_cast<I32>(v) >> 24; };
  return acc + byte(u) * signed_byte(b << 24) + byte(u >> 8) * signed_byte(b << 16) +
         byte(u >> 16) * signed_byte(b << 8) + byte(u >> 24) * signed_byte(b);
}

using S4 = I32;
inline S4 start4(I32 offset) { return offset; }
inline S4 step4(S4 acc, I32 w, I32 a) { return dot8(acc, w, a); }
template <class Offset>
inline I32 finish4(S4 acc, Offset) { return acc; }
inline I32 low_nibbles(I32 w) { return w & splat_i32(0x0F0F0F0F); }
inline I32 high_nibbles(I32 w) { return shift_right<4>(w) & splat_i32(0x0F0F0F0F); }

constexpr bool kHasDotBf16 = false;
inline F32 dot_bf16(F32 acc, I32, I32) { return acc; }

}  // namespace pm::PM_ISA
