// Grouped weights (4- or 8-bit integers, a float16 scale and perhaps a minimum per group along K) times int8 activations
// with one scale per 32 values. Within a group of 32 the sum is an exact integer; then it is scaled and added in float,
// group after group, by one accumulator per output.
#include "linear/group.h"

#include "linear/epilogue.h"
#include "linear/tile.h"
#include "linear/walk.h"

namespace pm::PM_ISA {
namespace {

// Six rows by two vectors rather than twelve by one: half the broadcasts, of which there is one for each product at one
// vector, and the load ports would be the limit. With sixteen registers six by one, which unpacks weights less often than
// four by one (6 to 10 % of a 4-bit product on AVX2).
constexpr int kGroupRows = kLanes >= 8 ? 6 : 2;
constexpr int kGroupVectors = kLanes == 16 ? 2 : 1;
constexpr int kSteps = 8;  // of 4 k in a group of 32

// What a kind of grouped weights needs to know at compile time.
//   Bits  4: two steps share 128 bytes, the first in the low nibbles; 8: one step per 128 bytes
//   Min   w = scale q + min; otherwise w = scale (q - zero) with zero 8 (4 bits) or 128 (8 bits)
//   Half  scales for groups of 16 (8 bits only)
template <int Bits, bool Min, bool Half>
struct GroupKind {
  static constexpr int kBits = Bits;
  static constexpr bool kMin = Min, kHalf = Half;
  static constexpr int kGroupBytes = kStepBytes * (Bits == 4 ? 4 : 8);
  static constexpr int kScaleStride = Min ? 2 * kPanel : kPanel;  // float16 values of one scale group
  static constexpr int kScaleHalves = Half ? 2 * kScaleStride : kScaleStride;  // at most, of 32 values along K
  // dot8 sums q a, and the kind means (q - zero) a: the difference, from a record's offset, -8 (sum of a).
  static constexpr int kZero = Min ? 0 : Bits == 4 ? 8 : 128;
  static I32 offset(int32_t minus_8_sums) {
    if constexpr (kZero == 8) return splat_i32(minus_8_sums);
    if constexpr (kZero == 128) return shift_left<4>(splat_i32(minus_8_sums));
    return zero_i32();
  }
};

inline const GroupRecord& record(const std::byte* p) { return *reinterpret_cast<const GroupRecord*>(p); }

// As in tile.h: one name for each accumulator, rows addressed from four pointers. c: the group's integers, f: the sum.
#define PM_ROW_DECLARE(r) [[maybe_unused]] F32 f##r##_0 = zero_f32(), f##r##_1 = zero_f32();
#define PM_ROW_START4(r)                                                     \
  [[maybe_unused]] S4 c##r##_0, c##r##_1;                                    \
  if constexpr (MR > r) {                                                    \
    c##r##_0 = start4(K::offset(record(PM_ROW_AT(r)).offset));               \
    if constexpr (NV > 1) c##r##_1 = c##r##_0;                               \
  }
#define PM_ROW_STEP4(r)                                                      \
  if constexpr (MR > r) {                                                    \
    const I32 a = splat_word(PM_ROW_AT(r) + 4 * step);                       \
    c##r##_0 = step4(c##r##_0, w0, a);                                       \
    if constexpr (NV > 1) c##r##_1 = step4(c##r##_1, w1, a);                 \
  }
#define PM_ROW_SCALE4(r)                                                     \
  if constexpr (MR > r) {                                                    \
    const GroupRecord& x = record(PM_ROW_AT(r));                             \
    const auto offset = [&] { return K::offset(x.offset); };                 \
    const F32 xs = splat(x.scale);                                           \
    f##r##_0 = fma(to_f32(finish4(c##r##_0, offset)), scale0 * xs, f##r##_0); \
    if constexpr (NV > 1) f##r##_1 = fma(to_f32(finish4(c##r##_1, offset)), scale1 * xs, f##r##_1); \
    if constexpr (K::kMin) f##r##_0 = fma(min0, splat(x.scaled_sum), f##r##_0); \
    if constexpr (K::kMin && NV > 1) f##r##_1 = fma(min1, splat(x.scaled_sum), f##r##_1); \
  }
#define PM_ROW_START8(r)                                                     \
  [[maybe_unused]] I32 c##r##_0, c##r##_1;                                   \
  if constexpr (MR > r) {                                                    \
    const GroupRecord& x = record(PM_ROW_AT(r));                             \
    c##r##_0 = K::offset(!K::kHalf ? x.offset : part == 0 ? x.half_offset : x.offset - x.half_offset); \
    if constexpr (NV > 1) c##r##_1 = c##r##_0;                               \
  }
#define PM_ROW_STEP8(r)                                                      \
  if constexpr (MR > r) {                                                    \
    const I32 a = splat_word(PM_ROW_AT(r) + 4 * step);                       \
    c##r##_0 = dot8(c##r##_0, w0, a);                                        \
    if constexpr (NV > 1) c##r##_1 = dot8(c##r##_1, w1, a);                  \
  }
#define PM_ROW_SCALE8(r)                                                     \
  if constexpr (MR > r) {                                                    \
    const GroupRecord& x = record(PM_ROW_AT(r));                             \
    const F32 xs = splat(x.scale);                                           \
    f##r##_0 = fma(to_f32(c##r##_0), scale0 * xs, f##r##_0);                 \
    if constexpr (NV > 1) f##r##_1 = fma(to_f32(c##r##_1), scale1 * xs, f##r##_1); \
    if constexpr (K::kMin) {                                                 \
      const int32_t half = part == 0 ? x.half_offset : x.offset - x.half_offset; \
      const F32 sums = splat(K::kHalf ? x.scale * -0.125f * static_cast<float>(half) : x.scaled_sum); \
      f##r##_0 = fma(min0, sums, f##r##_0);                                  \
      if constexpr (NV > 1) f##r##_1 = fma(min1, sums, f##r##_1);            \
    }                                                                        \
  }
#define PM_ROW_STORE(r)                                                      \
  if constexpr (MR > r) {                                                    \
    store(tile + r * kPanel, f##r##_0);                                \
    if constexpr (NV > 1) store(tile + r * kPanel + kLanes, f##r##_1); \
  }
#define PM_LOAD_SCALES(group_scales)                                                                        \
  const F32 scale0 = load_f16(group_scales);                                                                \
  [[maybe_unused]] const F32 scale1 = NV > 1 ? load_f16((group_scales) + kLanes) : scale0;                  \
  [[maybe_unused]] const F32 min0 = K::kMin ? load_f16((group_scales) + kPanel) : scale0;                   \
  [[maybe_unused]] const F32 min1 = K::kMin && NV > 1 ? load_f16((group_scales) + kPanel + kLanes) : scale0;

// NV vectors of columns, side by side in one panel, for MR rows. `w` and `scales` point at the first vector's lanes
// within the panel's first group.
template <class K, int MR, int NV>
void sum_group(const std::byte* act, int64_t row_bytes, const std::byte* w, const uint16_t* scales, int64_t groups,
               int scale_shift, const Ahead& ahead, float* tile) {
  constexpr int64_t kAhead = 2048;  // see sum_tile
  const std::byte *next = ahead.data, *cache = ahead.cache;
  const uint16_t* next_scales = ahead.scales;
  const std::byte *a0 = act, *a3 = act + 3 * row_bytes, *a6 = act + 6 * row_bytes, *a9 = act + 9 * row_bytes;
  PM_EACH_ROW(PM_ROW_DECLARE)
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (K::kBits == 4) {
      PM_EACH_ROW(PM_ROW_START4)
#pragma GCC unroll 4
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        const std::byte* at = w + pair * kStepBytes;
        const I32 both0 = load_i32(at);
        [[maybe_unused]] const I32 both1 = NV > 1 ? load_i32(at + kLanes * 4) : both0;
        prefetch(at + kAhead);
        prefetch_second_level(next + pair * ahead.stride);
        if constexpr (NV > 1) {
          prefetch(at + kAhead + 64);
          prefetch_second_level(next + pair * ahead.stride + 64);
        }
        if constexpr (kFetchesCache) prefetch_second_level(cache + pair * ahead.cache_stride);
        {
          const int step = 2 * pair;
          const I32 w0 = low_nibbles(both0);
          [[maybe_unused]] const I32 w1 = low_nibbles(both1);
          PM_EACH_ROW(PM_ROW_STEP4)
        }
        {
          const int step = 2 * pair + 1;
          const I32 w0 = high_nibbles(both0);
          [[maybe_unused]] const I32 w1 = high_nibbles(both1);
          PM_EACH_ROW(PM_ROW_STEP4)
        }
      }
      PM_LOAD_SCALES(scales + (g >> scale_shift) * K::kScaleStride)
      PM_EACH_ROW(PM_ROW_SCALE4)
    } else {
      constexpr int kParts = K::kHalf ? 2 : 1;
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        PM_EACH_ROW(PM_ROW_START8)
#pragma GCC unroll 8
        for (int i = 0; i < kSteps / kParts; ++i) {
          const int step = part * (kSteps / kParts) + i;
          const std::byte* at = w + step * kStepBytes;
          const I32 w0 = load_i32(at);
          [[maybe_unused]] const I32 w1 = NV > 1 ? load_i32(at + kLanes * 4) : w0;
          prefetch(at + kAhead);
          prefetch_second_level(next + step * ahead.stride);
          if constexpr (NV > 1) {
            prefetch(at + kAhead + 64);
            prefetch_second_level(next + step * ahead.stride + 64);
          }
          if constexpr (kFetchesCache) prefetch_second_level(cache + step * ahead.cache_stride);
          PM_EACH_ROW(PM_ROW_STEP8)
        }
        PM_LOAD_SCALES(scales + (K::kHalf ? 2 * g + part : g >> scale_shift) * K::kScaleStride)
        PM_EACH_ROW(PM_ROW_SCALE8)
      }
    }
    for (int i = 0; i < K::kScaleHalves; i += 32) prefetch_second_level(next_scales + i);
    w += K::kGroupBytes, next += K::kGroupBytes / kStepBytes * ahead.stride, next_scales += K::kScaleHalves;
    cache += K::kGroupBytes / kStepBytes * ahead.cache_stride;
    a0 += sizeof(GroupRecord), a3 += sizeof(GroupRecord), a6 += sizeof(GroupRecord), a9 += sizeof(GroupRecord);
  }
  PM_EACH_ROW(PM_ROW_STORE)
}

using SumGroup = void (*)(const std::byte*, int64_t, const std::byte*, const uint16_t*, int64_t, int, const Ahead&,
                          float*);

template <class K, int MR>
constexpr SumGroup group_or_null() {
  if constexpr (MR <= kGroupRows) {
    return &sum_group<K, MR, kGroupVectors>;
  } else {
    return nullptr;
  }
}

template <class K>
constexpr SumGroup kByRows[6] = {group_or_null<K, 1>(), group_or_null<K, 2>(), group_or_null<K, 3>(),
                                 group_or_null<K, 4>(), group_or_null<K, 5>(), group_or_null<K, 6>()};

template <class K>
void sum_group_panel(const PackedLinear& w, const std::byte* act, int64_t row_bytes, int rows, int64_t panel,
                     const Ahead& ahead, float* tile) {
  const std::byte* start = w.data.as<std::byte>() + panel * w.panel_bytes;
  const uint16_t* scales = w.scales.as<uint16_t>() + panel * w.scale_panel_halves;
  for (int column = 0; column < kPanel; column += kGroupVectors * kLanes) {
    Ahead shifted = ahead;
    shifted.data += column * 4, shifted.scales += column;
    kByRows<K>[rows - 1](act, row_bytes, start + column * 4, scales + column, w.steps, w.scale_shift, shifted,
                         tile + column);
  }
}

template <class K>
void run_kind(Team& team, const LinearArgs& args) {
  walk<FinishGroup>(team, args, &sum_group_panel<K>, kGroupRows, 0,
                    {args.w->steps * K::kGroupBytes / kStepBytes, 64});
}

}  // namespace

void run_group(Team& team, const LinearArgs& args) {
  const PackedLinear& w = *args.w;
  if (w.kind == WeightKind::group4) {
    return w.has_min ? run_kind<GroupKind<4, true, false>>(team, args)
                     : run_kind<GroupKind<4, false, false>>(team, args);
  }
  if (w.group == 16) {
    return w.has_min ? run_kind<GroupKind<8, true, true>>(team, args) : run_kind<GroupKind<8, false, true>>(team, args);
  }
  return w.has_min ? run_kind<GroupKind<8, true, false>>(team, args) : run_kind<GroupKind<8, false, false>>(team, args);
}

}  // namespace pm::PM_ISA
