// Sixteen float lanes on AVX2 with FMA: two registers each. See isa/lanes_avx512.h for the contract.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pm::PM_ISA {

constexpr int kMaxRows = 4;  // 4 x 1 blocks: 8 accumulators, 4 widened keys, 2 broadcasts of 16 registers
constexpr int kMaxCols = 1;
constexpr int kSideBySide = 1;

struct F32x16 {
  __m256 lo, hi;
};
struct W16 {
  __m256i lo, hi;
};
using I32x16 = W16;
using Mask = uint16_t;

#define PM_INLINE [[gnu::always_inline]] static inline

PM_INLINE __m256i mask_lanes(uint32_t m) {  // all bits of lane i from bit i, i < 8
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(m)), bit), bit);
}
PM_INLINE F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PM_INLINE F32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PM_INLINE F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PM_INLINE F32x16 load(const float* p, Mask m) {
  return {_mm256_maskload_ps(p, mask_lanes(m)), _mm256_maskload_ps(p + 8, mask_lanes(m >> 8))};
}
PM_INLINE void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
PM_INLINE void store(float* p, F32x16 x, Mask m) {
  _mm256_maskstore_ps(p, mask_lanes(m), x.lo);
  _mm256_maskstore_ps(p + 8, mask_lanes(m >> 8), x.hi);
}
PM_INLINE F32x16 add(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PM_INLINE F32x16 sub(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PM_INLINE F32x16 mul(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PM_INLINE F32x16 div(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PM_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
PM_INLINE F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
PM_INLINE F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PM_INLINE F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
PM_INLINE F32x16 abs(F32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
PM_INLINE float hsum(F32x16 a) {
  const __m256 s = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
PM_INLINE float hmax(F32x16 a) {
  const __m256 s = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
PM_INLINE F32x16 select(Mask m, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_castsi256_ps(mask_lanes(m))),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_castsi256_ps(mask_lanes(m >> 8)))};
}
PM_INLINE F32x16 zero_unless(Mask m, F32x16 a) {
  return {_mm256_and_ps(a.lo, _mm256_castsi256_ps(mask_lanes(m))),
          _mm256_and_ps(a.hi, _mm256_castsi256_ps(mask_lanes(m >> 8)))};
}
PM_INLINE Mask join(__m256 lo, __m256 hi) {
  return static_cast<Mask>(_mm256_movemask_ps(lo) | _mm256_movemask_ps(hi) << 8);
}
PM_INLINE Mask greater(F32x16 a, F32x16 b) {
  return join(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}
PM_INLINE Mask greater_equal(F32x16 a, F32x16 b) {
  return join(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
PM_INLINE Mask finite(F32x16 a) {  // x - x is 0 for finite x alone
  const F32x16 d = sub(a, a);
  return join(_mm256_cmp_ps(d.lo, d.lo, _CMP_ORD_Q), _mm256_cmp_ps(d.hi, d.hi, _CMP_ORD_Q));
}
PM_INLINE F32x16 round(F32x16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
PM_INLINE __m256 scale2(__m256 a, __m256 n) {  // in two halves, so that n < -126 underflows instead of wrapping
  const __m256i e = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(e, 1), rest = _mm256_sub_epi32(e, half);
  const __m256i bias = _mm256_set1_epi32(127);
  a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
PM_INLINE F32x16 scale2(F32x16 a, F32x16 n) { return {scale2(a.lo, n.lo), scale2(a.hi, n.hi)}; }

PM_INLINE W16 load_words(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
PM_INLINE __m256 widen(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
PM_INLINE F32x16 load_bf16(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
PM_INLINE __m256i round_to_bf16(__m256 a) {  // nearest even in the high half of each word; NaN stays NaN
  const __m256i x = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan)), 16);
}
PM_INLINE void store_bf16(uint16_t* p, F32x16 a) {
  const __m256i packed = _mm256_packus_epi32(round_to_bf16(a.lo), round_to_bf16(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
PM_INLINE void store_bf16(uint16_t* p, F32x16 a, Mask m) {
  uint16_t all[16];
  store_bf16(all, a);
  for (int i = 0; i < 16; ++i)
    if (m >> i & 1) p[i] = all[i];
}
PM_INLINE W16 low_halves(W16 a) {
  const __m256i keep = _mm256_set1_epi32(0xffff);
  return {_mm256_and_si256(a.lo, keep), _mm256_and_si256(a.hi, keep)};
}

struct Bf16Word {
  __m256 even, odd;
};
struct F32Word {
  __m256 value;
};
PM_INLINE __m256 even_of(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
PM_INLINE __m256 odd_of(__m256i w) {
  return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
PM_INLINE Bf16Word broadcast(const uint32_t* p, Bf16Word) {
  const __m256i w = _mm256_set1_epi32(static_cast<int>(*p));
  return {even_of(w), odd_of(w)};
}
PM_INLINE F32Word broadcast(const uint32_t* p, F32Word) {
  float x;
  __builtin_memcpy(&x, p, 4);
  return {_mm256_set1_ps(x)};
}
PM_INLINE F32x16 dot(F32x16 acc, W16 w, Bf16Word b) {
  acc.lo = _mm256_fmadd_ps(even_of(w.lo), b.even, acc.lo);
  acc.hi = _mm256_fmadd_ps(even_of(w.hi), b.even, acc.hi);
  acc.lo = _mm256_fmadd_ps(odd_of(w.lo), b.odd, acc.lo);
  acc.hi = _mm256_fmadd_ps(odd_of(w.hi), b.odd, acc.hi);
  return acc;
}
PM_INLINE F32x16 dot(F32x16 acc, W16 w, F32Word b) {
  return {_mm256_fmadd_ps(_mm256_castsi256_ps(w.lo), b.value, acc.lo),
          _mm256_fmadd_ps(_mm256_castsi256_ps(w.hi), b.value, acc.hi)};
}

struct I8Word {
  __m256i bits;
};
struct I16Word {
  __m256i bits;
};
PM_INLINE I8Word broadcast(const uint32_t* p, I8Word) { return {_mm256_set1_epi32(static_cast<int>(*p))}; }
PM_INLINE I16Word broadcast(const uint32_t* p, I16Word) { return {_mm256_set1_epi32(static_cast<int>(*p))}; }
#ifdef PM_ISA_IS_AVXVNNI
constexpr int kKeyBias = 128;
PM_INLINE __m256i dot_bytes(__m256i acc, __m256i w, __m256i b) {  // the intrinsic copies its accumulator, see AVX-512
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(b));
  return acc;
}
#else
constexpr int kKeyBias = 0;
PM_INLINE __m256i dot_bytes(__m256i acc, __m256i w, __m256i b) {  // |k| <= 127, so that two products fit 16 bits
  const __m256i k = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(k), _mm256_sign_epi8(b, k));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
PM_INLINE I32x16 dot(I32x16 acc, W16 w, I8Word b) {
  return {dot_bytes(acc.lo, w.lo, b.bits), dot_bytes(acc.hi, w.hi, b.bits)};
}
PM_INLINE I32x16 dot(I32x16 acc, W16 w, I16Word b) {
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(w.lo, b.bits)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(w.hi, b.bits))};
}
PM_INLINE W16 load_byte_pairs(const void* p) {
  const auto* from = static_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(from)), _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1))};
}
PM_INLINE W16 pair_bf16(F32x16 a, F32x16 b) {
  return {_mm256_or_si256(round_to_bf16(a.lo), _mm256_slli_epi32(round_to_bf16(b.lo), 16)),
          _mm256_or_si256(round_to_bf16(a.hi), _mm256_slli_epi32(round_to_bf16(b.hi), 16))};
}
PM_INLINE void store_words(uint32_t* p, W16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
PM_INLINE I32x16 pair_bytes(I32x16 a, I32x16 b) {
  const __m256i low = _mm256_set1_epi32(255);
  return {_mm256_or_si256(_mm256_and_si256(a.lo, low), _mm256_slli_epi32(b.lo, 8)),
          _mm256_or_si256(_mm256_and_si256(a.hi, low), _mm256_slli_epi32(b.hi, 8))};
}
PM_INLINE void transpose_words(const uint32_t* from, int64_t stride, uint32_t* to) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[16 * i + j] = from[stride * j + i];
}
PM_INLINE __m256 turn_lanes(__m256 v) {
  const auto signs = [](int d) __attribute__((always_inline)) {
    const auto s = [=](int lane) __attribute__((always_inline)) { return lane & d ? -1.0f : 1.0f; };
    return _mm256_setr_ps(s(0), s(1), s(2), s(3), s(4), s(5), s(6), s(7));
  };
  v = _mm256_fmadd_ps(v, signs(1), _mm256_permute_ps(v, 0xb1));
  v = _mm256_fmadd_ps(v, signs(2), _mm256_permute_ps(v, 0x4e));
  return _mm256_fmadd_ps(v, signs(4), _mm256_permute2f128_ps(v, v, 1));
}
PM_INLINE F32x16 turn_lanes(F32x16 v) {
  const __m256 lo = turn_lanes(v.lo), hi = turn_lanes(v.hi);
  return {_mm256_add_ps(lo, hi), _mm256_sub_ps(lo, hi)};
}
PM_INLINE I32x16 set1_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PM_INLINE I32x16 add(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
PM_INLINE int32_t hsum_i32(I32x16 a) {
  const __m256i s = _mm256_add_epi32(a.lo, a.hi);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
PM_INLINE F32x16 to_float(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
PM_INLINE I32x16 round_i32(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
PM_INLINE __m256i pack_i16(I32x16 a) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8); }
PM_INLINE void store_i16(void* p, I32x16 a) { _mm256_storeu_si256(static_cast<__m256i*>(p), pack_i16(a)); }
PM_INLINE void store_i8(void* p, I32x16 a) {
  const __m256i pairs = pack_i16(a);
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}

}  // namespace pm::PM_ISA
