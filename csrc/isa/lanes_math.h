// exp2, exp, tanh and masks on the sixteen lanes of isa/lanes.h. Errors are bounds measured over the whole range by
// tests/kernels/test_ops.py.
#pragma once

#include "isa/exp2.h"
#include "isa/lanes.h"

namespace pm::PM_ISA {

// The lanes below n: a row's tail.
PM_INLINE Mask tail_mask(int64_t n) { return static_cast<Mask>(n >= 16 ? 0xffffu : (1u << n) - 1); }

// 2^x, relative error < 2e-7 for x in [-125, 127]; 0 below -150, NaN stays. Split x = n + f with |f| <= 1/2.
// exp2(0) is 1 exactly: merging a tile that holds nothing for a row must leave the row's bits alone.
template <int N>
PM_INLINE void exp2(F32x16 (&x)[N]) {  // in place, side by side
  F32x16 n[N], p[N];
  const auto each = [&](auto body) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) body(i);
  };
  const auto times_x_plus = [&](float next) __attribute__((always_inline)) {
    each([&](int i) __attribute__((always_inline)) { p[i] = fma(p[i], x[i], set1(next)); });
  };
  each([&](int i) __attribute__((always_inline)) { x[i] = max(set1(-150.0f), x[i]); });
  each([&](int i) __attribute__((always_inline)) { n[i] = round(x[i]); });
  each([&](int i) __attribute__((always_inline)) { x[i] = sub(x[i], n[i]), p[i] = set1(kExp2[0]); });
#pragma GCC unroll 5
  for (int i = 1; i < 6; ++i) times_x_plus(kExp2[i]);
  each([&](int i) __attribute__((always_inline)) { x[i] = scale2(p[i], n[i]); });
}
PM_INLINE F32x16 exp2(F32x16 x) {
  F32x16 one[1] = {x};
  exp2(one);
  return one[0];
}

// e^x; x log2(e) is rounded once, so the relative error grows with |x|: < 3e-7 + 1e-7 |x|.
PM_INLINE F32x16 exp(F32x16 x) { return exp2(mul(x, set1(1.4426950408889634f))); }

// 1 - 2 / (e^2x + 1): absolute error < 3e-7.
PM_INLINE F32x16 tanh(F32x16 x) {
  const F32x16 e = exp2(min(set1(60.0f), mul(x, set1(2.8853900817779268f))));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

}  // namespace pm::PM_ISA
