// The attention main loops. See ops/attention.h for the layout and the order of the arithmetic.
#include <cstring>
#include <utility>

#include "core/team.h"
#include "ops/attention_softmax.h"

namespace pm::PM_ISA {
namespace {

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
    if constexpr (R <= kDecodeRows) (prefetch_second_level(next[Gs] + step * 16), ...);
    const auto row_step = [&](auto row) __attribute__((always_inline)) {
      const Word b = broadcast(q + row * q_stride + step, Word{});
      ((acc[row * G + Gs] = dot(acc[row * G + Gs], w[Gs], b)), ...);
    };
    (row_step(std::integral_constant<int, Rs>{}), ...);
  }
  const F32x16 scales[G] = {Kind<Word>::key_scales(k[Gs] + scales_at)...};
  const auto store_row = [&](auto row) __attribute__((always_inline)) {
    ((store(s + row * kTile + Gs * 16, Kind<Word>::scores(acc[row * G + Gs], scales[Gs]))), ...);
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
        ((Cs * kWords % 16 ? void() : prefetch_second_level(next[g] + step * step_words + Cs * kWords)), ...);
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
PM_INLINE void stage_bytes(const Scratch& at, int row, const AttentionLayer& layer, const Bytes& bytes) {
  at.start[row] = -kKeyBias * bytes.sum;
  at.query_scale[row] = layer.scale * bytes.scale;
}
PM_INLINE int8_t* query_bytes(const Scratch& at, int row, const AttentionLayer& layer) {
  return reinterpret_cast<int8_t*>(at.query + row * layer.query_words());
}
PM_INLINE void stage_query(const Scratch& at, int row, const float* from, const AttentionLayer& layer, I8Word) {
  stage_bytes(at, row, layer, turned_to_bytes(layer, from, false, query_bytes(at, row, layer), at.scores));
}

// Every row of an item in one KV head: f(row, where its token and head begin in an array [tokens][stride]).
template <class F>
PM_INLINE void each_row(const AttentionCall& call, const AttentionItem& item, int kv_head, int64_t stride, F f) {
  const int heads = call.layer->group_heads();
  int query = item.row_begin / heads, head = item.row_begin % heads;
  for (int row = 0; row < item.row_count; ++row) {
    const int64_t token = item.members == nullptr ? call.batch->query_start[item.request] + query
                                                  : call.batch->query_start[item.members[query]];
    f(row, token * stride + (kv_head * heads + head) * call.layer->head_dim);
    if (++head == heads) head = 0, ++query;
  }
}

// The lines of an item's rows, all its heads', in an array [tokens][stride].
template <class F>
PM_INLINE void each_line(const AttentionCall& call, const AttentionItem& item, const float* base, int64_t stride, F f) {
  for (int kv_head = item.kv_head; kv_head < item.kv_head + item.head_count; ++kv_head)
    each_row(call, item, kv_head, stride, [&](int, int64_t place) __attribute__((always_inline)) {
      for (int d = 0; d < call.layer->head_dim; d += 16) f(base + place + d);
    });
}

// The rows' queries, as the keys want to meet them.
template <class Word>
PM_INLINE void stage_queries(const AttentionCall& call, const AttentionItem& item, int kv_head, const Scratch& at) {
  const AttentionLayer& layer = *call.layer;
  const float* from[kTileRows];
  each_row(call, item, kv_head, call.query_stride,
           [&](int row, int64_t place) __attribute__((always_inline)) { from[row] = call.query + place; });
  int row = 0;
  if constexpr (Kind<Word>::kBytes) {
    if (layer.head_dim == 64) {
      for (; row + 2 <= item.row_count; row += 2) {
        Bytes found[2];
        turned_registers<4, 2>({from[row], from[row + 1]}, false,
                               {query_bytes(at, row, layer), query_bytes(at, row + 1, layer)}, found);
        stage_bytes(at, row, layer, found[0]);
        stage_bytes(at, row + 1, layer, found[1]);
      }
    }
  }
  for (; row < item.row_count; ++row) stage_query(at, row, from[row], layer, Word{});
}

// A run of tiles that some rows of an item walk together: row_count of `request`'s, from its row_begin on, which are
// the item's from `row` on.
struct Walk {
  int request, row_begin, row, row_count, tile, tile_end;
};

// An item's walks: one, or the tiles that its members share and then each member's own. What is shared lies before every
// member's query: there a member's rows see what later queries of the first would.
PM_INLINE int num_walks(const AttentionCall& call, const AttentionItem& item) {
  return item.members == nullptr ? 1 : 1 + item.row_count / call.layer->group_heads();
}
PM_INLINE Walk walk_of(const AttentionCall& call, const AttentionItem& item, int i) {
  if (item.members == nullptr)
    return {item.request, item.row_begin, 0, item.row_count, item.tile_begin, item.tile_begin + item.tile_count};
  if (i == 0) return {item.request, 0, 0, item.row_count, 0, item.shared_tiles};
  const int heads = call.layer->group_heads(), request = item.members[i - 1];
  const int tiles = (call.batch->context_lens[request] - 1) / kTile + 1;
  return {request, 0, (i - 1) * heads, heads, item.shared_tiles, tiles};
}

// The positions [oldest, newest) that the rows of a walk can see; oldest may lie before 0.
struct Reach {
  int start;  // position of the request's first query
  int oldest, newest;

  Reach(const AttentionCall& call, const Walk& walk) {
    const AttentionLayer& layer = *call.layer;
    const AttentionBatch& batch = *call.batch;
    const int r = walk.request, heads = layer.group_heads();
    start = batch.context_lens[r] - (batch.query_start[r + 1] - batch.query_start[r]);
    oldest = layer.window ? start + walk.row_begin / heads - layer.window + 1 : 0;
    newest = layer.causal ? start + (walk.row_begin + walk.row_count - 1) / heads + 1 : batch.context_lens[r];
  }
};

// The keys of one tile that the rows of a walk can see.
struct TileKeys {
  int start;        // position of the request's first query
  int base;         // position of the tile's first key
  int end;          // keys of the tile up to the newest query, or to the context's end
  int first, last;  // groups of the tile to read

  TileKeys(const AttentionCall& call, const Walk& walk, int tile) {
    const Reach reach(call, walk);
    start = reach.start;
    base = tile * kTile;
    end = reach.newest - base < kTile ? reach.newest - base : kTile;
    first = reach.oldest > base ? (reach.oldest - base) / kGroup : 0;
    last = (end + kGroup - 1) / kGroup;
  }
};

// Where the groups lie that a thread reads, from an item's first on and through the items up to `end`, in the order of the
// walks. Blocks lie anywhere in memory, where the hardware does not see them coming: what is read kAhead groups later is
// fetched while a group is in work.
class GroupStream {
 public:
  static constexpr int kAhead = kTileGroups;

  explicit GroupStream(const AttentionCall& call)
      : call_(call), per_block_(call.layer->block_size / kGroup), block_bytes_(call.layer->block_bytes()),
        group_bytes_(call.layer->group_words() * 4) {}

  // Makes `item` the one that is read: it is already where it follows the item before, unless the stream ended there.
  void read(const AttentionItem* item, const AttentionItem* end) {
    if (item != reading_ || item == end_) {
      known_ = 0;
      item_ = item, end_ = end;
      begin_item();
    }
    reading_ = item + 1;  // from its last group on
  }

  // The next `groups` groups, at most kTileGroups, and the kAhead after those.
  const uint32_t* const* look(int groups) {
    for (; known_ < groups + kAhead; ++known_) window_[known_] = item_ == end_ ? window_[0] : take();
    return window_;
  }
  void pass(int groups) {
    known_ -= groups;
    for (int i = 0; i < kAhead; ++i) window_[i] = window_[i + groups];
  }

 private:
  const uint32_t* take() {
    const auto* group = reinterpret_cast<const uint32_t*>(head_ + *table_ * block_bytes_ + inside_ * group_bytes_);
    if (--left_ == 0) {
      next_walk();
    } else if (++inside_ == per_block_) {
      inside_ = 0, ++table_;
    }
    return group;
  }
  void begin_item() {
    walks_ = num_walks(call_, *item_);
    walk_ = 0, kv_head_ = item_->kv_head;
    begin_walk();
  }
  void begin_walk() {
    const AttentionLayer& layer = *call_.layer;
    const AttentionBatch& batch = *call_.batch;
    const Walk walk = walk_of(call_, *item_, walk_);
    const Reach reach(call_, walk);
    const int begin = reach.oldest > walk.tile * kTile ? reach.oldest / kGroup : walk.tile * kTileGroups;
    const int most = walk.tile_end * kTileGroups, last = (reach.newest + kGroup - 1) / kGroup;
    left_ = (last < most ? last : most) - begin;
    head_ = call_.cache + kv_head_ * layer.head_words() * 4;
    inside_ = begin % per_block_;
    table_ = batch.block_tables + walk.request * batch.table_stride + begin / per_block_;
  }
  void next_walk() {
    if (++walk_ < walks_) {
      begin_walk();
    } else if (walk_ = 0; ++kv_head_ < item_->kv_head + item_->head_count) {
      begin_walk();
    } else if (++item_ != end_) {
      begin_item();
    }
  }

  const AttentionCall& call_;
  const int per_block_;
  const int64_t block_bytes_, group_bytes_;
  const AttentionItem *reading_ = nullptr, *item_ = nullptr, *end_ = nullptr;
  int walks_ = 1, walk_ = 0, kv_head_ = 0;
  int left_ = 0, inside_ = 0;  // groups of the walk to come, and which of its block the next one is
  const uint8_t* head_ = nullptr;
  const int32_t* table_ = nullptr;
  const uint32_t* window_[kTileGroups + kAhead];
  int known_ = 0;
};

// One tile for the rows of a walk: fills tile_max, tile_sum and tile_out. Few rows fetch ahead as they go: they would pay
// for each miss.
template <class Word>
void attend_tile(const AttentionCall& call, const Walk& walk, const TileKeys& tile, const uint32_t* const* keys,
                 const Scratch& at) {
  const AttentionLayer& layer = *call.layer;
  const int heads = layer.group_heads(), padded = layer.padded_dim(), steps = layer.key_steps();
  const int query_words = layer.query_words(), scales_at = layer.scales_at();
  constexpr int value_steps = Kind<Word>::kValueSteps;
  const int first = tile.first, last = tile.last, end = tile.end;
  const uint32_t* const* ahead = keys + GroupStream::kAhead;
  Steps all;  // of rows that see every key up to `end`
  if constexpr (Kind<Word>::kBytes) {
    F32x16 most = zero();
    for (int g = first; g < last; ++g) {
      prefetch_second_level(ahead[g - first] + scales_at);
      const F32x16 scales = load_bf16(reinterpret_cast<const uint16_t*>(keys[g - first] + scales_at) + kGroup);
      store(at.value_scales + g * kGroup, scales);
      most = max(most, zero_unless(tail_mask(end - g * kGroup), scales));
    }
    all = Steps(hmax(most));
    for (int g = first; g < last; ++g)
      store(at.weights + g * kGroup, mul(set1(all.in_one), load(at.value_scales + g * kGroup)));
  }

  for (int row = 0; row < walk.row_count; row += kMaxRows) {
    const int rows = walk.row_count - row < kMaxRows ? walk.row_count - row : kMaxRows;
    for (int g = first; g < last; g += kMaxCols) {
      const int cols = last - g < kMaxCols ? last - g : kMaxCols;
      with_count<kMaxRows>(rows, [&](auto r) {
        with_count<kMaxCols>(cols, [&](auto c) {
          score_block_at<Word, r, c>(at.query + row * query_words, query_words, at.start + row, keys + g - first, steps,
                                     scales_at, at.scores + row * kTile + g * kGroup, ahead + g - first);
        });
      });
    }
    const auto seen_by = [&](int i) __attribute__((always_inline)) {
      const int own = tile.start + (walk.row_begin + i) / heads + 1 - tile.base;  // keys up to the query itself
      const int hi = layer.causal ? own : tile.end, lo = layer.window ? hi - layer.window : 0;
      return Seen(first, last, lo > 0 ? lo : 0, hi < kTile ? hi : kTile);
    };
    const auto sees_all = [&](const Seen& seen) { return seen.lo <= first * kGroup && seen.hi >= end; };
    for (int i = row; i < row + rows; ++i) {
      const Seen seen = seen_by(i);
      find_peak<Word>(layer, at, i, seen, sees_all(seen) ? &all : nullptr);
    }
    for (int i = row; i < row + rows; ++i) {
      const Seen seen = seen_by(i);
      if (sees_all(seen))
        write_probabilities<Word, true>(layer, at, i, seen);
      else
        write_probabilities<Word, false>(layer, at, i, seen);
    }
    const int in_last = end - (last - 1) * kGroup;
    const int last_steps = value_steps == kGroup ? in_last : (in_last + 1) / 2;
    const bool odd = value_steps != kGroup && in_last % 2;
    for (int d = 0; d < padded; d += 16 * kMaxCols) {
      const int cols = (padded - d) / 16 < kMaxCols ? (padded - d) / 16 : kMaxCols;
      const uint32_t *from[kTileGroups], *next_from[kTileGroups];
      const int at_dim = kGroup * steps + (Kind<Word>::kBytes ? d / 2 : d);
      for (int i = 0; i < last - first; ++i) from[i] = keys[i] + at_dim;
      for (int i = 0; i < last - first; ++i) next_from[i] = ahead[i] + at_dim;
      with_count<kMaxRows>(rows, [&](auto r) {
        with_count<kMaxCols>(cols, [&](auto c) {
          value_block_at<Word, r, c>(reinterpret_cast<const uint32_t*>(at.scores) + row * kTile + first * value_steps,
                                         from, last - first, value_steps, last_steps, odd,
                                         layer.value_step_words(), at.unit + row, at.tile_out + row * padded + d, padded,
                                         next_from);
        });
      });
    }
  }
}

PM_INLINE void write_rows(const AttentionCall& call, const AttentionItem& item, int kv_head, const float* out,
                          const float* sum) {
  const int dim = call.layer->head_dim, padded = call.layer->padded_dim();
  each_row(call, item, kv_head, call.out_stride, [&](int row, int64_t place) __attribute__((always_inline)) {
    const F32x16 scale = set1(1.0f / sum[row]);
    for (int d = 0; d < dim; d += 16)
      store(call.out + place + d, mul(load(out + row * padded + d), scale), tail_mask(dim - d));
  });
}

template <class Word>
void attend(const AttentionCall& call, const AttentionItem& item, const AttentionItem* next, GroupStream& stream,
            float* memory) {
  const AttentionLayer& layer = *call.layer;
  const int padded = layer.padded_dim();
  const int64_t slot_floats = kTileRows * (padded + 2);
  const Scratch all(memory, layer);
  if (item.partial < 0) each_line(call, item, call.out, call.out_stride, [](const float* p) { prefetch_to_write(p); });
  if (next) each_line(call, *next, call.query, call.query_stride, [](const float* p) { prefetch(p); });
  const int first_tile = walk_of(call, item, 0).tile;
  for (int kv_head = item.kv_head; kv_head < item.kv_head + item.head_count; ++kv_head) {
    stage_queries<Word>(call, item, kv_head, all);
    for (int w = 0; w < num_walks(call, item); ++w) {
      const Walk walk = walk_of(call, item, w);
      const Scratch at = all.from(walk.row, layer);
      for (int t = walk.tile; t < walk.tile_end; ++t) {
        Scratch found = at;
        if (item.partial < 0 && t == first_tile)  // what a tile finds is what is known so far
          found.tile_out = at.out, found.tile_max = at.max, found.tile_sum = at.sum;
        const TileKeys tile(call, walk, t);
        attend_tile<Word>(call, walk, tile, stream.look(tile.last - tile.first), found);
        stream.pass(tile.last - tile.first);
        if (item.partial >= 0) {
          float* slot = call.partials + (item.partial + t - first_tile) * slot_floats;
          std::memcpy(slot, at.tile_max, sizeof(float) * kTileRows);
          std::memcpy(slot + kTileRows, at.tile_sum, sizeof(float) * kTileRows);
          std::memcpy(slot + 2 * kTileRows, at.tile_out, sizeof(float) * item.row_count * padded);
        } else if (t > first_tile) {
          merge_tile(at.max, at.sum, at.out, at.tile_max, at.tile_sum, at.tile_out, walk.row_count, padded);
        }
      }
    }
    if (item.partial < 0) write_rows(call, item, kv_head, all.out, all.sum);
  }
}

// The tiles of an item that was cut, in order of position: the same merges as in attend().
void attention_merge(const AttentionCall& call, const AttentionItem& item, float* memory) {
  const int padded = call.layer->padded_dim(), rows = item.row_count;
  const int64_t slot_floats = kTileRows * (padded + 2);
  const Scratch at(memory, *call.layer);
  const float* slot = call.partials + item.partial * slot_floats;
  std::memcpy(at.max, slot, sizeof(float) * kTileRows);
  std::memcpy(at.sum, slot + kTileRows, sizeof(float) * kTileRows);
  std::memcpy(at.out, slot + 2 * kTileRows, sizeof(float) * rows * padded);
  for (int t = 1; t < item.tile_count; ++t) {
    slot += slot_floats;
    merge_tile(at.max, at.sum, at.out, slot, slot + kTileRows, slot + 2 * kTileRows, rows, padded);
  }
  write_rows(call, item, item.kv_head, at.out, at.sum);
}

template <class Word>
void attend_all(Team& team, const AttentionCall& call, const AttentionItem* items, int64_t n, float* memory) {
  const int64_t own_end = team.end_of_share(n);
  GroupStream stream(call);
  team.for_each(n, [&](int64_t i) {
    const AttentionItem* end = items + (i < own_end ? own_end : n);  // of what this thread may take next
    stream.read(items + i, end);
    attend<Word>(call, items[i], items + i + 1 == end ? nullptr : items + i + 1, stream, memory);
  });
}

void attention_items(Team& team, const AttentionCall& call, const AttentionItem* items, int64_t n, float* memory) {
  switch (call.layer->type) {
    case KvType::kBf16: return attend_all<Bf16Word>(team, call, items, n, memory);
    case KvType::kF32: return attend_all<F32Word>(team, call, items, n, memory);
    case KvType::kI8: return attend_all<I8Word>(team, call, items, n, memory);
  }
}

}  // namespace

extern const AttentionTable attention_table;
const AttentionTable attention_table = {attention_items, attention_merge};

}  // namespace pm::PM_ISA
