// The attention main loops. See ops/attention.h for the layout and the order of the arithmetic.
#include <cmath>
#include <cstring>
#include <utility>

#include "ops/attention_words.h"

namespace pm::PM_ISA {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMinusInf = -__builtin_inff();
constexpr int kTileGroups = kTile / kGroup;
constexpr int kDecodeRows = 4;  // up to so many rows the memory is what is waited for, and the kernel fetches ahead

// Scores of R rows against 16 G keys: s[r][16 g + lane] = sum over steps of q[r][step] * k[g][step][lane].
// With few rows each line used, here and in value_block, fetches the line of the same place in `next`: as evenly as
// lines are read. One line in eight, for the hardware to complete, took 5 to 12 % longer; with 4 KiB pages a third.
// Pack expansions instead of loops: GCC 12 keeps only constant-indexed accumulators in registers.
template <class Word, int R, int G, int... Rs, int... Gs>
PM_INLINE void score_block(const uint32_t* q, int64_t q_stride, const int32_t* start, const uint32_t* const* keys,
                           int steps, int scales_at, float* s, const uint32_t* const* next,
                           std::integer_sequence<int, Rs...>, std::integer_sequence<int, Gs...>) {
  typename Kind<Word>::Sum acc[R * G];
  const uint32_t* k[G] = {keys[Gs]...};
  const auto clear_row = [&](auto row) __attribute__((always_inline)) {
    ((acc[row * G + Gs] = Kind<Word>::first_sum(start + row)), ...);
  };
  (clear_row(std::integral_constant<int, Rs>{}), ...);
  for (int step = 0; step < steps; ++step) {
    W16 w[G];
    ((w[Gs] = load_words(k[Gs] + step * 16)), ...);
    if constexpr (R <= kDecodeRows) (prefetch(next[Gs] + step * 16), ...);
    const auto row_step = [&](auto row) __attribute__((always_inline)) {
      const Word b = broadcast(q + row * q_stride + step, Word{});
      ((acc[row * G + Gs] = dot(acc[row * G + Gs], w[Gs], b)), ...);
    };
    (row_step(std::integral_constant<int, Rs>{}), ...);
  }
  const auto store_row = [&](auto row) __attribute__((always_inline)) {
    ((store(s + row * kTile + Gs * 16, Kind<Word>::scores(acc[row * G + Gs], k[Gs] + scales_at))), ...);
  };
  (store_row(std::integral_constant<int, Rs>{}), ...);
}

// Outputs of R rows in 16 C dimensions over the value steps of `groups` groups.
// p: words of the probabilities, row stride kTile. last_steps: steps of the last group; odd: its last pair is half.
// unit: what a row's integers are worth.
template <class Word, int R, int C, int... Rs, int... Cs>
PM_INLINE void value_block(const uint32_t* p, const uint32_t* const* values, int groups, int steps, int last_steps,
                           bool odd, int64_t step_words, const float* unit, float* out, int64_t out_stride,
                           const uint32_t* const* next, std::integer_sequence<int, Rs...>,
                           std::integer_sequence<int, Cs...>) {
  using P = typename Kind<Word>::Probability;
  constexpr int kWords = Kind<Word>::kBytes ? 8 : 16;  // of 16 dimensions
  typename Kind<Word>::Sum acc[R * C];
  constexpr int32_t none = 0;
  const auto clear_row = [&](auto row) __attribute__((always_inline)) {
    ((acc[row * C + Cs] = Kind<Word>::first_sum(&none)), ...);
  };
  (clear_row(std::integral_constant<int, Rs>{}), ...);
  for (int g = 0; g < groups; ++g) {
    const uint32_t* v = values[g];
    const uint32_t* pg = p + g * steps;
    const bool last = g == groups - 1;
    const int count = last ? last_steps : steps, whole = last && odd ? count - 1 : count;
    for (int step = 0; step < whole; ++step, v += step_words) {
      W16 w[C];
      ((w[Cs] = Kind<Word>::values(v + Cs * kWords)), ...);
      if constexpr (R <= kDecodeRows)
        ((Cs * kWords % 16 ? void() : prefetch(next[g] + step * step_words + Cs * kWords)), ...);
      const auto row_step = [&](auto row) __attribute__((always_inline)) {
        const P b = broadcast(pg + row * kTile + step, P{});
        ((acc[row * C + Cs] = dot(acc[row * C + Cs], w[Cs], b)), ...);
      };
      (row_step(std::integral_constant<int, Rs>{}), ...);
    }
    if (whole < count) {  // the pair's other token is not written yet: what lies there may be NaN, and 0 * NaN is NaN
      W16 w[C];
      ((w[Cs] = low_halves(Kind<Word>::values(v + Cs * kWords))), ...);
      const auto row_step = [&](auto row) __attribute__((always_inline)) {
        const P b = broadcast(pg + row * kTile + whole, P{});
        ((acc[row * C + Cs] = dot(acc[row * C + Cs], w[Cs], b)), ...);
      };
      (row_step(std::integral_constant<int, Rs>{}), ...);
    }
  }
  const auto store_row = [&](auto row) __attribute__((always_inline)) {
    ((store(out + row * out_stride + Cs * 16, Kind<Word>::outputs(acc[row * C + Cs], unit[row]))), ...);
  };
  (store_row(std::integral_constant<int, Rs>{}), ...);
}

// Run-time sizes to the compiled blocks: calls f(integral_constant<n>) for 1 <= n <= Max.
template <int Max, class F>
PM_INLINE void with_count(int n, F f) {
  if constexpr (Max == 1) {
    f(std::integral_constant<int, 1>{});
  } else {
    if (n == Max)
      f(std::integral_constant<int, Max>{});
    else
      with_count<Max - 1>(n, f);
  }
}

template <class Word, int R, int G>
[[gnu::noinline]] void score_block_at(const uint32_t* q, int64_t q_stride, const int32_t* start,
                                      const uint32_t* const* keys, int steps, int scales_at, float* s,
                                      const uint32_t* const* next) {
  score_block<Word, R, G>(q, q_stride, start, keys, steps, scales_at, s, next, std::make_integer_sequence<int, R>{},
                          std::make_integer_sequence<int, G>{});
}
template <class Word, int R, int C>
[[gnu::noinline]] void value_block_at(const uint32_t* p, const uint32_t* const* values, int groups, int steps,
                                      int last_steps, bool odd, int64_t step_words, const float* unit, float* out,
                                      int64_t out_stride, const uint32_t* const* next) {
  value_block<Word, R, C>(p, values, groups, steps, last_steps, odd, step_words, unit, out, out_stride, next,
                          std::make_integer_sequence<int, R>{}, std::make_integer_sequence<int, C>{});
}

// What one item works in: query words, scores (probabilities in place), tile outputs, running outputs, per-row state.
struct Scratch {
  uint32_t* query;      // [kTileRows][query_words]
  float* scores;        // [kTileRows][kTile]
  float* value_scales;  // [kTile]
  float* tile_out;      // [kTileRows][padded]
  float* out;           // [kTileRows][padded]
  float *tile_max, *tile_sum, *max, *sum;  // [kTileRows], maxima times scale * log2(e)
  float* query_scale;                      // [kTileRows]: what a row's query is worth, times the layer's scale
  float* unit;                             // [kTileRows]: what a row's tile outputs are worth
  int32_t* start;                          // [kTileRows]: what a row's scores begin with

