// The packed layout, one for all instruction sets.
//
//   panel p = packed columns 16 p .. 16 p + 15 (a column is an output; gated: see packed_column)
//
//   data [panel][step][64 bytes]              a step's 64 bytes, lane by lane (lane = column of the panel)
//     f32     step = 1 k      float           [lane]
//     bf16    step = 2 k      bfloat16        [lane][2]
//     int8    step = 4 k      w + 128         [lane][4]
//     group8  8 steps a group of 32, as int8: q, or q - zero + 128
//     group4  4 steps a group of 32: 8 k; byte [lane][j] = q[k + j] | q[k + 4 + j] << 4
//
//   scales [panel][group][scale 16 lanes, min 16 lanes] float16, of group kinds
//
// One column after another along the lanes, 4 bytes of k each, is the operand of the integer and bf16 dot products; the
// activations' 4 bytes are broadcast. A 256-bit kernel takes half a step, a 128-bit one a quarter.
#include "linear/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/team.h"
#include "linear/half.h"

namespace pm {
namespace {

constexpr int64_t kPanel = 16, kStepBytes = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where source row i lands. Gated: feature f's gate in lane f % 8 and its up in lane 8 + f % 8 of panel f / 8.
int64_t packed_column(const PackedLinear& w, int64_t i) {
  if (!w.gated) return i;
  const int64_t feature = i < w.n ? i : i - w.n;
  return feature / 8 * kPanel + feature % 8 + (i < w.n ? 0 : 8);
}

float source_value(const FloatRows& rows, int64_t row, int64_t k) {
  const int64_t at = row * rows.ld + k;
  switch (rows.type) {
    case SourceType::f32: return static_cast<const float*>(rows.data)[at];
    case SourceType::f16: return half_to_float(static_cast<const uint16_t*>(rows.data)[at]);
    case SourceType::bf16: return bf16_to_float(static_cast<const uint16_t*>(rows.data)[at]);
  }
  return 0;
}

// The byte of value k of packed column c, for kinds with `bytes` per value and `per_step` values per step.
std::byte* at(PackedLinear& w, int64_t c, int64_t k, int64_t per_step, int64_t bytes) {
  return w.data.as<std::byte>() + c / kPanel * w.panel_bytes + k / per_step * kStepBytes + c % kPanel * 4 +
         k % per_step * bytes;
}

uint8_t* nibble_at(PackedLinear& w, int64_t c, int64_t k) {
  return w.data.as<uint8_t>() + c / kPanel * w.panel_bytes + k / 8 * kStepBytes + c % kPanel * 4 + k % 4;
}

uint16_t* scale_at(PackedLinear& w, int64_t c, int64_t group) {
  return w.scales.as<uint16_t>() + c / kPanel * w.scale_panel_halves + group * kPanel * (w.has_min ? 2 : 1) + c % kPanel;
}

void check_rows(const PackedLinear& w, int64_t first, int64_t count) {
  const int64_t rows = w.gated ? 2 * w.n : w.n;
  if (first < 0 || count < 0 || first + count > rows) {
    throw std::invalid_argument("rows " + std::to_string(first) + " .. " + std::to_string(first + count) +
                                " are outside the packed matrix of " + std::to_string(rows) + " rows");
  }
}

void check_kind(bool right, const char* what) {
  if (!right) throw std::invalid_argument(std::string("this packed matrix does not take ") + what);
}

template <class F>
void for_rows(int64_t count, F&& f) {
  constexpr int64_t kChunk = 16;
  parallel([&](Team& team) {
    team.for_each(ceil_div(count, kChunk), [&](int64_t task) {
      for (int64_t i = task * kChunk; i < std::min(count, (task + 1) * kChunk); ++i) f(i);
    });
  });
}

// A power of two that brings the largest scale of a column just below 2^15, the top of float16: then all of float16's
// range below is left for the small ones.
float column_power(const float* scale, const float* min, int64_t groups) {
  float most = 0;
  for (int64_t g = 0; g < groups; ++g) {
    most = std::max(most, std::fabs(scale[g]));
    if (min != nullptr) most = std::max(most, std::fabs(min[g]));
  }
  if (!(most > 0) || !std::isfinite(most)) return 1.0f;
  int exponent;
  std::frexp(most, &exponent);
  return std::ldexp(1.0f, std::clamp(exponent - 15, -126, 126));
}

}  // namespace

PackedLinear new_packed(const PackSpec& spec) {
  if (spec.rows < 1 || spec.k < 1) throw std::invalid_argument("a packed matrix needs at least one row and one column");
  if (spec.gated && spec.rows % 2 != 0) throw std::invalid_argument("a gated matrix has an even number of rows");
  // int32 sums of K products of at most 255 * 127.
  if (spec.k > 65536 && spec.kind == WeightKind::int8) throw std::invalid_argument("int8 takes K up to 65536");
  PackedLinear w;
  w.kind = spec.kind;
  w.n = spec.gated ? spec.rows / 2 : spec.rows;
  w.k = spec.k;
  w.gated = spec.gated;
  w.panels = spec.gated ? ceil_div(w.n, kPanel) * 2 : ceil_div(w.n, 2 * kPanel) * 2;
  const bool grouped = spec.kind == WeightKind::group4 || spec.kind == WeightKind::group8;
  const int64_t k_per_step = spec.kind == WeightKind::f32 ? 1 : spec.kind == WeightKind::bf16 ? 2 : grouped ? 32 : 4;
  w.steps = ceil_div(w.k, k_per_step);
  w.panel_bytes = w.steps * kStepBytes * (spec.kind == WeightKind::group4 ? 4 : grouped ? 8 : 1);
  if (grouped) {
    const bool half = spec.group == 16 && spec.kind == WeightKind::group8;
    const bool power = spec.group >= 32 && (spec.group & (spec.group - 1)) == 0;
    if (!half && !power) {
      throw std::invalid_argument("group is " + std::to_string(spec.group) +
                                  "; the kernels take 16 (8-bit only), 32, 64, 128 and further powers of two");
    }
    w.group = spec.group;
    w.has_min = spec.has_min;
    while (!half && 32 << w.scale_shift < spec.group) ++w.scale_shift;
    // The kernels walk whole groups of 32; a group of 16 in the padding needs scales, too.
    const int64_t scale_groups = half ? 2 * w.steps : ceil_div(w.k, w.group);
    w.scale_panel_halves = scale_groups * kPanel * (w.has_min ? 2 : 1);
    w.scales = Buffer(static_cast<size_t>(w.panels * w.scale_panel_halves) * 2);
  }
  w.data = Buffer(static_cast<size_t>(w.panels * w.panel_bytes));
  w.column_scale = Buffer(static_cast<size_t>(w.panels * kPanel) * 4);
  if (spec.bias) w.bias = Buffer(static_cast<size_t>(w.panels * kPanel) * 4);
  return w;
}

void write_float_rows(PackedLinear& w, int64_t first, int64_t count, const FloatRows& rows) {
  check_rows(w, first, count);
  check_kind(w.kind == WeightKind::f32 || w.kind == WeightKind::bf16, "floats");
  for_rows(count, [&](int64_t i) {
    const int64_t c = packed_column(w, first + i);
    for (int64_t k = 0; k < w.k; ++k) {
      const float value = source_value(rows, i, k);
      if (w.kind == WeightKind::f32) {
        std::memcpy(at(w, c, k, 1, 4), &value, 4);
      } else {
        const uint16_t rounded = float_to_bf16(value);
        std::memcpy(at(w, c, k, 2, 2), &rounded, 2);
      }
    }
  });
}

void write_rounded_int8_rows(PackedLinear& w, int64_t first, int64_t count, const FloatRows& rows) {
  check_rows(w, first, count);
  check_kind(w.kind == WeightKind::int8, "int8 rows");
  for_rows(count, [&](int64_t i) {
    const int64_t c = packed_column(w, first + i);
    float absmax = 0;
    for (int64_t k = 0; k < w.k; ++k) absmax = std::max(absmax, std::fabs(source_value(rows, i, k)));
    const float inverse = absmax > 0 ? 127.0f / absmax : 0.0f;
    w.column_scale.as<float>()[c] = absmax / 127.0f;
    for (int64_t k = 0; k < w.k; ++k) {
      const float q = std::clamp(std::nearbyint(source_value(rows, i, k) * inverse), -127.0f, 127.0f);
      *reinterpret_cast<uint8_t*>(at(w, c, k, 4, 1)) = static_cast<uint8_t>(static_cast<int>(q) + 128);
    }
  });
}

void write_int8_rows(PackedLinear& w, int64_t first, int64_t count, const int8_t* q, int64_t ld, const float* scale) {
  check_rows(w, first, count);
  check_kind(w.kind == WeightKind::int8, "int8 rows");
  for_rows(count, [&](int64_t i) {
    const int64_t c = packed_column(w, first + i);
    w.column_scale.as<float>()[c] = scale[i];
    for (int64_t k = 0; k < w.k; ++k) {
      *reinterpret_cast<uint8_t*>(at(w, c, k, 4, 1)) = static_cast<uint8_t>(q[i * ld + k] + 128);
    }
  });
}

void write_group_rows(PackedLinear& w, int64_t first, int64_t count, const uint8_t* q, int64_t ld, const float* scale,
                      const float* min, int zero) {
  check_rows(w, first, count);
  const bool four = w.kind == WeightKind::group4;
  check_kind(four || w.kind == WeightKind::group8, "grouped rows");
  check_kind(w.has_min == (min != nullptr), w.has_min ? "rows without minima" : "minima");
  if (!w.has_min && four && zero != 8) throw std::invalid_argument("4-bit rows without minima have zero point 8");
  const int64_t groups = ceil_div(w.k, w.group);
  const int shift = four || w.has_min ? 0 : 128 - zero;
  std::atomic<bool> fits{true};
  for_rows(count, [&](int64_t i) {
    const int64_t c = packed_column(w, first + i);
    const float* min_row = min != nullptr ? min + i * groups : nullptr;
    const float power = column_power(scale + i * groups, min_row, groups);
    w.column_scale.as<float>()[c] = power;
    for (int64_t g = 0; g < groups; ++g) {
      uint16_t* place = scale_at(w, c, g);
      place[0] = float_to_half(scale[i * groups + g] / power);
      if (min_row != nullptr) place[kPanel] = float_to_half(min_row[g] / power);
    }
    bool ok = true;
    for (int64_t k = 0; k < w.k; ++k) {
      const int value = q[i * ld + k] + shift;
      ok = ok && value >= 0 && value <= (four ? 15 : 255);
      if (four) {
        *nibble_at(w, c, k) |= static_cast<uint8_t>(value << (k % 8 < 4 ? 0 : 4));
      } else {
        *reinterpret_cast<uint8_t*>(at(w, c, k, 4, 1)) = static_cast<uint8_t>(value);
      }
    }
    if (!ok) fits.store(false);
  });
  if (!fits) throw std::invalid_argument(four ? "a 4-bit value above 15" : "q - zero does not fit int8");
}

void write_bias(PackedLinear& w, int64_t first, int64_t count, const float* bias) {
  check_rows(w, first, count);
  check_kind(w.bias.size() > 0, "a bias");
  for (int64_t i = 0; i < count; ++i) w.bias.as<float>()[packed_column(w, first + i)] = bias[i];
}

void unpack_row(const PackedLinear& packed, int64_t row, float* out) {
  PackedLinear& w = const_cast<PackedLinear&>(packed);  // only read; the address functions are shared with writing
  const int64_t c = packed_column(w, row);
  const float column = w.column_scale.as<float>()[c];
  for (int64_t k = 0; k < w.k; ++k) {
    if (w.kind == WeightKind::f32) {
      std::memcpy(out + k, at(w, c, k, 1, 4), 4);
    } else if (w.kind == WeightKind::bf16) {
      uint16_t bits;
      std::memcpy(&bits, at(w, c, k, 2, 2), 2);
      out[k] = bf16_to_float(bits);
    } else if (w.kind == WeightKind::int8) {
      out[k] = static_cast<float>(*reinterpret_cast<uint8_t*>(at(w, c, k, 4, 1)) - 128) * column;
    } else {
      const bool four = w.kind == WeightKind::group4;
      const int q = four ? *nibble_at(w, c, k) >> (k % 8 < 4 ? 0 : 4) & 15
                         : *reinterpret_cast<uint8_t*>(at(w, c, k, 4, 1));
      const uint16_t* place = scale_at(w, c, k / w.group);
      const float scale = half_to_float(place[0]) * column;
      out[k] = w.has_min ? scale * static_cast<float>(q) + half_to_float(place[kPanel]) * column
                         : scale * static_cast<float>(q - (four ? 8 : 128));
    }
  }
}

void unpack(const PackedLinear& w, const int32_t* rows, int64_t count, float* out) {
  for_rows(count, [&](int64_t i) { unpack_row(w, rows != nullptr ? rows[i] : i, out + i * w.k); });
}

}  // namespace pm
