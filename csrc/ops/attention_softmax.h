// From scores to probabilities, and how the tiles of a query are put together. Read by attention.isa.cpp alone.
#pragma once

#include <type_traits>

#include "ops/attention_words.h"

namespace pm::PM_ISA {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMinusInf = -__builtin_inff();

// What one item works in: query words, scores (probabilities in place), tile outputs, running outputs, per-row state.
struct Scratch {
  uint32_t* query;      // [kTileRows][query_words]
  float* scores;        // [kTileRows][kTile]
  float* value_scales;  // [kTile]
  float* weights;       // [kTile]: value_scales in steps of a probability, for rows that see all keys
  float* tile_out;      // [kTileRows][padded]
  float* out;           // [kTileRows][padded]
  float *tile_max, *tile_sum, *max, *sum;  // [kTileRows], maxima times scale * log2(e)
  float* query_scale;                      // [kTileRows]: what a row's query is worth, times the layer's scale
  float* unit;                             // [kTileRows]: what a row's tile outputs are worth
  float* steps;                            // [kTileRows]: steps of a probability in 1, as `weights`
  int32_t* start;                          // [kTileRows]: what a row's scores begin with

  Scratch(float* memory, const AttentionLayer& layer) {
    scores = memory;
    value_scales = scores + kTileRows * kTile;
    weights = value_scales + kTile;
    tile_out = weights + kTile;
    out = tile_out + kTileRows * layer.padded_dim();
    query = reinterpret_cast<uint32_t*>(out + kTileRows * layer.padded_dim());
    tile_max = reinterpret_cast<float*>(query + kTileRows * layer.query_words());
    tile_sum = tile_max + kTileRows;
    max = tile_sum + kTileRows;
    sum = max + kTileRows;
    query_scale = sum + kTileRows;
    unit = query_scale + kTileRows;
    steps = unit + kTileRows;
    start = reinterpret_cast<int32_t*>(steps + kTileRows);
  }

  // The same from row `row` on.
  Scratch from(int row, const AttentionLayer& layer) const {
    Scratch at = *this;
    at.query += row * layer.query_words(), at.scores += row * kTile;
    at.tile_out += row * layer.padded_dim(), at.out += row * layer.padded_dim();
    for (float** state : {&at.tile_max, &at.tile_sum, &at.max, &at.sum, &at.query_scale, &at.unit, &at.steps})
      *state += row;
    at.start += row;
    return at;
  }
};

// Lanes [lo, hi) of 16.
PM_INLINE Mask lane_range(int lo, int hi) {
  hi = hi > 16 ? 16 : hi < 0 ? 0 : hi;
  lo = lo < 0 ? 0 : lo > 16 ? 16 : lo;
  return static_cast<Mask>(((1u << hi) - 1) & ~((1u << lo) - 1));
}

// Which keys of a tile a row sees: [lo, hi), which groups [begin, end) hold, all of them but the edges' whole. Groups
// [first, last) were read.
struct Seen {
  int first, last, lo, hi, begin, end, whole_begin, whole_end;

