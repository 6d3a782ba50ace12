#pragma once

#include <immintrin.h>

namespace pm::PM_ISA {

constexpr int kLanes = 8;
using F32 = __m256;
using I32 = __m256i;

inline F32 load(const float* p) { return _mm256_loadu_ps(p); }
inline I32 load_i32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F32 load_part(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store_part(float* p, F32 v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }

inline F32 splat(float x) { return _mm256_set1_ps(x); }
inline I32 splat_i32(int32_t x) { return _mm256_set1_epi32(x); }
inline F32 zero_f32() { return _mm256_setzero_ps(); }
inline I32 zero_i32() { return _mm256_setzero_si256(); }
inline I32 splat_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

inline F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
inline F32 vmin(F32 a, F32 b) { return _mm256_min_ps(a, b); }
inline F32 vmax(F32 a, F32 b) { return _mm256_max_ps(a, b); }
inline bool any_at_least(F32 a, F32 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)) != 0; }
inline F32 to_f32(I32 v) { return _mm256_cvtepi32_ps(v); }
inline I32 round_i32(F32 v) { return _mm256_cvtps_epi32(v); }
inline F32 as_f32(I32 v) { return _mm256_castsi256_ps(v); }
inline I32 as_i32(F32 v) { return _mm256_castps_si256(v); }
inline I32 add(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
inline I32 sub(I32 a, I32 b) { return _mm256_sub_epi32(a, b); }
inline I32 and_(I32 a, I32 b) { return _mm256_and_si256(a, b); }
template <int N>
inline I32 shift_left(I32 v) { return _mm256_slli_epi32(v, N); }
template <int N>
inline I32 shift_right(I32 v) { return _mm256_srli_epi32(v, N); }

// p * 2^n, for -126 <= n <= 127.
inline F32 times_power_of_two(F32 p, I32 n) { return p * as_f32(shift_left<23>(add(n, splat_i32(127)))); }
inline F32 reciprocal(F32 x) { return splat(1.0f) / x; }

template <int Distance>
inline F32 swap_lanes(F32 v) {
  if constexpr (Distance == 1) return _mm256_permute_ps(v, 0xB1);
  if constexpr (Distance == 2) return _mm256_permute_ps(v, 0x4E);
  return _mm256_permute2f128_ps(v, v, 1);
}
template <int Distance>
inline F32 lane_signs() {
  constexpr auto s = [](int lane) { return (lane & Distance) != 0 ? -1.0f : 1.0f; };
  return _mm256_setr_ps(s(0), s(1), s(2), s(3), s(4), s(5), s(6), s(7));
}

inline F32 load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline I32 low_nibbles(I32 w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline I32 high_nibbles(I32 w) { return _mm256_and_si256(_mm256_srli_epi16(w, 4), _mm256_set1_epi8(15)); }

#ifdef PM_ISA_IS_AVXVNNI

// Not the intrinsic: GCC 12 and 13 copy its accumulator to another register and to the stack on every use.
inline I32 dot8(I32 acc, I32 w, I32 a) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(a));
  return acc;
}

using S4 = I32;
inline S4 start4(I32 offset) { return offset; }
inline S4 step4(S4 acc, I32 w, I32 a) { return dot8(acc, w, a); }
template <class Offset>
inline I32 finish4(S4 acc, Offset) { return acc; }

#else

// vpmaddubsw adds two neighbours' products in int16 and saturates; activations are rounded so that it never has to
// (ActKind::i8_token_pairs). Moving the weight's sign to the activation instead, which leaves it all its 8 bits, costs
// a third as much again: vpsignb and both multiplications share two ports.
// From memory each time: kept in a register, the constant would push an accumulator out.
alignas(32) inline constexpr uint64_t kOnes16[4] = {0x0001000100010001u, 0x0001000100010001u, 0x0001000100010001u,
                                                    0x0001000100010001u};
// The addition is no intrinsic, which is a sum to GCC like any other: it adds the products of all unrolled steps to each
// other first, and keeps them on the stack until then, which halves the speed.
inline I32 dot8(I32 acc, I32 w, I32 a) {
  I32 sums;
  asm("vpmaddwd %2, %1, %0" : "=x"(sums) : "x"(_mm256_maddubs_epi16(w, a)), "m"(kOnes16));
  asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(sums));
  return acc;
}

// 4-bit weights stay in int16 for a whole group: 8 steps of at most 2 * 15 * 127 are 30480.
using S4 = I32;
inline S4 start4(I32) { return zero_i32(); }
inline S4 step4(S4 acc, I32 w, I32 a) {
  asm("vpaddw %1, %0, %0" : "+x"(acc) : "x"(_mm256_maddubs_epi16(w, a)));
  return acc;
}
template <class Offset>
inline I32 finish4(S4 acc, Offset offset) {
  return _mm256_add_epi32(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)), offset());
}

#endif

constexpr bool kHasDotBf16 = false;
inline F32 dot_bf16(F32 acc, I32, I32) { return acc; }

}  // namespace pm::PM_ISA