  Scratch(float* memory, const AttentionLayer& layer) {
    scores = memory;
    value_scales = scores + kTileRows * kTile;
    tile_out = value_scales + kTile;
    out = tile_out + kTileRows * layer.padded_dim();
    query = reinterpret_cast<uint32_t*>(out + kTileRows * layer.padded_dim());
    tile_max = reinterpret_cast<float*>(query + kTileRows * layer.query_words());
    tile_sum = tile_max + kTileRows;
    max = tile_sum + kTileRows;
    sum = max + kTileRows;
    query_scale = sum + kTileRows;
    unit = query_scale + kTileRows;
    start = reinterpret_cast<int32_t*>(unit + kTileRows);
  }
};

PM_INLINE void stage_query(const Scratch& at, int row, const float* from, const AttentionLayer& layer, Bf16Word) {
  const int dim = layer.head_dim;
  uint16_t* to = reinterpret_cast<uint16_t*>(at.query + row * layer.query_words());
  at.query_scale[row] = layer.scale;
  if (dim & 1) to[dim] = 0;
  for (int d = 0; d < dim; d += 16) {
    const Mask m = tail_mask(dim - d);
    store_bf16(to + d, load(from + d, m), m);
  }
}
PM_INLINE void stage_query(const Scratch& at, int row, const float* from, const AttentionLayer& layer, F32Word) {
  std::memcpy(at.query + row * layer.query_words(), from, layer.head_dim * sizeof(float));
  at.query_scale[row] = layer.scale;
}
PM_INLINE void stage_query(const Scratch& at, int row, const float* from, const AttentionLayer& layer, I8Word) {
  auto* to = reinterpret_cast<int8_t*>(at.query + row * layer.query_words());
  const Bytes bytes = turned_to_bytes(layer, from, false, to, at.scores);
  at.start[row] = -kKeyBias * bytes.sum;
  at.query_scale[row] = layer.scale * bytes.scale;
}

// Lanes [lo, hi) of 16.
PM_INLINE Mask lane_range(int lo, int hi) {
  hi = hi > 16 ? 16 : hi < 0 ? 0 : hi;
  lo = lo < 0 ? 0 : lo > 16 ? 16 : lo;
  return static_cast<Mask>(((1u << hi) - 1) & ~((1u << lo) - 1));
}

// Scores of one row to probabilities in place: keys [lo, hi) of the tile are visible, groups [first, last) are written.
// Returns the tile's maximum (in powers of two) and sum. Keys that are not visible get exactly 0.
template <class Word>
PM_INLINE void softmax_row(float* s, int first, int last, int lo, int hi, float scale, float softcap,
                           const float* value_scales, float* tile_max, float* tile_sum, float* unit) {
  using P = typename Kind<Word>::Probability;
  constexpr int steps = Kind<Word>::kValueSteps;
  uint32_t* p = reinterpret_cast<uint32_t*>(s);
  int g0 = lo > first * 16 ? lo / 16 : first, g1 = (hi + 15) / 16;
  if (g1 > last) g1 = last;
  if (g0 >= g1) g0 = g1 = first;  // nothing visible
  float factor = scale * kLog2e;
  if (softcap > 0) {
    const F16 cap = set1(softcap), into = set1(scale / softcap);
    for (int g = g0; g < g1; ++g) store(s + g * 16, mul(cap, tanh(mul(load(s + g * 16), into))));
    factor = kLog2e;
  }
  const auto each = [&](auto body) __attribute__((always_inline)) {
    for (int g = g0; g < g1; ++g)
      if (g * 16 >= lo && g * 16 + 16 <= hi)
        body(g, AllLanes{});
      else
        body(g, lane_range(lo - g * 16, hi - g * 16));
  };
  F16 top = set1(kMinusInf), most = zero();
  each([&](int g, auto visible) __attribute__((always_inline)) {
    top = max(top, select(visible, load(s + g * 16), set1(kMinusInf)));
    if constexpr (Kind<Word>::kBytes) most = max(most, zero_unless(visible, load(value_scales + g * 16)));
  });
  F16 by_scale = zero();
  if constexpr (Kind<Word>::kBytes) {
    const float largest = hmax(most);
    by_scale = set1(kMaxProbability / (largest > 0 ? largest : 1.0f));
    *unit = largest / kMaxProbability;
  }
  const float peak = hmax(top) * factor;
  // Rows of the item that see nothing of this tile (a window's edge, keys to come) keep a finite exponent.
  const F16 shift = set1(peak == kMinusInf ? 0.0f : -peak), by = set1(factor);
  F16 sum = zero();
  for (int g = first; g < g0; ++g) store_probabilities(p + g * steps, zero(), P{});
  each([&](int g, auto visible) __attribute__((always_inline)) {
    const F16 e = zero_unless(visible, exp2(fma(load(s + g * 16), by, shift)));
    sum = add(sum, e);
    if constexpr (Kind<Word>::kBytes)
      store_probabilities(p + g * steps, mul(e, zero_unless(visible, mul(by_scale, load(value_scales + g * 16)))), P{});
    else
      store_probabilities(p + g * steps, e, P{});
  });
  for (int g = g1; g < last; ++g) store_probabilities(p + g * steps, zero(), P{});
  *tile_max = peak;
  *tile_sum = hsum(sum);
}

// (max, sum, out) of the tiles before, merged with one more tile.
PM_INLINE void merge_tile(float* max, float* sum, float* out, float tile_max, float tile_sum, const float* tile_out,
                          int padded) {
  const float top = tile_max > *max ? tile_max : *max;
  if (top == kMinusInf) return;  // NaN goes on, and stays in its row
  const float keep = exp2_scalar(*max - top), take = exp2_scalar(tile_max - top);
  *max = top;
  *sum = *sum * keep + tile_sum * take;
  for (int d = 0; d < padded; d += 16)
    store(out + d, fma(load(tile_out + d), set1(take), mul(load(out + d), set1(keep))));
}

// The keys of one tile that the rows of an item can see, and where their groups lie.
struct TileKeys {
  int start;        // position of the request's first query
  int base;         // position of the tile's first key
  int end;          // keys of the tile up to the newest query, or to the context's end
  int first, last;  // groups of the tile to read
  const uint32_t* keys[kTileGroups];

