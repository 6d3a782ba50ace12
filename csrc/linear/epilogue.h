// From a tile's raw sums to what is stored: scales, bias, gate, residual.
#pragma once

#include "isa/vec.h"
#include "linear/linear.h"
#include "linear/tile.h"

namespace pm::PM_ISA {

constexpr int kVectors = kPanel / kLanes;  // of a panel's row

// Everything of a row stays in registers: short enough that several rows are under way at once.
#define PM_ALWAYS __attribute__((always_inline))

// f(r, v) for each of the tile's rows, which are rows first + r of x: v [kVectors] are the outputs of the panel at packed
// column `column`. K says how they come from the raw sums: K(row of x).value(sums) without the column's scale;
// K::kColumnScale whether there is one.
template <class K, bool kBias, class F>
PM_ALWAYS inline void for_outputs(const LinearArgs& args, const float* tile, int64_t first, int rows, int64_t column, F f) {
  const float* scale_at = args.w->column_scale.as<float>() + column;
  const float* bias = kBias ? args.w->bias.as<float>() + column : nullptr;
  F32 scale[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) scale[i] = K::kColumnScale ? load(scale_at + i * kLanes) : zero_f32();
  const std::byte* x = args.x.row(first);
  for (int r = 0; r < rows; ++r, x += args.x.row_bytes) {
    const K kind(x);
    F32 v[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      v[i] = kind.value(load(tile + r * kPanel + i * kLanes));
      if constexpr (K::kColumnScale) v[i] = v[i] * scale[i];
      if constexpr (kBias) v[i] = v[i] + load(bias + i * kLanes);
    }
    f(r, v);
  }
}

template <class K, class F>
PM_ALWAYS inline void for_outputs(const LinearArgs& args, const float* tile, int64_t first, int rows, int64_t column, F f) {
  if (args.w->bias_or_null() != nullptr) {
    for_outputs<K, true>(args, tile, first, rows, column, f);
  } else {
    for_outputs<K, false>(args, tile, first, rows, column, f);
  }
}

// The first `columns` of a row, stored or added.
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

PM_ALWAYS inline void store_vectors(float* to, const F32 (&v)[kVectors]) {
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) store(to + i * kLanes, v[i]);
}

// act(gate) * up of a panel's row. Gated columns are 8 gates, then the 8 ups of the same features, and so on, so that
// every vector width finds a feature's two sums within one tile.
template <class Act>
PM_ALWAYS inline void store_gated(float* to, const F32 (&v)[kVectors], Act act) {
#if defined(PM_ISA_IS_AVX512) || defined(PM_ISA_IS_AVX512BF16)
  store(to, act(low_halves(v[0], v[1])) * high_halves(v[0], v[1]));
#else
#pragma GCC unroll 8
  for (int c = 0; c < kPanel; c += 16) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += kLanes) {
      store(to + c / 2 + i, act(v[(c + i) / kLanes]) * v[(c + 8 + i) / kLanes]);
    }
  }
#endif
}

// Takes a panel's row of logits into what is known of the row; `step`: of its first sixteen columns.
inline void note_best(RowBest& best, const float* row, float step) {
  bool any = false;
  for (int c = 0; c < kPanel; c += kLanes) {
    const F32 v = load(row + c);
    any |= any_at_least(v, load(best.value + c % 16));
    store(best.taint + c % 16, fma(v, zero_f32(), load(best.taint + c % 16)));
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

// Turns the raw sums of `rows` rows of x, from `first` on, and of the panel at packed column `column` into outputs: of
// logits whose best are looked for.
template <class K>
void finish_logits(const LinearArgs& args, float* tile, int64_t first, int rows, int64_t column) {
  const int64_t left = args.w->n - column, columns = left < kPanel ? left : kPanel;
  for_outputs<K>(args, tile, first, rows, column, [&](int r, const F32(&v)[kVectors]) PM_ALWAYS {
    float* row = tile + r * kPanel;
    store_vectors(row, v);
    if (args.kept[first + r]) store_row(args.out + (first + r) * args.ldo + column, row, columns, false);
    for (int64_t c = columns; c < kPanel; ++c) row[c] = row[0];  // never better than column 0
    note_best(args.best[first + r], row, static_cast<float>(column / 16));
  });
}

// As finish_logits, of everything else.
template <class K>
void finish_tile(const LinearArgs& args, float* tile, int64_t first, int rows, int64_t column) {
  const PackedLinear& w = *args.w;
  const int64_t out_column = w.gated ? column / 2 : column, wanted = w.gated ? kPanel / 2 : kPanel;
  const int64_t left = w.n - out_column, columns = left < wanted ? left : wanted;
  if (columns <= 0) return;
  float* out = args.out + first * args.ldo + out_column;
  // By way of the tile, where the panel is not whole or gated outputs are added.
  const bool direct = columns == wanted && !(w.gated && args.accumulate);
  float* to = direct ? out : tile;
  const int64_t stride = direct ? args.ldo : kPanel;
  if (w.gated && args.gate == Gate::silu) {
    for_outputs<K>(args, tile, first, rows, column, [&](int r, const F32(&v)[kVectors]) PM_ALWAYS {
      store_gated(to + r * stride, v, [](F32 x) PM_ALWAYS { return silu_f32(x); });
    });
  } else if (w.gated) {
    for_outputs<K>(args, tile, first, rows, column, [&](int r, const F32(&v)[kVectors]) PM_ALWAYS {
      store_gated(to + r * stride, v, [](F32 x) PM_ALWAYS { return gelu_tanh_f32(x); });
    });
  } else if (direct && args.accumulate) {
    for_outputs<K>(args, tile, first, rows, column, [&](int r, const F32(&v)[kVectors]) PM_ALWAYS {
      float* at = out + r * args.ldo;
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) store(at + i * kLanes, load(at + i * kLanes) + v[i]);
    });
  } else {
    for_outputs<K>(args, tile, first, rows, column,
                   [&](int r, const F32(&v)[kVectors]) PM_ALWAYS { store_vectors(to + r * stride, v); });
  }
  if (direct) return;
  for (int r = 0; r < rows; ++r) store_row(out + r * args.ldo, tile + r * kPanel, columns, args.accumulate);
}

#undef PM_ALWAYS

struct FinishFloat {  // f32, bf16
  static constexpr bool kColumnScale = false;
  explicit FinishFloat(const std::byte*) {}
  F32 value(F32 sum) const { return sum; }
};

struct FinishInt8 {
  static constexpr bool kColumnScale = true;
  const TokenHead* head;
  explicit FinishInt8(const std::byte* row) : head(reinterpret_cast<const TokenHead*>(row)) {}
  // Packed weights are w + 128.
  F32 value(F32 sum) const { return to_f32(sub(as_i32(sum), splat_i32(head->sum128))) * splat(head->scale); }
};

struct FinishGroup {
  static constexpr bool kColumnScale = true;
  explicit FinishGroup(const std::byte*) {}
  F32 value(F32 sum) const { return sum; }
};

}  // namespace pm::PM_ISA
