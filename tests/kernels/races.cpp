// What ranks share, under ThreadSanitizer (`make test-sanitized`): the pool, with regions opened by several threads while the
// number of ranks changes, and a step of kernels whose ranks write side by side. Portable kernels: the sets differ in
// instructions, not in who writes where. Exits 1 where bytes depend on the number of ranks; a race ends it at once.
#include <atomic>
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
#include "program/instructions.h"

namespace {

using namespace pm;

std::vector<float> random_floats(int64_t n) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& value : x) value = normal(generator);
  return x;
}

// Plain integers, so that a missing order shows: every task adds to its own, and after a barrier reads another's. Then
// every task writes, and a rank that wrote its whole share reads that, and more only once all have arrived.
bool pool() {
  std::atomic<bool> wrong{false};
  const auto rounds = [&](int id) {
    constexpr int kCalls = 40;  // of for_each in a row: more than there are rows of counters
    constexpr int64_t n = 101;
    std::vector<int64_t> seen(kCalls * n), read(n), written(n);
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
        team.barrier();
        const bool own = team.for_each(n, [&](int64_t i) { written[static_cast<size_t>(i)] = round; });
        team.arrive(own);
        team.for_each(n, [&](int64_t i) { read[static_cast<size_t>(i)] += written[static_cast<size_t>(i)]; });
        team.arrive(false);
        team.for_each(n, [&](int64_t i) { written[static_cast<size_t>(i)] += read[static_cast<size_t>(n - 1 - i)]; });
      });
      for (const int64_t value : read) wrong = wrong || value != (kCalls + 1) * round;
      for (const int64_t value : written) wrong = wrong || value != (kCalls + 2) * round;
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

PackedLinear float_matrix(int64_t n, int64_t k, const std::vector<float>& x) {
  PackedLinear w = new_packed({WeightKind::f32, n, k, false, false, 0, false});
  write_float_rows(w, 0, n, {x.data(), SourceType::f32, k});
  return w;
}

