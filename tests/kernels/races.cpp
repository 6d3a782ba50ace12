// What ranks share, under ThreadSanitizer (`make test-races`): the pool, with regions opened by several threads while the
// number of ranks changes, and a step of kernels whose ranks write side by side. Portable kernels: the sets differ in
// instructions, not in who writes where. Exits 1 where bytes depend on the number of ranks; a race ends it at once.
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/team.h"
#include "linear/pack.h"
#include "linear/table.h"
#include "ops/attention_plan.h"
#include "ops/rows.h"

namespace {

using namespace pm;

std::vector<float> random_floats(int64_t n) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& value : x) value = normal(generator);
  return x;
}

// Plain integers, so that a missing order shows: every task adds to its own, and after a barrier reads another's.
bool pool() {
  std::atomic<bool> wrong{false};
  const auto rounds = [&](int id) {
    constexpr int kCalls = 40;  // of for_each in a row: more than there are rows of counters
    constexpr int64_t n = 101;
    std::vector<int64_t> seen(kCalls * n), read(n);
    for (int64_t round = 1; round <= 150; ++round) {
      if (id == 0 && round % 10 == 0) set_num_threads(1 + static_cast<int>(round / 10) % 4);
      parallel([&](Team& team) {
        for (int call = 0; call < kCalls; ++call) {
          team.for_each(n, [&](int64_t i) { ++seen[static_cast<size_t>(call * n + i)]; });
        }
        team.barrier();
        team.for_each(n, [&](int64_t i) {
          read[static_cast<size_t>(i)] = 0;
          for (int call = 0; call < kCalls; ++call) read[static_cast<size_t>(i)] += seen[static_cast<size_t>(call * n + n - 1 - i)];
        });
      });
      for (const int64_t value : read) wrong = wrong || value != kCalls * round;
    }
  };
  std::vector<std::thread> threads;
  for (int id = 0; id < 3; ++id) threads.emplace_back(rounds, id);
  for (auto& thread : threads) thread.join();
  return !wrong;
}

// A prompt of 301 tokens and two decodes over their blocks: keys and values written, then attention; all outputs.
std::vector<float> attend(KvType type, int ranks, const std::vector<float>& qkv) {
  constexpr int kQueries[] = {301, 1, 1}, kContexts[] = {301, 40, 600}, kBlocks = 40;
  const AttentionLayer layer{type, 32, 6, 2, 40, 0.15f, 0, 0.0f};
  std::vector<uint8_t> cache(static_cast<size_t>(layer.block_bytes() * 3 * kBlocks));
  std::vector<int32_t> starts = {0}, contexts, tables, positions, slots;
  for (int r = 0; r < 3; ++r) {
    for (int b = 0; b < kBlocks; ++b) tables.push_back(3 * b + r);
    for (int p = kContexts[r] - kQueries[r]; p < kContexts[r]; ++p) {
      positions.push_back(p);
      slots.push_back((3 * (p / 32) + r) * 32 + p % 32);
    }
    starts.push_back(starts.back() + kQueries[r]);
    contexts.push_back(kContexts[r]);
  }
  const int64_t tokens = starts.back(), width = (6 + 2 * 2) * 40, heads = 6 * 40;
  std::vector<float> rows(qkv.begin(), qkv.begin() + tokens * width), out(static_cast<size_t>(tokens * heads));
  const RopeCall rope{&layer, rows.data(), width, cache.data(), positions.data(), slots.data(), nullptr, 0, false,
                      nullptr, nullptr, 0, 0, 1e-6f};
  const AttentionBatch batch{3, starts.data(), contexts.data(), tables.data(), kBlocks};
  AttentionPlan plan;
  plan.build(layer, batch, ranks, false);
  std::vector<float> partials(static_cast<size_t>(plan.num_partials * attention_partial_floats(layer)));
  const int64_t scratch = std::max(attention_scratch_floats(layer), rope_scratch_floats(layer));
  std::vector<float> memory(static_cast<size_t>(scratch * ranks));
  const AttentionCall call{&layer, &batch, cache.data(), rows.data(), width, out.data(), heads, partials.data()};
  parallel([&](Team& team) {
    rope_run(team, rope, 0, tokens, memory.data() + team.rank() * scratch);
    team.barrier();
    attention_run(team, plan, call, memory.data() + team.rank() * scratch);
  });
  return out;
}

