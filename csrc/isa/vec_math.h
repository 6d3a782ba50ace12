// Elementary functions on F32, the same polynomial for every instruction set.
#pragma once

namespace pm::PM_ISA {

// e^x, relative error below 3e-7; 0 below -87.3, and x is taken as at most 88.3. Range reduction x = n ln2 + r with ln2
// in two parts (Cody and Waite), then the Taylor polynomial of degree 6 on |r| <= ln2 / 2.
inline F32 exp_f32(F32 x) {
  x = vmin(vmax(x, splat(-87.33654f)), splat(88.3762589f));
  const I32 n = round_i32(x * splat(1.44269504f));
  const F32 nf = to_f32(n);
  F32 r = fma(nf, splat(-0.693359375f), x);
  r = fma(nf, splat(2.12194440e-4f), r);
  F32 p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return times_power_of_two(p, n);
}

// x / (1 + e^-y): silu where y = x.
inline F32 times_sigmoid(F32 x, F32 y) { return x * reciprocal(splat(1.0f) + exp_f32(zero_f32() - y)); }

inline F32 silu_f32(F32 x) { return times_sigmoid(x, x); }

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))
inline F32 gelu_tanh_f32(F32 x) {
  return times_sigmoid(x, fma(x * x * x, splat(0.044715f), x) * splat(1.5957691216f));
}

}  // namespace pm::PM_ISA