  TileKeys(const AttentionCall& call, const AttentionItem& item, int kv_head, int tile) {
    const AttentionLayer& layer = *call.layer;
    const AttentionBatch& batch = *call.batch;
    const int r = item.request, heads = layer.group_heads();
    start = batch.context_lens[r] - (batch.query_start[r + 1] - batch.query_start[r]);
    base = tile * kTile;
    const int first_query = start + item.row_begin / heads;
    const int last_query = start + (item.row_begin + item.row_count - 1) / heads;
    const int newest = layer.causal ? last_query + 1 : batch.context_lens[r];
    end = newest - base < kTile ? newest - base : kTile;
    const int oldest = layer.window ? first_query - layer.window + 1 - base : 0;
    first = oldest > 0 ? oldest / kGroup : 0;
    last = (end + kGroup - 1) / kGroup;
    const int per_block = layer.block_size / kGroup, first_group = base / kGroup + first;
    const int64_t block_bytes = layer.block_bytes(), group_words = layer.group_words();
    const int64_t head_words = kv_head * layer.head_words();
    const int32_t* table = batch.block_tables + r * batch.table_stride + first_group / per_block;
    int inside = first_group % per_block;
    for (int g = first; g < last; ++g) {
      keys[g] = reinterpret_cast<const uint32_t*>(call.cache + *table * block_bytes) + head_words + inside * group_words;
      if (++inside == per_block) inside = 0, ++table;
    }
  }
};

// One tile for the rows of an item: fills tile_max, tile_sum and tile_out. `next`: the tile that this thread reads
// afterwards. Blocks lie anywhere in memory, where the hardware does not see them coming; few rows pay for each miss.
template <class Word>
void attend_tile(const AttentionCall& call, const AttentionItem& item, const TileKeys& tile, const TileKeys& next,
                 const Scratch& at) {
  const AttentionLayer& layer = *call.layer;
  const int heads = layer.group_heads(), padded = layer.padded_dim(), steps = layer.key_steps();
  const int query_words = layer.query_words(), scales_at = layer.scales_at();
  constexpr int value_steps = Kind<Word>::kValueSteps;
  const int first = tile.first, last = tile.last, end = tile.end;
  const uint32_t* ahead[kTileGroups];
  for (int g = first; g < last; ++g) {
    const int other = g - first + next.first;
    ahead[g] = other < next.last ? next.keys[other] : tile.keys[g];
  }
  if constexpr (Kind<Word>::kBytes) {
    for (int g = first; g < last; ++g) {
      prefetch(ahead[g] + scales_at);
      const auto* scales = reinterpret_cast<const uint16_t*>(tile.keys[g] + scales_at);
      store(at.value_scales + g * kGroup, load_bf16(scales + kGroup));
    }
  }

  for (int row = 0; row < item.row_count; row += kMaxRows) {
    const int rows = item.row_count - row < kMaxRows ? item.row_count - row : kMaxRows;
    for (int g = first; g < last; g += kMaxCols) {
      const int cols = last - g < kMaxCols ? last - g : kMaxCols;
      with_count<kMaxRows>(rows, [&](auto r) {
        with_count<kMaxCols>(cols, [&](auto c) {
          score_block_at<Word, r, c>(at.query + row * query_words, query_words, at.start + row, tile.keys + g, steps,
                                     scales_at, at.scores + row * kTile + g * kGroup, ahead + g);
        });
      });
    }
    for (int i = row; i < row + rows; ++i) {
      const int own = tile.start + (item.row_begin + i) / heads + 1 - tile.base;  // keys up to the query itself
      const int seen = layer.causal ? own : tile.end;
      const int lo = layer.window ? seen - layer.window : 0;
      softmax_row<Word>(at.scores + i * kTile, first, last, lo > 0 ? lo : 0, seen < kTile ? seen : kTile,
                        at.query_scale[i], layer.softcap, at.value_scales, at.tile_max + i, at.tile_sum + i, at.unit + i);
    }
    const int in_last = end - (last - 1) * kGroup;
    const int last_steps = value_steps == kGroup ? in_last : (in_last + 1) / 2;
    const bool odd = value_steps != kGroup && in_last % 2;
    for (int d = 0; d < padded; d += 16 * kMaxCols) {
      const int cols = (padded - d) / 16 < kMaxCols ? (padded - d) / 16 : kMaxCols;
      const uint32_t *from[kTileGroups], *next_from[kTileGroups];
      const int at_dim = kGroup * steps + (Kind<Word>::kBytes ? d / 2 : d);
      for (int g = first; g < last; ++g) from[g] = tile.keys[g] + at_dim;
      for (int g = first; g < last; ++g) next_from[g] = ahead[g] + at_dim;
      with_count<kMaxRows>(rows, [&](auto r) {
        with_count<kMaxCols>(cols, [&](auto c) {
          value_block_at<Word, r, c>(reinterpret_cast<const uint32_t*>(at.scores) + row * kTile + first * value_steps,
                                         from + first, last - first, value_steps, last_steps, odd,
                                         layer.value_step_words(), at.unit + row, at.tile_out + row * padded + d, padded,
                                         next_from + first);
        });
      });
    }
  }
}

PM_INLINE void write_row(const AttentionCall& call, const AttentionItem& item, int kv_head, int row, const float* out,
                         float sum) {
  const AttentionLayer& layer = *call.layer;
  const int heads = layer.group_heads(), at = item.row_begin + row;
  const int64_t token = call.batch->query_start[item.request] + at / heads;
  float* to = call.out + token * call.out_stride + (kv_head * heads + at % heads) * layer.head_dim;
  const F16 scale = set1(1.0f / sum);
  for (int d = 0; d < layer.head_dim; d += 16) store(to + d, mul(load(out + d), scale), tail_mask(layer.head_dim - d));
}

template <class Word>
void stage_queries(const AttentionCall& call, const AttentionItem& item, int kv_head, const Scratch& at) {
  const AttentionLayer& layer = *call.layer;
  const int heads = layer.group_heads();
  for (int i = 0; i < item.row_count; ++i) {
    const int row = item.row_begin + i;
    const int64_t token = call.batch->query_start[item.request] + row / heads;
    const float* q = call.query + token * call.query_stride + (kv_head * heads + row % heads) * layer.head_dim;
    stage_query(at, i, q, layer, Word{});
  }
}

// What this thread reads after tile t of a head of an item.
PM_INLINE TileKeys keys_after(const AttentionCall& call, const AttentionItem& item, int kv_head, int t,
                              const AttentionItem* next) {
  if (t + 1 < item.tile_count) return TileKeys(call, item, kv_head, item.tile_begin + t + 1);
  if (kv_head + 1 < item.kv_head + item.head_count) return TileKeys(call, item, kv_head + 1, item.tile_begin);
  return next ? TileKeys(call, *next, next->kv_head, next->tile_begin) : TileKeys(call, item, kv_head, item.tile_begin);
}

template <class Word>
void attend(const AttentionCall& call, const AttentionItem& item, const AttentionItem* next, float* memory) {
  const int padded = call.layer->padded_dim();
  const int64_t slot_floats = kTileRows * (padded + 2);
  const Scratch at(memory, *call.layer);
  Scratch running = at;  // what a tile finds is what is known so far: the first one's
  running.tile_out = at.out, running.tile_max = at.max, running.tile_sum = at.sum;
  TileKeys tile(call, item, item.kv_head, item.tile_begin);
  for (int kv_head = item.kv_head; kv_head < item.kv_head + item.head_count; ++kv_head) {
    stage_queries<Word>(call, item, kv_head, at);
    for (int t = 0; t < item.tile_count; ++t) {
      const TileKeys after = keys_after(call, item, kv_head, t, next);
      attend_tile<Word>(call, item, tile, after, item.partial < 0 && t == 0 ? running : at);
      tile = after;
      if (item.partial >= 0) {
        float* slot = call.partials + (item.partial + t) * slot_floats;
        std::memcpy(slot, at.tile_max, sizeof(float) * kTileRows);
        std::memcpy(slot + kTileRows, at.tile_sum, sizeof(float) * kTileRows);
        std::memcpy(slot + 2 * kTileRows, at.tile_out, sizeof(float) * item.row_count * padded);
      } else if (t > 0) {
        for (int i = 0; i < item.row_count; ++i)
          merge_tile(at.max + i, at.sum + i, at.out + i * padded, at.tile_max[i], at.tile_sum[i],
                     at.tile_out + i * padded, padded);
      }
    }
    if (item.partial < 0)
      for (int i = 0; i < item.row_count; ++i) write_row(call, item, kv_head, i, at.out + i * padded, at.sum[i]);
  }
}

// The tiles of an item that was cut, in order of position: the same merges as in attend().
void attention_merge(const AttentionCall& call, const AttentionItem& item, float* memory) {
  const int padded = call.layer->padded_dim();
  const int64_t slot_floats = kTileRows * (padded + 2);
  for (int i = 0; i < item.row_count; ++i) {
    const float* slot = call.partials + item.partial * slot_floats;
    float max = slot[i], sum = slot[kTileRows + i], *out = memory;
    std::memcpy(out, slot + 2 * kTileRows + i * padded, sizeof(float) * padded);
    for (int t = 1; t < item.tile_count; ++t) {
      slot += slot_floats;
      merge_tile(&max, &sum, out, slot[i], slot[kTileRows + i], slot + 2 * kTileRows + i * padded, padded);
    }
    write_row(call, item, item.kv_head, i, out, sum);
  }
}

void attention_item(const AttentionCall& call, const AttentionItem& item, const AttentionItem* next, float* memory) {
  switch (call.layer->type) {
    case KvType::kBf16: return attend<Bf16Word>(call, item, next, memory);
    case KvType::kF32: return attend<F32Word>(call, item, next, memory);
    case KvType::kI8: return attend<I8Word>(call, item, next, memory);
  }
}

}  // namespace

extern const AttentionTable attention_table;
const AttentionTable attention_table = {attention_item, attention_merge};

}  // namespace pm::PM_ISA
