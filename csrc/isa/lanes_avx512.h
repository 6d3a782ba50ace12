// Sixteen float lanes on AVX-512, with or without BF16. One of three headers with the same names (avx512, avx2, portable);
// row kernels are written once against them and compiled once per instruction set. Include isa/lanes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pm::PM_ISA {

// Register blocks of the attention kernel: rows x key groups must fit 32 registers with their operands.
#ifdef __AVX512BF16__
constexpr int kMaxRows = 6;
constexpr int kMaxCols = 4;
#else  // bf16 keys are widened: two registers each, and two for the broadcast
constexpr int kMaxRows = 6;
constexpr int kMaxCols = 3;
#endif
constexpr int kSideBySide = 4;  // groups of a row whose exponentials are computed together

using F32x16 = __m512;    // 16 floats
using W16 = __m512i;   // 16 words: a pair of bf16, four bytes, a pair of 16-bit integers or one float each
using I32x16 = __m512i;   // 16 integers of 32 bits
using Mask = uint16_t; // bit i: lane i

#define PM_INLINE [[gnu::always_inline]] static inline

PM_INLINE F32x16 zero() { return _mm512_setzero_ps(); }
PM_INLINE F32x16 set1(float x) { return _mm512_set1_ps(x); }
PM_INLINE F32x16 load(const float* p) { return _mm512_loadu_ps(p); }
PM_INLINE F32x16 load(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
PM_INLINE void store(float* p, F32x16 x) { _mm512_storeu_ps(p, x); }
PM_INLINE void store(float* p, F32x16 x, Mask m) { _mm512_mask_storeu_ps(p, m, x); }
PM_INLINE F32x16 add(F32x16 a, F32x16 b) { return _mm512_add_ps(a, b); }
PM_INLINE F32x16 sub(F32x16 a, F32x16 b) { return _mm512_sub_ps(a, b); }
PM_INLINE F32x16 mul(F32x16 a, F32x16 b) { return _mm512_mul_ps(a, b); }
PM_INLINE F32x16 div(F32x16 a, F32x16 b) { return _mm512_div_ps(a, b); }
PM_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fmadd_ps(a, b, c); }
PM_INLINE F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fnmadd_ps(a, b, c); }
// The second operand wins when either is NaN, so max(bound, x) passes a NaN in x on.
PM_INLINE F32x16 max(F32x16 a, F32x16 b) { return _mm512_max_ps(a, b); }
PM_INLINE F32x16 min(F32x16 a, F32x16 b) { return _mm512_min_ps(a, b); }
PM_INLINE F32x16 abs(F32x16 a) { return _mm512_abs_ps(a); }
PM_INLINE float hsum(F32x16 a) { return _mm512_reduce_add_ps(a); }
PM_INLINE float hmax(F32x16 a) { return _mm512_reduce_max_ps(a); }
PM_INLINE F32x16 select(Mask m, F32x16 yes, F32x16 no) { return _mm512_mask_blend_ps(m, no, yes); }
PM_INLINE F32x16 zero_unless(Mask m, F32x16 a) { return _mm512_maskz_mov_ps(m, a); }
PM_INLINE Mask greater(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
PM_INLINE Mask greater_equal(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
PM_INLINE Mask finite(F32x16 a) { return static_cast<Mask>(~_mm512_fpclass_ps_mask(a, 0x99)); }
PM_INLINE F32x16 round(F32x16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n for integral n >= -150.
PM_INLINE F32x16 scale2(F32x16 a, F32x16 n) { return _mm512_scalef_ps(a, n); }

PM_INLINE W16 load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
PM_INLINE F32x16 load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#ifdef __AVX512BF16__
PM_INLINE __m256i to_bf16(F32x16 a) {
  const __m256bh packed = _mm512_cvtneps_pbh(a);
  __m256i bits;
  __builtin_memcpy(&bits, &packed, sizeof bits);
  return bits;
}
#else
PM_INLINE __m256i to_bf16(F32x16 a) {  // nearest even; NaN stays NaN
  const __m512i x = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(x, _mm512_set1_epi32(0x400000));
  const __m512i kept = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), rounded, quiet);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}
#endif
PM_INLINE void store_bf16(uint16_t* p, F32x16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a)); }
PM_INLINE void store_bf16(uint16_t* p, F32x16 a, Mask m) { _mm256_mask_storeu_epi16(p, m, to_bf16(a)); }
PM_INLINE W16 low_halves(W16 a) { return _mm512_maskz_mov_epi16(0x55555555u, a); }

// One word of a query or probability row, in every lane, and acc + word * w per lane: two products for a pair of bf16,
// one for a float.
struct F32Word {
  __m512 value;
};
PM_INLINE F32Word broadcast(const uint32_t* p, F32Word) {
  float x;
  __builtin_memcpy(&x, p, 4);
  return {_mm512_set1_ps(x)};
}
PM_INLINE F32x16 dot(F32x16 acc, W16 w, F32Word b) { return _mm512_fmadd_ps(_mm512_castsi512_ps(w), b.value, acc); }

