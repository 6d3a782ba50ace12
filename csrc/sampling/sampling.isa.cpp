#include "sampling/sampling.h"

#include "isa/lanes_math.h"

namespace pm::PM_ISA {
namespace {

PM_INLINE F32x16 lane_numbers() {
  static constexpr float kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(kNumbers);
}

// Highest value and the step at which each lane first saw it. Steps stay below 2^24, so floats hold them exactly.
struct Best {
  F32x16 value, step;
};
PM_INLINE void look(Best& best, F32x16 x, float step) {
  const Mask m = greater(x, best.value);
  best.value = select(m, x, best.value);
  best.step = select(m, set1(step), best.step);
}

template <bool Masked>
RowExtremes extremes_among(const float* logits, int64_t vocab, const uint32_t* mask) {
  const float low = -__builtin_inff();
  const auto allowed = [&](F32x16 x, int64_t i) {
    if constexpr (!Masked) return x;
    return select(static_cast<Mask>(mask[i / 32] >> (i % 32)), x, set1(low));
  };
  Best a{set1(low), zero()}, b{set1(low), zero()};
  Mask sound = 0xffff;
  int64_t i = 0;
  for (; i + 32 <= vocab; i += 32) {
    const F32x16 x = load(logits + i), y = load(logits + i + 16);
    sound &= finite(x) & finite(y);
    look(a, allowed(x, i), static_cast<float>(i / 16));
    look(b, allowed(y, i + 16), static_cast<float>(i / 16 + 1));
  }
  for (; i < vocab; i += 16) {
    const Mask m = tail_mask(vocab - i);
    const F32x16 x = load(logits + i, m);
    sound &= finite(x);
    look(a, allowed(select(m, x, set1(low)), i), static_cast<float>(i / 16));
  }
  float value[32], step[32];
  store(value, a.value);
  store(value + 16, b.value);
  store(step, a.step);
  store(step + 16, b.step);
  RowExtremes found{0, low, sound == 0xffff};
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) {
    const int64_t id = static_cast<int64_t>(step[lane]) * 16 + lane % 16;
    if (value[lane] > found.highest || (value[lane] == found.highest && value[lane] > low && id < found.best) ||
        (!any && value[lane] > low)) {
      found.best = id;
      found.highest = value[lane];
      any = true;
    }
  }
  return found;
}

RowExtremes extremes(const float* logits, int64_t vocab, const uint32_t* mask) {
  return mask == nullptr ? extremes_among<false>(logits, vocab, mask) : extremes_among<true>(logits, vocab, mask);
}

void weigh(const float* logits, int64_t vocab, float highest, float scale, float least, float* weights,
           float* block_mass) {
  const F32x16 top = set1(highest), factor = set1(scale), bound = set1(least);
  for (int64_t first = 0; first < vocab; first += kMassBlock) {
    const int64_t last = first + kMassBlock < vocab ? first + kMassBlock : vocab;
    F32x16 s0 = zero(), s1 = zero();
    int64_t i = first;
    for (; i + 32 <= last; i += 32) {
      F32x16 x = exp(mul(sub(load(logits + i), top), factor)), y = exp(mul(sub(load(logits + i + 16), top), factor));
      x = zero_unless(greater_equal(x, bound), x);
      y = zero_unless(greater_equal(y, bound), y);
      store(weights + i, x);
      store(weights + i + 16, y);
      s0 = add(s0, x);
      s1 = add(s1, y);
    }
    for (; i < last; i += 16) {
      const Mask m = tail_mask(last - i);
      F32x16 x = exp(mul(sub(load(logits + i, m), top), factor));
      x = zero_unless(static_cast<Mask>(greater_equal(x, bound) & m), x);
      store(weights + i, x);
      s0 = add(s0, x);
    }
    block_mass[first / kMassBlock] = hsum(add(s0, s1));
  }
}

int64_t collect(const float* weights, int64_t vocab, float least, Candidate* found) {
  const F32x16 bound = set1(least);
  int64_t count = 0;
  for (int64_t i = 0; i < vocab; i += 16) {
    const Mask m = tail_mask(vocab - i);
    uint32_t hits = greater_equal(load(weights + i, m), bound) & m;
    for (; hits; hits &= hits - 1) {
      const int64_t id = i + __builtin_ctz(hits);
      found[count++] = {weights[id], static_cast<int32_t>(id)};
    }
  }
  return count;
}

void cut(float* weights, int64_t vocab, Candidate last, float* block_mass) {
  const F32x16 bound = set1(last.weight);
  for (int64_t first = 0; first < vocab; first += kMassBlock) {
    const int64_t end = first + kMassBlock < vocab ? first + kMassBlock : vocab;
    F32x16 sum = zero();
    for (int64_t i = first; i < end; i += 16) {
      const Mask m = tail_mask(end - i);
      const F32x16 x = load(weights + i, m);
      Mask keep = greater(x, bound);
      const Mask equal = static_cast<Mask>(greater_equal(x, bound) & ~keep);
      if (equal && i <= last.id) keep |= equal & tail_mask(last.id - i + 1);
      const F32x16 kept = zero_unless(static_cast<Mask>(keep & m), x);
      store(weights + i, kept);
      sum = add(sum, kept);
    }
    block_mass[first / kMassBlock] = hsum(sum);
  }
}

int64_t count_above(const float* logits, int64_t vocab, float bound) {
  const F32x16 limit = set1(bound);
  int64_t count = 0;
  for (int64_t i = 0; i < vocab; i += 16) {
    const Mask m = tail_mask(vocab - i);
    count += __builtin_popcount(greater(load(logits + i, m), limit) & m);
  }
  return count;
}

void forbid(float* logits, int64_t vocab, const uint32_t* mask) {
  const F32x16 low = set1(-__builtin_inff());
  for (int64_t i = 0; i < vocab; i += 16) {
    const Mask allowed = static_cast<Mask>(mask[i / 32] >> (i % 32));
    if (allowed == 0xffff) continue;
    const Mask m = tail_mask(vocab - i);
    store(logits + i, select(allowed, load(logits + i, m), low), m);
  }
}

}  // namespace

extern const SamplingTable sampling_table;
const SamplingTable sampling_table = {extremes, weigh, collect, cut, count_above, forbid};

}  // namespace pm::PM_ISA