// Rows rounded, multiplied, and added to what is there.
std::vector<float> multiply(WeightKind kind, int64_t m, const std::vector<float>& x) {
  constexpr int64_t n = 133, k = 96;
  const bool grouped = kind == WeightKind::group4 || kind == WeightKind::group8;
  PackedLinear w = new_packed({kind, n, k, false, false, grouped ? 32 : 0, false});
  const std::vector<float> floats(x.begin(), x.begin() + n * k), scales(static_cast<size_t>(n * k), 0.01f);
  const std::vector<uint8_t> q(static_cast<size_t>(n * k), 11);
  if (grouped) write_group_rows(w, 0, n, q.data(), k, scales.data(), nullptr, 8);
  else if (kind == WeightKind::int8) write_rounded_int8_rows(w, 0, n, {floats.data(), SourceType::f32, k});
  else write_float_rows(w, 0, n, {floats.data(), SourceType::f32, k});
  std::vector<float> out(static_cast<size_t>(m * n), 1.0f);
  Buffer rows(static_cast<size_t>(activation_bytes(activation_kind(w), m, k)));
  const Activation activation = activation_at(rows.as<>(), activation_kind(w), m, k);
  parallel([&](Team& team) {
    prepare_rows(team, x.data(), k, nullptr, activation);
    team.barrier();
    linear_run(team, {activation, &w, out.data(), n, true});
    team.barrier();
    hadamard_rows(team, out.data(), m, n, 128, 32);
  });
  return out;
}

// What ranks fetch of the cache ahead of an attention: all that their requests with one new token see, each block once, and
// nothing that lies outside it. Blocks behind a window are gone.
bool fetch(int window, int ranks, bool rows_stay) {
  constexpr int kRequests = 24, kBlocks = 40;
  const AttentionLayer layer{KvType::kI8, 16, 6, 2, 64, 0.15f, window, 0.0f};
  std::vector<int32_t> starts = {0}, contexts, tables;
  std::vector<int> wanted(kRequests * kBlocks);
  for (int r = 0; r < kRequests; ++r) {
    contexts.push_back(300 + 7 * r);
    starts.push_back(r + 1);
    for (int b = 0; b < kBlocks; ++b) {
      const bool seen = b * 16 < contexts[r] && (window == 0 || (b + 1) * 16 > contexts[r] - window);
      const int block = (r * kBlocks + b) * 7 % (kRequests * kBlocks);
      tables.push_back(seen ? block : -1);
      wanted[static_cast<size_t>(block)] = seen;
    }
  }
  const AttentionBatch batch{kRequests, starts.data(), contexts.data(), tables.data(), kBlocks};
  AttentionPlan plan;
  plan.build(layer, batch, ranks, rows_stay);
  parallel([&](Team& team) { plan.list_extents(layer, batch, team); });
  bool right = true;
  for (int r = 0; rows_stay && r < kRequests; ++r) right = right && plan.items[static_cast<size_t>(r)].request == r;
  std::vector<int64_t> bytes(wanted.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& extents = plan.extents[static_cast<size_t>(rank)];
    Upcoming upcoming;
    const auto* cache = reinterpret_cast<const std::byte*>(&layer);  // any address
    upcoming.begin(cache, extents.data(), extents.size());
    for (Upcoming::Piece piece; (piece = upcoming.take(1000)).bytes > 0;) {
      const int64_t at = piece.data - cache;
      right = right && at >= 0 && at + piece.bytes <= layer.block_bytes() * kRequests * kBlocks;
      for (int64_t i = at; right && i < at + piece.bytes; ++i) ++bytes[static_cast<size_t>(i / layer.block_bytes())];
    }
  }
  for (size_t b = 0; b < wanted.size(); ++b) right = right && bytes[b] == wanted[b] * layer.block_bytes();
  if (!right) std::printf("window %d, %d ranks: the wrong blocks are fetched\n", window, ranks);
  return right;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
  bool right = pool();
  for (const int ranks : {1, 2, 3}) {
    set_num_threads(ranks);
    for (const int window : {0, 40, 256, 400})
      for (const bool rows_stay : {false, true}) right = fetch(window, ranks, rows_stay) && right;
  }
  const std::vector<float> x = random_floats(303 * 400);
  for (const KvType type : {KvType::kBf16, KvType::kF32, KvType::kI8}) {
    set_num_threads(1);
    const auto alone = attend(type, 1, x);
    set_num_threads(3);
    right = same(alone, attend(type, 3, x)) && right;
  }
  for (const WeightKind kind : {WeightKind::f32, WeightKind::bf16, WeightKind::int8, WeightKind::group4, WeightKind::group8}) {
    for (const int64_t m : {1, 9, 70}) {
      set_num_threads(1);
      const auto alone = multiply(kind, m, x);
      set_num_threads(3);
      right = same(alone, multiply(kind, m, x)) && right;
    }
  }
  std::puts(right ? "no races; one answer for 1 and 3 ranks" : "the answer depends on the number of ranks, or see above");
  return right ? 0 : 1;
}