#ifdef __AVX512BF16__
struct Bf16Word {
  __m512i bits;
};
PM_INLINE Bf16Word broadcast(const uint32_t* p, Bf16Word) { return {_mm512_set1_epi32(static_cast<int>(*p))}; }
PM_INLINE F32x16 dot(F32x16 acc, W16 w, Bf16Word b) {
  __m512bh x, y;
  __builtin_memcpy(&x, &w, sizeof x);
  __builtin_memcpy(&y, &b.bits, sizeof y);
  return _mm512_dpbf16_ps(acc, x, y);
}
#else
struct Bf16Word {
  __m512 even, odd;
};
PM_INLINE F32x16 even_of(W16 w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
PM_INLINE F32x16 odd_of(W16 w) {
  return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
PM_INLINE Bf16Word broadcast(const uint32_t* p, Bf16Word) {
  const __m512i w = _mm512_set1_epi32(static_cast<int>(*p));
  return {even_of(w), odd_of(w)};
}
PM_INLINE F32x16 dot(F32x16 acc, W16 w, Bf16Word b) {
  return _mm512_fmadd_ps(odd_of(w), b.odd, _mm512_fmadd_ps(even_of(w), b.even, acc));
}
#endif

// Eight-bit keys and values. A key word holds four bytes of k + 128, unsigned; kKeyBias is what dot() leaves of it. A
// value word holds two signed bytes of 16 bits each.
constexpr int kKeyBias = 128;
struct I8Word {  // four signed bytes
  __m512i bits;
};
struct I16Word {  // two signed 16-bit integers
  __m512i bits;
};
PM_INLINE I8Word broadcast(const uint32_t* p, I8Word) { return {_mm512_set1_epi32(static_cast<int>(*p))}; }
PM_INLINE I16Word broadcast(const uint32_t* p, I16Word) { return {_mm512_set1_epi32(static_cast<int>(*p))}; }
// Not the intrinsics: GCC 12 and 13 copy their accumulator to another register and to the stack on every use.
PM_INLINE I32x16 dot(I32x16 acc, W16 w, I8Word b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(b.bits));
  return acc;
}
PM_INLINE I32x16 dot(I32x16 acc, W16 w, I16Word b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(b.bits));
  return acc;
}
// 32 signed bytes as 16-bit integers, two a word.
PM_INLINE W16 load_byte_pairs(const void* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
// Words of a pair: a below, b above.
PM_INLINE W16 pair_bf16(F32x16 a, F32x16 b) {
  const __m512i low = _mm512_cvtepu16_epi32(to_bf16(a)), high = _mm512_cvtepu16_epi32(to_bf16(b));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
PM_INLINE void store_words(uint32_t* p, W16 a) { _mm512_storeu_si512(p, a); }
PM_INLINE I32x16 pair_bytes(I32x16 a, I32x16 b) {
  return _mm512_or_si512(_mm512_and_si512(a, _mm512_set1_epi32(255)), _mm512_slli_epi32(b, 8));
}
// to[16 i + j] = from[stride j + i] for i, j < 16.
PM_INLINE void transpose_words(const uint32_t* from, int64_t stride, uint32_t* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // a[4 r + i]: columns i, i + 4, i + 8, i + 12 of rows 4 r .. 4 r + 3
    const __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
    const __m512i low2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
    const __m512i high2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    _mm512_storeu_si512(to + 16 * i, _mm512_shuffle_i32x4(low, low2, 0x88));
    _mm512_storeu_si512(to + 16 * (i + 8), _mm512_shuffle_i32x4(low, low2, 0xdd));
    _mm512_storeu_si512(to + 16 * (i + 4), _mm512_shuffle_i32x4(high, high2, 0x88));
    _mm512_storeu_si512(to + 16 * (i + 12), _mm512_shuffle_i32x4(high, high2, 0xdd));
  }
}
// The Hadamard butterflies of lanes 1, 2, 4 and 8 apart.
PM_INLINE F32x16 turn_lanes(F32x16 v) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto minus = [&](int d) __attribute__((always_inline)) { return _mm512_test_epi32_mask(lane, _mm512_set1_epi32(d)); };
  v = _mm512_mask_sub_ps(_mm512_add_ps(v, _mm512_permute_ps(v, 0xb1)), minus(1), _mm512_permute_ps(v, 0xb1), v);
  v = _mm512_mask_sub_ps(_mm512_add_ps(v, _mm512_permute_ps(v, 0x4e)), minus(2), _mm512_permute_ps(v, 0x4e), v);
  v = _mm512_mask_sub_ps(_mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1)), minus(4), _mm512_shuffle_f32x4(v, v, 0xb1), v);
  return _mm512_mask_sub_ps(_mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e)), minus(8), _mm512_shuffle_f32x4(v, v, 0x4e), v);
}
PM_INLINE I32x16 set1_i32(int32_t x) { return _mm512_set1_epi32(x); }
PM_INLINE I32x16 add(I32x16 a, I32x16 b) { return _mm512_add_epi32(a, b); }
PM_INLINE int32_t hsum_i32(I32x16 a) { return _mm512_reduce_add_epi32(a); }
PM_INLINE F32x16 to_float(I32x16 a) { return _mm512_cvtepi32_ps(a); }
// Nearest even for |a| < 2^15; some integer of 32 bits for NaN.
PM_INLINE I32x16 round_i32(F32x16 a) { return _mm512_cvtps_epi32(a); }
PM_INLINE void store_i8(void* p, I32x16 a) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
PM_INLINE void store_i16(void* p, I32x16 a) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a)); }

}  // namespace pm::PM_ISA