// A recorded program over one new token each of 31 requests, two steps: enough rows for a rank to take its own from one
// attention to the next, and contexts so uneven that ranks take each other's requests. Layers differ in their heads, so
// that rows of buffers which share memory do not lie on each other. All logits.
std::vector<float> step(const std::vector<float>& x) {
  constexpr int kRequests = 31, kBlocks = 20, kHidden = 48, kLayers = 3;
  const PackedLinear table = float_matrix(60, kHidden, x);
  std::vector<PackedLinear> qkv, o;
  std::vector<AttentionLayer> layers;
  for (int i = 0; i < kLayers; ++i) {
    const int heads = 1 + 2 * i;
    layers.push_back({KvType::kI8, 16, heads, 1, 16, 0.25f, 0, 0.0f});
    qkv.push_back(float_matrix((heads + 2) * 16, kHidden, x));
    o.push_back(float_matrix(kHidden, heads * 16, x));
  }
  std::vector<std::vector<uint8_t>> caches;
  Program program(64, 64, 16);
  const int stream = program.new_buffer(RowKind::tokens, kHidden * 4);
  const auto multiply = [&](int source, const PackedLinear& w, RowKind rows, int out, bool accumulate) {
    RowsSpec spec;
    spec.rows = rows, spec.source = source, spec.gather = rows == RowKind::logits, spec.columns = w.k;
    spec.norm = std::vector<float>(static_cast<size_t>(w.k), 1.0f), spec.eps = 1e-6f;
    const int act = spec.act = program.new_buffer(rows, activation_row_bytes(ActKind::f32, w.k));
    program.append(make_rows(std::move(spec)), w.k);
    program.append(make_linear({rows, act, ActKind::f32, &w, out, false, accumulate, Gate::silu}), 0);
  };
  program.append(make_embed({&table, 1.0f, stream}), 0);
  for (size_t i = 0; i < kLayers; ++i) {
    const AttentionLayer& layer = layers[i];
    caches.emplace_back(static_cast<size_t>(layer.block_bytes() * kRequests * kBlocks), uint8_t{9});
    const int rows = program.new_buffer(RowKind::tokens, qkv[i].n * 4), out = program.new_buffer(RowKind::tokens, o[i].k * 4);
    multiply(stream, qkv[i], RowKind::tokens, rows, false);
    RopeSpec rope;
    rope.call = {}, rope.call.cache = caches.back().data(), rope.layer = layer, rope.group = 0, rope.qkv = rows;
    program.append(make_rope(std::move(rope)), rope_scratch_floats(layer));
    program.append(make_attention({layer, program.plan_for(layer, 0), caches.back().data(), rows, out}),
                   attention_scratch_floats(layer));
    multiply(out, o[i], RowKind::tokens, stream, true);
  }
  multiply(stream, table, RowKind::logits, kNone, false);
  program.finish();

  std::vector<int32_t> tokens, positions, starts = {0}, contexts, slots, tables;
  std::vector<int64_t> best(kRequests);
  std::vector<float> logits(kRequests * 60), highest(kRequests), all;
  bool finite[kRequests], kept[kRequests];
  for (int r = 0; r < kRequests; ++r) {
    tokens.push_back(r), positions.push_back(0), starts.push_back(r + 1), slots.push_back(0);
    contexts.push_back(r % 10 > 4 ? 290 : 3 + r), kept[r] = true;
    for (int b = 0; b < kBlocks; ++b) tables.push_back(b * kRequests + r);
  }
  std::vector<int32_t> wanted(starts.begin(), starts.end() - 1);
  for (int turn = 0; turn < 2; ++turn) {
    for (int r = 0; r < kRequests; ++r) {
      const int at = positions[r] = ++contexts[r] - 1;
      slots[r] = tables[static_cast<size_t>(r * kBlocks + at / 16)] * 16 + at % 16;
    }
    ProgramInputs in;
    in.num_tokens = in.num_requests = kRequests, in.num_logits = kRequests;
    in.token_ids = tokens.data(), in.positions = positions.data(), in.query_start = starts.data();
    in.context_lens = contexts.data(), in.logits_rows = wanted.data();
    in.groups = {{slots.data(), tables.data(), kBlocks}};
    in.logits = logits.data(), in.logits_stride = 60, in.logits_kept = kept;
    in.best = best.data(), in.highest = highest.data(), in.finite = finite;
    program.run(in);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
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
  for (int r = 0; rows_stay && r < kRequests; ++r) {  // a rank's own requests in its share, the longest first
    const AttentionItem* item = &plan.items[static_cast<size_t>(r)];
    const int share = kRequests / ranks, first = r / share * share;
    right = right && item->request >= first && item->request < first + share;
    right = right && (r == first || item->tile_count <= item[-1].tile_count);
  }
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

// Regions are counted on one rank, too: what rests while one runs looks there.
bool counted() {
  set_num_threads(1);
  const uint64_t before = regions_begun();
  bool seen = false;
  parallel([&](Team&) { seen = region_runs(); });
  return seen && !region_runs() && regions_begun() == before + 1;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
  bool right = pool();
  right = counted() && right;
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
  set_num_threads(1);
  const auto alone = step(x);
  for (const int ranks : {2, 3}) {
    set_num_threads(ranks);
    for (int turn = 0; turn < 20; ++turn) right = same(alone, step(x)) && right;
  }
  // Another engine changes the number of ranks between planning a step and running it.
  std::atomic<bool> over{false};
  std::thread other([&] {
    for (int ranks = 2; !over; ranks = 5 - ranks) set_num_threads(ranks);
  });
  for (int turn = 0; turn < 60; ++turn) right = same(alone, step(x)) && right;
  over = true;
  other.join();
  std::puts(right ? "no races; one answer for every number of ranks" : "the answer depends on the number of ranks, or see above");
  return right ? 0 : 1;
}
