// Grouped weights (4- or 8-bit integers, a float16 scale and perhaps a minimum per group along K) times int8 activations
// with one scale per 32 values. Within a group of 32 the sum is an exact integer; then it is scaled and added in float,
// group after group, by one accumulator per output.
#include "linear/group.h"

#include "linear/epilogue.h"
#include "linear/tile.h"
#include "linear/walk.h"

namespace pm::PM_ISA {
namespace {

constexpr int kGroupRows = kLanes == 16 ? 12 : kLanes == 8 ? 4 : 2;
constexpr int kSteps = 8;  // of 4 k in a group of 32

// What a kind of grouped weights needs to know at compile time.
//   Bits  4: two steps share 64 bytes, the first in the low nibbles; 8: one step per 64 bytes
//   Min   w = scale q + min; otherwise w = scale (q - zero) with zero 8 (4 bits) or 128 (8 bits)
//   Half  scales for groups of 16 (8 bits only)
template <int Bits, bool Min, bool Half>
struct GroupKind {
  static constexpr int kBits = Bits;
  static constexpr bool kMin = Min, kHalf = Half;
  static constexpr int kGroupBytes = Bits == 4 ? 256 : 512;
  static constexpr int kScaleStride = Min ? 32 : 16;  // float16 values of one scale group of a panel
  // dot8 sums (q - kW8Offset) a, and the kind means (q - zero) a: the difference, from a record's offset, -8 (sum of a).
  static constexpr int kZero = Min ? 0 : Bits == 4 ? 8 : 128;
  static constexpr int kMissing = Bits == 4 ? kZero : kZero - kW8Offset;  // 0, 8, 128 or -128
  static I32 offset(int32_t minus_8_sums) {
    if constexpr (kMissing == 8) return splat_i32(minus_8_sums);
    if constexpr (kMissing == 128) return shift_left<4>(splat_i32(minus_8_sums));
    if constexpr (kMissing == -128) return sub(zero_i32(), shift_left<4>(splat_i32(minus_8_sums)));
    return zero_i32();
  }
};

inline const GroupRecord& record(const std::byte* p) { return *reinterpret_cast<const GroupRecord*>(p); }

#define PM_ROW_DECLARE(r) [[maybe_unused]] F32 f##r = zero_f32();
#define PM_ROW_START4(r) \
  [[maybe_unused]] S4 c##r; \
  if constexpr (MR > r) c##r = start4(K::offset(record(PM_ROW_AT(r)).offset));
#define PM_ROW_STEP4(r)                                                     \
  if constexpr (MR > r) {                                                   \
    const std::byte* q = PM_ROW_AT(r) + 8 * s;                              \
    c##r = step4(c##r, low, splat_word(q));                                 \
    c##r = step4(c##r, high, splat_word(q + 4));                            \
  }
#define PM_ROW_SCALE4(r)                                                                                    \
  if constexpr (MR > r) {                                                                                   \
    const GroupRecord& x = record(PM_ROW_AT(r));                                                            \
    f##r = fma(to_f32(finish4(c##r, [&] { return K::offset(x.offset); })), scale * splat(x.scale), f##r);  \
    if constexpr (K::kMin) f##r = fma(min, splat(x.scaled_sum), f##r);                                      \
  }
#define PM_ROW_START8(r)                                                                                       \
  [[maybe_unused]] I32 c##r;                                                                                   \
  if constexpr (MR > r) {                                                                                      \
    const GroupRecord& x = record(PM_ROW_AT(r));                                                               \
    c##r = K::offset(!K::kHalf ? x.offset : part == 0 ? x.half_offset : x.offset - x.half_offset);         \
  }
#define PM_ROW_STEP8(r) \
  if constexpr (MR > r) c##r = dot8(c##r, q, splat_word(PM_ROW_AT(r) + 4 * s));
#define PM_ROW_SCALE8(r)                                                                                       \
  if constexpr (MR > r) {                                                                                      \
    const GroupRecord& x = record(PM_ROW_AT(r));                                                               \
    f##r = fma(to_f32(c##r), scale * splat(x.scale), f##r);                                                    \
    if constexpr (K::kMin && !K::kHalf) f##r = fma(min, splat(x.scaled_sum), f##r);                            \
    if constexpr (K::kMin && K::kHalf) {                                                                       \
      const int32_t sums = part == 0 ? x.half_offset : x.offset - x.half_offset;                             \
      f##r = fma(min, splat(x.scale * -0.125f * static_cast<float>(sums)), f##r);                                        \
    }                                                                                                          \
  }
#define PM_ROW_STORE(r) \
  if constexpr (MR > r) store(tile + r * kTileColumns, f##r);

// One vector of columns for MR rows. `w` and `scales` point at the vector's lanes within the panel's first group.
template <class K, int MR>
void sum_group(const std::byte* act, int64_t row_bytes, const std::byte* w, const uint16_t* scales, int64_t groups,
               int scale_shift, float* tile) {
  const std::byte *a0 = act, *a3 = act + 3 * row_bytes, *a6 = act + 6 * row_bytes, *a9 = act + 9 * row_bytes;
  PM_EACH_ROW(PM_ROW_DECLARE)
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (K::kBits == 4) {
      const uint16_t* group_scales = scales + (g >> scale_shift) * K::kScaleStride;
      PM_EACH_ROW(PM_ROW_START4)
#pragma GCC unroll 4
      for (int s = 0; s < kSteps / 2; ++s) {
        const I32 both = load_i32(w + s * kStepBytes);
        if constexpr (MR <= 6) prefetch(w + s * kStepBytes + 2048);
        const I32 low = low_nibbles(both), high = high_nibbles(both);
        PM_EACH_ROW(PM_ROW_STEP4)
      }
      const F32 scale = load_f16(group_scales);
      [[maybe_unused]] const F32 min = K::kMin ? load_f16(group_scales + kPanel) : scale;
      PM_EACH_ROW(PM_ROW_SCALE4)
    } else {
      constexpr int kParts = K::kHalf ? 2 : 1;
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        const int64_t scale_group = K::kHalf ? 2 * g + part : g >> scale_shift;
        const uint16_t* group_scales = scales + scale_group * K::kScaleStride;
        PM_EACH_ROW(PM_ROW_START8)
#pragma GCC unroll 8
        for (int s = part * (kSteps / kParts); s < (part + 1) * (kSteps / kParts); ++s) {
          const W8 q = prepare_w8(load_i32(w + s * kStepBytes));
          if constexpr (MR <= 6) prefetch(w + s * kStepBytes + 2048);
          PM_EACH_ROW(PM_ROW_STEP8)
        }
        const F32 scale = load_f16(group_scales);
        [[maybe_unused]] const F32 min = K::kMin ? load_f16(group_scales + kPanel) : scale;
        PM_EACH_ROW(PM_ROW_SCALE8)
      }
    }
    w += K::kGroupBytes;
    a0 += sizeof(GroupRecord), a3 += sizeof(GroupRecord), a6 += sizeof(GroupRecord), a9 += sizeof(GroupRecord);
  }
  PM_EACH_ROW(PM_ROW_STORE)
}

using SumGroup = void (*)(const std::byte*, int64_t, const std::byte*, const uint16_t*, int64_t, int, float*);

template <class K, int MR>
constexpr SumGroup group_or_null() {
  if constexpr (MR <= kGroupRows) {
    return &sum_group<K, MR>;
  } else {
    return nullptr;
  }
}

template <class K>
struct GroupTiles {
  static constexpr SumGroup kByRows[12] = {
      group_or_null<K, 1>(), group_or_null<K, 2>(), group_or_null<K, 3>(),  group_or_null<K, 4>(),
      group_or_null<K, 5>(), group_or_null<K, 6>(), group_or_null<K, 7>(),  group_or_null<K, 8>(),
      group_or_null<K, 9>(), group_or_null<K, 10>(), group_or_null<K, 11>(), group_or_null<K, 12>()};
};

template <class K>
void sum_group_columns(const PackedLinear& w, const std::byte* act, int64_t row_bytes, int rows, int64_t column,
                       int columns, float* tile) {
  const SumGroup sum = GroupTiles<K>::kByRows[rows - 1];
  for (int done = 0; done < columns; done += kLanes) {
    const int64_t panel = (column + done) / kPanel, lane = (column + done) % kPanel;
    const std::byte* start = w.data.as<std::byte>() + panel * w.panel_bytes + lane * 4;
    const uint16_t* scales = w.scales.as<uint16_t>() + panel * w.scale_panel_halves + lane;
    sum(act, row_bytes, start, scales, w.steps, w.scale_shift, tile + done);
  }
}

template <class K>
void run_kind(Team& team, const LinearArgs& args) {
  walk<FinishGroup>(team, args, &sum_group_columns<K>, kGroupRows, kGroupRows < 6 ? 1 : 6, 0);
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
