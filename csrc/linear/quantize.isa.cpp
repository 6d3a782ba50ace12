#include "linear/quantize.h"

#include <cstring>

#include "isa/vec.h"

namespace pm::PM_ISA {
namespace {

constexpr float kOver127 = 1.0f / 127.0f;
constexpr float kSmallest = 1e-36f;  // 127 over anything smaller is no float; rounded to zeros

// Thirty-two values at a time, the group of the grouped kernels: the largest magnitude, and rounding to int8 with the
// sums of both halves. Magnitudes are compared as integers, among which NaN is the largest: it must show in the scale.
#if defined(__AVX2__)  // 256 bits also under AVX-512: what is packed into 32 bytes is short

using Sums = __m256i;  // of four q each; the first half in lanes 0 to 3

inline __m256i max_lanes(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
inline __m256i absmax_lanes(const float* x) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  const auto at = [&](int i) {
    return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * i)), magnitude);
  };
  return max_lanes(max_lanes(at(0), at(1)), max_lanes(at(2), at(3)));
}
// Of the sums of neighbours: NaN in the scale where two finite ones have no finite sum.
inline __m256i absmax_pair_lanes(const float* x) {
  const auto at = [&](int i) {
    const __m256 sums = _mm256_hadd_ps(_mm256_loadu_ps(x + 16 * i), _mm256_loadu_ps(x + 16 * i + 8));
    return _mm256_and_si256(_mm256_castps_si256(sums), _mm256_set1_epi32(0x7FFFFFFF));
  };
  return max_lanes(at(0), at(1));
}
inline float largest(__m256i lanes) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
  return _mm_cvtss_f32(_mm_castsi128_ps(m));
}
inline Sums round_32(const float* x, float inverse, int8_t* q) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const auto at = [&](int i) { return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor)); };
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(at(0), at(1)), _mm256_packs_epi32(at(2), at(3)));
  // The packs work within 128 bits: dwords come out as 0 2 4 6, 1 3 5 7 of the order wanted.
  const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), ordered);
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), ordered), _mm256_set1_epi16(1));
}
inline Sums no_sums() { return _mm256_setzero_si256(); }
inline Sums add_sums(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
inline void halves(Sums sums, int32_t& first, int32_t& second) {
  sums = _mm256_hadd_epi32(sums, sums);
  sums = _mm256_hadd_epi32(sums, sums);
  first = _mm256_extract_epi32(sums, 0);
  second = _mm256_extract_epi32(sums, 4);
}

#else

struct Sums {
  int32_t first, second;
};

inline uint32_t max_lanes(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline uint32_t absmax_lanes(const float* x) {
  uint32_t most = 0;
  for (int i = 0; i < 32; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    most = max_lanes(most, bits & 0x7FFFFFFFu);
  }
  return most;
}
inline uint32_t absmax_pair_lanes(const float* x) {
  float sums[32] = {};
  for (int i = 0; i < 32; i += 2) sums[i] = x[i] + x[i + 1];
  return absmax_lanes(sums);
}
inline float largest(uint32_t lanes) {
  float most;
  std::memcpy(&most, &lanes, 4);
  return most;
}
inline Sums round_32(const float* x, float inverse, int8_t* q) {
  Sums sums = {0, 0};
  for (int i = 0; i < 32; ++i) {
    float scaled = x[i] * inverse;
    scaled = scaled > -128.0f ? scaled : -128.0f;  // also NaN, as the vector conversions have it
    // Adding 1.5 * 2^23 rounds in the float unit and leaves the integer in the low bits.
    const float shifted = scaled + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    q[i] = static_cast<int8_t>(bits - 0x4B400000);
    (i < 16 ? sums.first : sums.second) += q[i];
  }
  return sums;
}
inline Sums no_sums() { return {0, 0}; }
inline Sums add_sums(Sums a, Sums b) { return {a.first + b.first, a.second + b.second}; }
inline void halves(Sums sums, int32_t& first, int32_t& second) {
  first = sums.first;
  second = sums.second;
}

#endif

// The last, partial 32 of a row, with zeros behind.
struct Tail {
  alignas(64) float values[kActGroup] = {};
  Tail(const float* x, int64_t n) { std::memcpy(values, x, static_cast<size_t>(n) * sizeof(float)); }
};

// What is to be 127 steps: the largest magnitude, with Pairs also of the sums of neighbours. Rounding adds at most one
// step to such a sum.
template <bool Pairs>
auto reach_lanes(const float* x) {
  if constexpr (Pairs) return max_lanes(absmax_lanes(x), absmax_pair_lanes(x));
  return absmax_lanes(x);
}

// x [k] -> q [k] int8 = round-to-nearest-even(x * 127 / reach), scale = reach / 127, and the sum of q. A row of zeros
// gives scale 0 and zeros. q has room for k rounded up to 32; what is beyond k is zeroed.
template <bool Pairs>
void quantize_row_token(const float* x, int64_t k, int8_t* q, float& scale, int32_t& sum) {
  const int64_t whole = k / kActGroup * kActGroup;
  const Tail tail(x + whole, k - whole);
  auto lanes = reach_lanes<Pairs>(tail.values);
  for (int64_t i = 0; i < whole; i += kActGroup) lanes = max_lanes(lanes, reach_lanes<Pairs>(x + i));
  const float reach = largest(lanes);
  const float inverse = reach > kSmallest ? 127.0f / reach : 0.0f;
  Sums sums = no_sums();
  for (int64_t i = 0; i < whole; i += kActGroup) sums = add_sums(sums, round_32(x + i, inverse, q + i));
  if (whole < k) sums = add_sums(sums, round_32(tail.values, inverse, q + whole));
  int32_t first, second;
  halves(sums, first, second);
  scale = reach * kOver127;
  sum = first + second;
}

// The same for each 32 values: ceil(k / 32) records, the last padded with zeros.
template <bool Pairs>
void quantize_row_group(const float* x, int64_t k, GroupRecord* out) {
  const auto record = [](const float* group, GroupRecord* to) {
    const float reach = largest(reach_lanes<Pairs>(group));
    const float inverse = reach > kSmallest ? 127.0f / reach : 0.0f;
    int32_t first, second;
    halves(round_32(group, inverse, to->q), first, second);
    to->scale = reach * kOver127;
    to->scaled_sum = to->scale * static_cast<float>(first + second);
    to->offset = -8 * (first + second);
    to->half_offset = -8 * first;
  };
  const int64_t whole = k / kActGroup;
  for (int64_t g = 0; g < whole; ++g) record(x + g * kActGroup, out + g);
  if (const int64_t rest = k - whole * kActGroup; rest > 0) record(Tail(x + whole * kActGroup, rest).values, out + whole);
}

// x [k] -> bfloat16, round to nearest even; NaN stays NaN.
void round_row_bf16(const float* x, int64_t k, uint16_t* out) {
  for (int64_t i = 0; i < k; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    out[i] = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
  }
}

template <bool Pairs>
void prepare_token_row(const float* x, int64_t k, std::byte* row) {
  auto* head = reinterpret_cast<TokenHead*>(row);
  int32_t sum;
  quantize_row_token<Pairs>(x, k, reinterpret_cast<int8_t*>(row + kTokenHead), head->scale, sum);
  head->sum128 = 128 * sum;
}

}  // namespace

void prepare_row(ActKind kind, const float* x, int64_t k, std::byte* row) {
  const auto zero_from = [&](int64_t used) {
    std::memset(row + used, 0, static_cast<size_t>((used + 63) / 64 * 64 - used));
  };
  switch (kind) {
    case ActKind::f32:
      std::memcpy(row, x, static_cast<size_t>(k) * 4);
      zero_from(k * 4);
      break;
    case ActKind::bf16:
      round_row_bf16(x, k, reinterpret_cast<uint16_t*>(row));
      zero_from(k * 2);
      break;
    case ActKind::i8_token:
    case ActKind::i8_token_pairs:
      zero_from(kTokenHead + (k + kActGroup - 1) / kActGroup * kActGroup);
      kind == ActKind::i8_token ? prepare_token_row<false>(x, k, row) : prepare_token_row<true>(x, k, row);
      break;
    case ActKind::i8_group: quantize_row_group<false>(x, k, reinterpret_cast<GroupRecord*>(row)); break;
    case ActKind::i8_group_pairs: quantize_row_group<true>(x, k, reinterpret_cast<GroupRecord*>(row)); break;
  }
}

}  // namespace pm::PM_ISA
