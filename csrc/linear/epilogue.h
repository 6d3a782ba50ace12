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
    const auto value = [&](int c) {
      F32 v = kind.value(load(row + c));
      if constexpr (K::kColumnScale) v = v * load(scale + c);
      return bias != nullptr ? v + load(bias + column + c) : v;
    };
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
