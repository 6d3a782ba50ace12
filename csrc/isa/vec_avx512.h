#pragma once

#include <immintrin.h>

namespace pm::PM_ISA {

constexpr int kLanes = 16;
using F32 = __m512;
using I32 = __m512i;

inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
inline I32 load_i32(const void* p) { return _mm512_loadu_si512(p); }
inline void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
// The first n < kLanes lanes; the others read as 0 and are not written.
inline F32 load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_part(float* p, F32 v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
// The lower eight lanes of both, and the upper eight.
inline F32 low_halves(F32 a, F32 b) { return _mm512_shuffle_f32x4(a, b, 0x44); }
inline F32 high_halves(F32 a, F32 b) { return _mm512_shuffle_f32x4(a, b, 0xEE); }

inline F32 splat(float x) { return _mm512_set1_ps(x); }
inline I32 splat_i32(int32_t x) { return _mm512_set1_epi32(x); }
inline F32 zero_f32() { return _mm512_setzero_ps(); }
inline I32 zero_i32() { return _mm512_setzero_si512(); }
// The 4 bytes at p in every lane.
inline I32 splat_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32 vmin(F32 a, F32 b) { return _mm512_min_ps(a, b); }
inline F32 vmax(F32 a, F32 b) { return _mm512_max_ps(a, b); }
inline bool any_at_least(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ) != 0; }
inline F32 to_f32(I32 v) { return _mm512_cvtepi32_ps(v); }
inline I32 round_i32(F32 v) { return _mm512_cvtps_epi32(v); }
inline F32 as_f32(I32 v) { return _mm512_castsi512_ps(v); }
inline I32 as_i32(F32 v) { return _mm512_castps_si512(v); }
inline I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
inline I32 sub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
inline I32 and_(I32 a, I32 b) { return _mm512_and_si512(a, b); }
template <int N>
inline I32 shift_left(I32 v) { return _mm512_slli_epi32(v, N); }
template <int N>
inline I32 shift_right(I32 v) { return _mm512_srli_epi32(v, N); }

// p * 2^n, for -126 <= n <= 127.
inline F32 times_power_of_two(F32 p, I32 n) { return _mm512_scalef_ps(p, to_f32(n)); }
// To the last bit or the one before, for 1 <= x: the estimate of 14 bits and one Newton step, half a division's time.
inline F32 reciprocal(F32 x) {
  const F32 r = _mm512_rcp14_ps(x);
  return fma(fma(zero_f32() - x, r, splat(1.0f)), r, r);
}

// Lane l from lane l ^ Distance; +1 in the lanes whose bit Distance is clear, -1 in the others.
template <int Distance>
inline F32 swap_lanes(F32 v) {
  if constexpr (Distance == 1) return _mm512_permute_ps(v, 0xB1);
  if constexpr (Distance == 2) return _mm512_permute_ps(v, 0x4E);
  if constexpr (Distance == 4) return _mm512_shuffle_f32x4(v, v, 0xB1);
  return _mm512_shuffle_f32x4(v, v, 0x4E);
}
template <int Distance>
inline F32 lane_signs() {
  constexpr auto s = [](int lane) { return (lane & Distance) != 0 ? -1.0f : 1.0f; };
  return _mm512_setr_ps(s(0), s(1), s(2), s(3), s(4), s(5), s(6), s(7), s(8), s(9), s(10), s(11), s(12), s(13), s(14),
                        s(15));
}

// kLanes float16 values.
inline F32 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// dot8 adds sum(j < 4) of w[4 l + j] * a[j] to lane l.
// Not the intrinsic: GCC 12 and 13 copy its accumulator to another register and to the stack on every use.
inline I32 dot8(I32 acc, I32 w, I32 a) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
  return acc;
}

// 4-bit weights: start4, step4 at most 8 times (one group of 32), finish4. `offset` is an int32 term of the sum.
using S4 = I32;
inline S4 start4(I32 offset) { return offset; }
inline S4 step4(S4 acc, I32 w, I32 a) { return dot8(acc, w, a); }
template <class Offset>
inline I32 finish4(S4 acc, Offset) { return acc; }
inline I32 low_nibbles(I32 w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline I32 high_nibbles(I32 w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15)); }

#ifdef PM_ISA_IS_AVX512BF16
constexpr bool kHasDotBf16 = true;
// Adds w[2 l] * a[0] + w[2 l + 1] * a[1] (bfloat16) to lane l.
inline F32 dot_bf16(F32 acc, I32 w, I32 a) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(a));
}
#else
constexpr bool kHasDotBf16 = false;
inline F32 dot_bf16(F32 acc, I32, I32) { return acc; }
#endif

}  // namespace pm::PM_ISA
