// The packed layout, one for all instruction sets.
//
//   panel p = packed columns 32 p .. 32 p + 31 (a column is an output; gated: see packed_column)
//
//   data [panel][step][128 bytes]             a step's 128 bytes, lane by lane (lane = column of the panel)
//     f32     step = 1 k      float           [lane]
//     bf16    step = 2 k      bfloat16        [lane][2]
//     int8    step = 4 k      w + 128         [lane][4]
//     group8  8 steps a group of 32, as int8: q, or q - zero + 128
//     group4  4 steps a group of 32: 8 k; byte [lane][j] = q[k + j] | q[k + 4 + j] << 4
//
//   scales [panel][group][scale 32 lanes, min 32 lanes] float16, of group kinds
//
// One column after another along the lanes, 4 bytes of k each, is the operand of the integer and bf16 dot products; the
// activations' 4 bytes are broadcast. A 512-bit kernel takes a step as two vectors, so that a matrix is read as one stream
// from beginning to end; a 256-bit one as four.
#include "linear/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/team.h"
#include "linear/half.h"

namespace pm {
namespace {

constexpr int64_t kPanel = 32, kStepBytes = 128;
constexpr int64_t kMostWeights = int64_t{1} << 48;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where source row i lands. Gated: 8 gate columns, the 8 up columns of the same features, the next 8 gates, and so on.
int64_t packed_column(const PackedLinear& w, int64_t i) {
  if (!w.gated) return i;
  const int64_t feature = i < w.n ? i : i - w.n;
  return feature / 8 * 16 + feature % 8 + (i < w.n ? 0 : 8);
}

// A row of floats: the source itself, or its values widened into `room`.
const float* float_row(const FloatRows& rows, int64_t row, int64_t k, std::vector<float>& room) {
  if (rows.type == SourceType::f32) return static_cast<const float*>(rows.data) + row * rows.ld;
  const uint16_t* halves = static_cast<const uint16_t*>(rows.data) + row * rows.ld;
  room.resize(static_cast<size_t>(k));
  if (rows.type == SourceType::f16) {
    for (int64_t i = 0; i < k; ++i) room[static_cast<size_t>(i)] = half_to_float(halves[i]);
  } else {
    for (int64_t i = 0; i < k; ++i) room[static_cast<size_t>(i)] = bf16_to_float(halves[i]);
  }
  return room.data();
}

// The first of packed column c's 4-byte words, one a step; a word holds kValues values of k.
std::byte* words(PackedLinear& w, int64_t c) {
  return w.data.as<std::byte>() + c / kPanel * w.panel_bytes + c % kPanel * 4;
}

// fill(bytes, k, n) writes values k .. k + n - 1 into their word; n is the constant kValues but in a last, short word.
template <int64_t kValues, class Fill>
void write_words(PackedLinear& w, int64_t c, Fill&& fill) {
  std::byte* word = words(w, c);
  int64_t k = 0;
  for (; k + kValues <= w.k; k += kValues, word += kStepBytes) {
    uint8_t bytes[4];
    fill(bytes, k, std::integral_constant<int64_t, kValues>());
    std::memcpy(word, bytes, 4);
  }
  if (k < w.k) {
    uint8_t bytes[4];
    std::memcpy(bytes, word, 4);
    fill(bytes, k, std::min<int64_t>(w.k - k, kValues - 1));
    std::memcpy(word, bytes, 4);
  }
}

// take(bytes, k, n) reads them.
template <int64_t kValues, class Take>
void read_words(PackedLinear& w, int64_t c, Take&& take) {
  const std::byte* word = words(w, c);
  for (int64_t k = 0; k < w.k; k += kValues, word += kStepBytes) {
    uint8_t bytes[4];
    std::memcpy(bytes, word, 4);
    take(bytes, k, std::min(kValues, w.k - k));
  }
}

uint16_t* scale_at(PackedLinear& w, int64_t c, int64_t group) {
  return w.scales.as<uint16_t>() + c / kPanel * w.scale_panel_halves + group * kPanel * (w.has_min ? 2 : 1) + c % kPanel;
}

void check_rows(const PackedLinear& w, int64_t first, int64_t count) {
  const int64_t rows = w.gated ? 2 * w.n : w.n;
  if (first < 0 || count < 0 || count > rows || first > rows - count) {
    throw std::invalid_argument(std::to_string(count) + " rows from row " + std::to_string(first) +
                                " on are outside the packed matrix of " + std::to_string(rows) + " rows");
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
  if (spec.rows > kMostWeights / spec.k) {
    throw std::invalid_argument("a packed matrix of " + std::to_string(spec.rows) + " x " + std::to_string(spec.k) +
                                " weights; the most is " + std::to_string(kMostWeights));
  }
  if (spec.gated && spec.rows % 2 != 0) throw std::invalid_argument("a gated matrix has an even number of rows");
  // int32 sums of K products of at most 255 * 127.
  if (spec.k > kMostTokenK && spec.kind == WeightKind::int8) {
    throw std::invalid_argument("int8 takes K up to " + std::to_string(kMostTokenK) + ", not " + std::to_string(spec.k));
  }
  PackedLinear w;
  w.kind = spec.kind;
  w.n = spec.gated ? spec.rows / 2 : spec.rows;
  w.k = spec.k;
  w.gated = spec.gated;
  w.panels = ceil_div(spec.gated ? ceil_div(w.n, 8) * 16 : w.n, kPanel);
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
    if (spec.bits < 1 || spec.bits > 8) {
      throw std::invalid_argument("bits is " + std::to_string(spec.bits) + "; it is 1 to 8");
    }
    w.bits = spec.kind == WeightKind::group4 ? 4 : w.has_min ? spec.bits : 8;
    while (!half && 32 << w.scale_shift < spec.group) ++w.scale_shift;
    // The kernels walk whole groups of 32; a group of 16 in the padding needs scales, too.
    const int64_t scale_groups = half ? 2 * w.steps : ceil_div(w.k, w.group);
    w.scale_panel_halves = scale_groups * kPanel * (w.has_min ? 2 : 1);
    w.scales = Buffer::lasting(static_cast<size_t>(w.panels * w.scale_panel_halves) * 2);
  }
  w.data = Buffer::lasting(static_cast<size_t>(w.panels * w.panel_bytes));
  w.column_scale = Buffer(static_cast<size_t>(w.panels * kPanel) * 4);
  if (spec.bias) w.bias = Buffer(static_cast<size_t>(w.panels * kPanel) * 4);
  return w;
}

void write_float_rows(PackedLinear& w, int64_t first, int64_t count, const FloatRows& rows) {
  check_rows(w, first, count);
  check_kind(w.kind == WeightKind::f32 || w.kind == WeightKind::bf16, "floats");
  for_rows(count, [&](int64_t i) {
    thread_local std::vector<float> room;
    const float* source = float_row(rows, i, w.k, room);
    const int64_t c = packed_column(w, first + i);
    if (w.kind == WeightKind::f32) {
      write_words<1>(w, c, [&](uint8_t* bytes, int64_t k, auto) { std::memcpy(bytes, source + k, 4); });
      return;
    }
    write_words<2>(w, c, [&](uint8_t* bytes, int64_t k, auto n) {
      for (int64_t j = 0; j < n; ++j) {
        const uint16_t rounded = float_to_bf16(source[k + j]);
        std::memcpy(bytes + 2 * j, &rounded, 2);
      }
    });
  });
}

void write_rounded_int8_rows(PackedLinear& w, int64_t first, int64_t count, const FloatRows& rows) {
  check_rows(w, first, count);
  check_kind(w.kind == WeightKind::int8, "int8 rows");
  for_rows(count, [&](int64_t i) {
    thread_local std::vector<float> room;
    const float* source = float_row(rows, i, w.k, room);
    const int64_t c = packed_column(w, first + i);
    float absmax = 0, poison = 0;  // a weight that is not finite must show in the outputs
    for (int64_t k = 0; k < w.k; ++k) absmax = std::max(absmax, std::fabs(source[k])), poison += source[k] * 0;
    const float inverse = absmax > 0 ? 127.0f / absmax : 0.0f;
    w.column_scale.as<float>()[c] = absmax / 127.0f + poison;
    write_words<4>(w, c, [&](uint8_t* bytes, int64_t k, auto n) {
      for (int64_t j = 0; j < n; ++j) {
        const float q = std::clamp(std::nearbyint(source[k + j] * inverse), -127.0f, 127.0f);
        bytes[j] = static_cast<uint8_t>(std::isnan(q) ? 128 : static_cast<int>(q) + 128);
      }
    });
  });
}

void write_int8_rows(PackedLinear& w, int64_t first, int64_t count, const int8_t* q, int64_t ld, const float* scale) {
  check_rows(w, first, count);
  check_kind(w.kind == WeightKind::int8, "int8 rows");
  for_rows(count, [&](int64_t i) {
    const int64_t c = packed_column(w, first + i);
    const int8_t* source = q + i * ld;
    w.column_scale.as<float>()[c] = scale[i];
    write_words<4>(w, c, [&](uint8_t* bytes, int64_t k, auto n) {
      for (int64_t j = 0; j < n; ++j) bytes[j] = static_cast<uint8_t>(source[k + j] + 128);
    });
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
    const uint8_t* source = q + i * ld;
    int seen = 0;  // every bit of every value: one outside its range sets a bit above it, or the sign
    if (four) {
      write_words<8>(w, c, [&](uint8_t* bytes, int64_t k, auto n) {
        for (int64_t j = 0; j < 4; ++j) {
          const int low = j < n ? source[k + j] : 0, high = 4 + j < n ? source[k + 4 + j] : 0;
          seen |= low | high;
          bytes[j] = static_cast<uint8_t>(low | high << 4);
        }
      });
    } else {
      write_words<4>(w, c, [&](uint8_t* bytes, int64_t k, auto n) {
        for (int64_t j = 0; j < n; ++j) {
          const int value = source[k + j] + shift;
          seen |= value;
          bytes[j] = static_cast<uint8_t>(value);
        }
      });
    }
    if (seen >> w.bits != 0) fits.store(false);
  });
  if (fits) return;
  if (four) throw std::invalid_argument("a 4-bit value above 15");
  if (!w.has_min) throw std::invalid_argument("q - zero does not fit int8");
  throw std::invalid_argument("a value of more than " + std::to_string(w.bits) + " bits");
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
  switch (w.kind) {
    case WeightKind::f32:
      read_words<1>(w, c, [&](const uint8_t* bytes, int64_t k, int64_t) { std::memcpy(out + k, bytes, 4); });
      return;
    case WeightKind::bf16:
      read_words<2>(w, c, [&](const uint8_t* bytes, int64_t k, int64_t n) {
        for (int64_t j = 0; j < n; ++j) {
          uint16_t bits;
          std::memcpy(&bits, bytes + 2 * j, 2);
          out[k + j] = bf16_to_float(bits);
        }
      });
      return;
    case WeightKind::int8:
      read_words<4>(w, c, [&](const uint8_t* bytes, int64_t k, int64_t n) {
        for (int64_t j = 0; j < n; ++j) out[k + j] = static_cast<float>(bytes[j] - 128) * column;
      });
      return;
    case WeightKind::group4:
      read_words<8>(w, c, [&](const uint8_t* bytes, int64_t k, int64_t n) {
        for (int64_t j = 0; j < n; ++j) out[k + j] = static_cast<float>(j < 4 ? bytes[j] & 15 : bytes[j - 4] >> 4);
      });
      break;
    case WeightKind::group8:
      read_words<4>(w, c, [&](const uint8_t* bytes, int64_t k, int64_t n) {
        for (int64_t j = 0; j < n; ++j) out[k + j] = static_cast<float>(bytes[j]);
      });
      break;
  }
  const float zero = w.has_min ? 0.0f : w.kind == WeightKind::group4 ? 8.0f : 128.0f;
  for (int64_t start = 0; start < w.k; start += w.group) {
    const uint16_t* place = scale_at(w, c, start / w.group);
    const float scale = half_to_float(place[0]) * column;
    const float minimum = w.has_min ? half_to_float(place[kPanel]) * column : 0.0f;
    const int64_t stop = std::min(w.k, start + w.group);
    for (int64_t k = start; k < stop; ++k) out[k] = scale * (out[k] - zero) + minimum;
  }
}

void unpack(const PackedLinear& w, const int32_t* rows, int64_t count, float* out) {
  for_rows(count, [&](int64_t i) { unpack_row(w, rows != nullptr ? rows[i] : i, out + i * w.k); });
}

}  // namespace pm
