// From a tile's raw sums to what is stored: scales, bias, gate, residual.
#pragma once

#include "isa/vec.h"
#include "linear/linear.h"
#include "linear/tile.h"

namespace pm::PM_ISA {

// Gated columns are 8 gates, then the 8 ups of the same features, and so on, so that every vector width finds a feature's
// two sums within one tile. value(c) is the vector of results from column c on; writes act(gate) * up to `row`, which may
// be where the values come from.
template <class Value, class Act>
inline void gate_row(float* row, Value value, Act act) {
#if defined(PM_ISA_IS_AVX512) || defined(PM_ISA_IS_AVX512BF16)
  for (int c = 0; c < kPanel; c += 32) {
    const F32 first = value(c), second = value(c + 16);
    store(row + c / 2, act(low_halves(first, second)) * high_halves(first, second));
  }
#else
  for (int c = 0; c < kPanel; c += 16) {
    for (int i = 0; i < 8; i += kLanes) store(row + c / 2 + i, act(value(c + i)) * value(c + 8 + i));
  }
#endif
}

inline void store_row(float* out, const float* row, int64_t columns, bool accumulate) {
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    F32 v = load(row + c);
    if (accumulate) v = load(out + c) + v;
    store(out + c, v);
  }
  if (const int rest = static_cast<int>(columns - c); rest > 0) {
    F32 v = load(row + c);
    if (accumulate) v = load_part(out + c, rest) + v;
    store_part(out + c, v, rest);
  }
}

// The outputs of the packed columns from `column` on, of which `sums` and `scale` are; K as in finish_tile.
template <class K>
inline F32 column_value(const K& kind, const float* sums, const float* scale, const float* bias, int64_t column) {
  F32 v = kind.value(load(sums));
  if constexpr (K::kColumnScale) v = v * load(scale);
  return bias != nullptr ? v + load(bias + column) : v;
}

// Takes a panel's row of logits into what is known of the row; `step`: of its first sixteen columns.
inline void look(RowBest& best, const float* row, float step) {
  bool any = false;
  for (int c = 0; c < kPanel; c += kLanes) {
    const F32 v = load(row + c);
    any |= any_at_least(v, load(best.value + c % 16));
    store(best.sound + c % 16, fma(v, zero_f32(), load(best.sound + c % 16)));
  }
  if (!any) return;  // the rule, after a few panels
  for (int half = 0; half < kPanel / 16; ++half) {
    const float here = step + static_cast<float>(half);
    for (int lane = 0; lane < 16; ++lane) {  // a rank that helps another goes back, so that equals may come in any order
      const float v = row[half * 16 + lane];
      const bool better = v > best.value[lane] || (v == best.value[lane] && here < best.step[lane]);
      best.value[lane] = better ? v : best.value[lane];
      best.step[lane] = better ? here : best.step[lane];
    }
  }
}

// As finish_tile, for logits.
template <class K>
void finish_logits(const LinearArgs& args, float* tile, int64_t first, int rows, int64_t column) {
  const PackedLinear& w = *args.w;
  const float* scale = w.column_scale.as<float>() + column;
  const float* bias = w.bias_or_null();
  const int64_t columns = w.n - column < kPanel ? w.n - column : kPanel;
  for (int64_t i = first; i < first + rows; ++i) {
    float* row = tile + (i - first) * kPanel;
    const K kind(args.x.row(i));
    for (int c = 0; c < kPanel; c += kLanes) store(row + c, column_value(kind, row + c, scale + c, bias, column + c));
    if (args.kept[i]) store_row(args.out + i * args.ldo + column, row, columns, false);
    for (int64_t c = columns; c < kPanel; ++c) row[c] = row[0];  // never better than column 0
    look(args.best[i], row, static_cast<float>(column / 16));
  }
}

// Turns the raw sums of `rows` rows of x, from `first` on, and of the panel at packed column `column` into outputs.
// K says how: K::value(sums, row_of_x) without the column's scale; kColumnScale whether there is one.
template <class K>
void finish_tile(const LinearArgs& args, float* tile, int64_t first, int rows, int64_t column) {
  const PackedLinear& w = *args.w;
  const float* scale = w.column_scale.as<float>() + column;
  const float* bias = w.bias_or_null();
  const int64_t out_column = w.gated ? column / 2 : column;
  const int64_t left = w.n - out_column, wanted = w.gated ? kPanel / 2 : kPanel;
  const int64_t out_columns = left < wanted ? left : wanted;
  if (out_columns <= 0) return;
  const bool direct = out_columns == wanted && !(w.gated && args.accumulate);
  for (int r = 0; r < rows; ++r) {
    float* row = tile + r * kPanel;
    float* out = args.out + (first + r) * args.ldo + out_column;
    float* to = direct ? out : row;
    const K kind(args.x.row(first + r));
    const auto value = [&](int c) { return column_value(kind, row + c, scale + c, bias, column + c); };
    if (w.gated) {
      if (args.gate == Gate::silu) {
        gate_row(to, value, [](F32 x) { return silu_f32(x); });
      } else {
        gate_row(to, value, [](F32 x) { return gelu_tanh_f32(x); });
      }
    } else if (direct && args.accumulate) {
      for (int c = 0; c < kPanel; c += kLanes) store(out + c, load(out + c) + value(c));
    } else {
      for (int c = 0; c < kPanel; c += kLanes) store(to + c, value(c));
    }
    if (!direct) store_row(out, row, out_columns, args.accumulate);
  }
}

struct FinishFloat {  // f32, bf16
  static constexpr bool kColumnScale = false;
  explicit FinishFloat(const std::byte*) {}
  F32 value(F32 sum) const { return sum; }
};

struct FinishInt8 {
  static constexpr bool kColumnScale = true;
  F32 scale;
  I32 offset;  // packed weights are w + 128: takes 128 * (sum of the row) out again
  explicit FinishInt8(const std::byte* row) {
    TokenHead head;
    std::memcpy(&head, row, sizeof head);
    scale = splat(head.scale);
    offset = splat_i32((128 - kW8Offset) * head.sum);
  }
  F32 value(F32 sum) const { return to_f32(sub(as_i32(sum), offset)) * scale; }
};

struct FinishGroup {
  static constexpr bool kColumnScale = true;
  explicit FinishGroup(const std::byte*) {}
  F32 value(F32 sum) const { return sum; }
};

}  // namespace pm::PM_ISA
