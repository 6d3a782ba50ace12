#include "core/ceilings.h"

#include "isa/vec.h"

namespace pm::PM_ISA {
namespace {

// Twelve accumulators that do not wait for each other, from operands that the compiler cannot see through.
#define PM_TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#if defined(__x86_64__)
#define PM_OPAQUE(v) asm volatile("" : "+x"(v))
#if defined(PM_ISA_IS_AVX512) || defined(PM_ISA_IS_AVX512BF16)
#undef PM_OPAQUE
#define PM_OPAQUE(v) asm volatile("" : "+v"(v))
#endif
#else
#define PM_OPAQUE(v) asm volatile("" : "+w"(v))
#endif

float peak_int8(int64_t rounds) {
  I32 a = splat_i32(0x01010101), w = a;
  PM_OPAQUE(a);
  PM_OPAQUE(w);
#define PM_DECLARE(i) I32 c##i = zero_i32();
#define PM_STEP(i) c##i = dot8(c##i, w, a);
#define PM_KEEP(i) PM_OPAQUE(c##i);
  PM_TWELVE(PM_DECLARE)
  for (int64_t r = 0; r < rounds; ++r) {
#define PM_STEP_FRESH(i) PM_OPAQUE(a); PM_STEP(i)  // or a dot product of several instructions is hoisted but for its last
    PM_TWELVE(PM_STEP_FRESH)
    PM_TWELVE(PM_KEEP)
  }
  I32 sum = zero_i32();
#define PM_SUM(i) sum = add(sum, c##i);
  PM_TWELVE(PM_SUM)
#undef PM_DECLARE
#undef PM_STEP
#undef PM_SUM
  float out[kLanes];
  store(out, as_f32(sum));
  return out[0];
}

template <class Dot>
float peak_float(int64_t rounds, Dot dot) {
#define PM_DECLARE(i) F32 c##i = zero_f32();
#define PM_STEP(i) c##i = dot(c##i);
#define PM_SUM(i) sum = sum + c##i;
  PM_TWELVE(PM_DECLARE)
  for (int64_t r = 0; r < rounds; ++r) {
    PM_TWELVE(PM_STEP)
    PM_TWELVE(PM_KEEP)
  }
  F32 sum = zero_f32();
  PM_TWELVE(PM_SUM)
  float out[kLanes];
  store(out, sum);
  return out[0];
}

float peak_f32(int64_t rounds) {
  F32 a = splat(1.0f);
  PM_OPAQUE(a);
  return peak_float(rounds, [&](F32 c) { return fma(a, a, c); });
}

[[maybe_unused]] float peak_bf16(int64_t rounds) {
  I32 a = splat_i32(0x3F803F80);
  PM_OPAQUE(a);
  return peak_float(rounds, [&](F32 c) { return dot_bf16(c, a, a); });
}

uint64_t read_all(const void* data, int64_t bytes) {
  const char* p = static_cast<const char*>(data);
  I32 s0 = zero_i32(), s1 = s0, s2 = s0, s3 = s0;
  for (int64_t i = 0; i < bytes; i += 4 * kLanes * 4) {
    s0 = add(s0, load_i32(p + i));
    s1 = add(s1, load_i32(p + i + kLanes * 4));
    s2 = add(s2, load_i32(p + i + 2 * kLanes * 4));
    s3 = add(s3, load_i32(p + i + 3 * kLanes * 4));
  }
  float out[kLanes];
  store(out, as_f32(add(add(s0, s1), add(s2, s3))));
  uint64_t result;
  std::memcpy(&result, out, 8);
  return result;
}

}  // namespace

extern const CeilingTable ceiling_table;
const CeilingTable ceiling_table = {peak_int8, kHasDotBf16 ? peak_bf16 : nullptr, peak_f32, kLanes, read_all};

}  // namespace pm::PM_ISA
