// Elementary functions on F32, the same polynomial for every instruction set.
#pragma once

#include "isa/exp2.h"

namespace pm::PM_ISA {

// 2^x for |x| <= 126, beyond which it is as at the bound; relative error below 2e-7. x = n + f with |f| <= 1/2. NaN stays.
inline F32 exp2_f32(F32 x) {
  x = vmin(splat(126.0f), vmax(splat(-126.0f), x));
  const I32 n = round_i32(x);
  const F32 f = x - to_f32(n);
  F32 p = splat(kExp2[0]);
#pragma GCC unroll 5
  for (int i = 1; i < 6; ++i) p = fma(p, f, splat(kExp2[i]));
  return times_power_of_two(p, n);
}

constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-x); the exponent is rounded once, so the relative error grows with -x: < 3e-7 + 1e-7 |x|.
inline F32 silu_f32(F32 x) { return x * reciprocal(splat(1.0f) + exp2_f32(x * splat(-kLog2E))); }

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))
inline F32 gelu_tanh_f32(F32 x) {
  const F32 y = fma(x * x * x, splat(0.044715f), x);
  return x * reciprocal(splat(1.0f) + exp2_f32(y * splat(-1.5957691216f * kLog2E)));
}

}  // namespace pm::PM_ISA