  Seen(int first, int last, int lo, int hi) : first(first), last(last), lo(lo), hi(hi) {
    begin = lo > first * kGroup ? lo / kGroup : first;
    end = (hi + kGroup - 1) / kGroup < last ? (hi + kGroup - 1) / kGroup : last;
    if (begin >= end) begin = end = first;
    whole_begin = begin * kGroup >= lo ? begin : begin + 1;
    whole_end = hi / kGroup < end ? hi / kGroup : end;
    if (begin == end) whole_begin = begin;
    if (whole_end < whole_begin) whole_end = whole_begin;
  }
  Mask lanes(int g) const { return lane_range(lo - g * kGroup, hi - g * kGroup); }
  // edge(group) and whole(group, how many) in order of position.
  template <int Most, class Edge, class Whole>
  [[gnu::always_inline]] inline void each(Edge edge, Whole whole) const {
    for (int g = begin; g < whole_begin; ++g) edge(g);
    int g = whole_begin;
    for (; g + Most <= whole_end; g += Most) whole(g, std::integral_constant<int, Most>{});
    if constexpr (Most > 1)
      for (; g < whole_end; ++g) whole(g, std::integral_constant<int, 1>{});
    for (; g < end; ++g) edge(g);
  }
};

// What the probabilities of a tile are multiplied with where values are bytes, and what a step of them is worth.
struct Steps {
  float in_one = 1, unit = 0;
  Steps() = default;
  explicit Steps(float largest) : in_one(kMaxProbability / (largest > 0 ? largest : 1.0f)), unit(largest / kMaxProbability) {}
};

// First half of a row's softmax: soft cap, and the maximum of the visible scores in powers of two. `all`: the steps of
// rows that see all keys up to the walk's end; null: this one does not.
template <class Word>
PM_INLINE void find_peak(const AttentionLayer& layer, const Scratch& at, int row, const Seen& seen, const Steps* all) {
  float* s = at.scores + row * kTile;
  float factor = at.query_scale[row] * kLog2e;
  if (layer.softcap > 0) {
    const F32x16 cap = set1(layer.softcap), into = set1(at.query_scale[row] / layer.softcap);
    for (int g = seen.begin; g < seen.end; ++g)
      store(s + g * kGroup, mul(cap, tanh(mul(load(s + g * kGroup), into))));
    factor = kLog2e;
  }
  F32x16 top = set1(kMinusInf), most = zero();
  seen.each<1>([&](int g) __attribute__((always_inline)) {
    top = max(top, select(seen.lanes(g), load(s + g * kGroup), set1(kMinusInf)));
  }, [&](int g, auto) __attribute__((always_inline)) { top = max(top, load(s + g * kGroup)); });
  at.tile_max[row] = hmax(top) * factor;
  if constexpr (Kind<Word>::kBytes) {
    if (all == nullptr)
      seen.each<1>([&](int g) __attribute__((always_inline)) {
        most = max(most, zero_unless(seen.lanes(g), load(at.value_scales + g * kGroup)));
      }, [&](int g, auto) __attribute__((always_inline)) { most = max(most, load(at.value_scales + g * kGroup)); });
    const Steps own = all ? *all : Steps(hmax(most));
    at.unit[row] = own.unit, at.steps[row] = own.in_one;
  }
}

// Second half: scores to probabilities in place, and their sum. Keys that are not visible get exactly 0. Several groups
// are computed side by side: one alone is a long chain of instructions that wait for each other. `All`: at.weights
// holds what this row's probabilities are multiplied with.
template <class Word, bool All>
PM_INLINE void write_probabilities(const AttentionLayer& layer, const Scratch& at, int row, const Seen& seen) {
  using P = typename Kind<Word>::Probability;
  constexpr int steps = Kind<Word>::kValueSteps;
  float* s = at.scores + row * kTile;
  uint32_t* p = reinterpret_cast<uint32_t*>(s);
  const float peak = at.tile_max[row], factor = layer.softcap > 0 ? kLog2e : at.query_scale[row] * kLog2e;
  // Rows that see nothing of this tile (a window's edge, keys to come) keep a finite exponent.
  const F32x16 shift = set1(peak == kMinusInf ? 0.0f : -peak), by = set1(factor);
  F32x16 sum = zero(), in_one = zero();
  if constexpr (Kind<Word>::kBytes) in_one = set1(at.steps[row]);
  const auto weight = [&](int g) __attribute__((always_inline)) {
    return All ? load(at.weights + g * kGroup) : mul(in_one, load(at.value_scales + g * kGroup));
  };
  for (int g = seen.first; g < seen.begin; ++g) store_probabilities(p + g * steps, zero(), P{});
  seen.each<kSideBySide>([&](int g) __attribute__((always_inline)) {
    const Mask visible = seen.lanes(g);
    F32x16 e = zero_unless(visible, exp2(fma(load(s + g * kGroup), by, shift)));
    sum = add(sum, e);
    if constexpr (Kind<Word>::kBytes) e = mul(e, zero_unless(visible, weight(g)));
    store_probabilities(p + g * steps, e, P{});
  }, [&](int g, auto count) __attribute__((always_inline)) {
    constexpr int n = decltype(count)::value;
    F32x16 e[n];
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) e[i] = fma(load(s + (g + i) * kGroup), by, shift);
    exp2(e);
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
      sum = add(sum, e[i]);
      if constexpr (Kind<Word>::kBytes) e[i] = mul(e[i], weight(g + i));
      store_probabilities(p + (g + i) * steps, e[i], P{});
    }
  });
  for (int g = seen.end; g < seen.last; ++g) store_probabilities(p + g * steps, zero(), P{});
  at.tile_sum[row] = hsum(sum);
}

// (max, sum, out) of `rows` rows over the tiles before, merged with one more tile.
PM_INLINE void merge_tile(float* max, float* sum, float* out, const float* tile_max, const float* tile_sum,
                          const float* tile_out, int rows, int padded) {
  float keep[2 * kGroup], take[2 * kGroup];
  static_assert(kTileRows <= 2 * kGroup);
  for (int i = 0; i < rows; i += kGroup) {
    const Mask in = tail_mask(rows - i);
    const F32x16 before = load(max + i, in), now = load(tile_max + i, in), top = select(greater(now, before), now, before);
    const F32x16 kept = exp2(sub(before, top)), taken = exp2(sub(now, top));
    const F32x16 old = load(sum + i, in), total = add(mul(old, kept), mul(load(tile_sum + i, in), taken));
    store(keep + i, kept);
    store(take + i, taken);
    store(max + i, top, in);
    store(sum + i, select(greater_equal(set1(kMinusInf), top), old, total), in);
  }
  for (int i = 0; i < rows; ++i, out += padded, tile_out += padded) {
    if (max[i] == kMinusInf) continue;  // NaN goes on, and stays in its row
    const F32x16 kept = set1(keep[i]), taken = set1(take[i]);
    for (int d = 0; d < padded; d += 16) store(out + d, fma(load(tile_out + d), taken, mul(load(out + d), kept)));
  }
}

}  // namespace pm::PM_ISA
