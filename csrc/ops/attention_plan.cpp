#include "ops/attention_plan.h"

#include <algorithm>
#include <limits>

#include "core/isa.h"

namespace pm {

PM_DEFINE_PICK(AttentionTable, attention)

int64_t attention_scratch_floats(const AttentionLayer& layer) {
  const int64_t row = kTile + 2 * layer.padded_dim() + layer.query_words() + 8;
  return (kTileRows * row + 2 * kTile + 15) / 16 * 16;
}

int64_t attention_partial_floats(const AttentionLayer& layer) { return kTileRows * (layer.padded_dim() + 2); }

namespace {

// Work of an item in row x key units; the constant stands for staging the query and writing the output.
int64_t cost_of(const AttentionItem& item) {
  return int64_t{item.head_count} * item.row_count * (item.tile_count * kTile + 32);
}

// From so many requests for each rank on, a request with one new token is one item: its KV heads lie side by side in
// each block, and what an item costs by itself is paid once.
constexpr int kRequestsPerRank = 4;

// Of the cache, a rank fetches at most so many bytes ahead: about what a shared last cache level holds for each core.
constexpr int64_t kMostAhead = 4 << 20;

// Cuts items of more than `most` so that no rank is left with one long context while the others are done. Where the
// cuts fall depends on the load; the arithmetic does not, because each tile is computed alone and merged in order.
void cut_long_items(AttentionPlan& plan, int64_t most) {
  std::vector<AttentionItem> heads, cut;
  for (const auto& item : plan.items) {
    if (item.head_count == 1 || cost_of(item) <= most) {
      heads.push_back(item);
      continue;
    }
    for (int h = 0; h < item.head_count; ++h) {
      heads.push_back(item);
      heads.back().kv_head = item.kv_head + h;
      heads.back().head_count = 1;
    }
  }
  for (const auto& item : heads) {
    if (item.head_count > 1 || item.members || item.tile_count < 2 || cost_of(item) <= most) {
      cut.push_back(item);
      continue;
    }
    const int parts = static_cast<int>(std::min<int64_t>(item.tile_count, (cost_of(item) + most - 1) / most));
    AttentionItem whole = item;
    whole.partial = plan.num_partials;
    plan.merges.push_back(whole);
    for (int part = 0; part < parts; ++part) {
      const int begin = item.tile_count * part / parts, end = item.tile_count * (part + 1) / parts;
      AttentionItem piece = item;
      piece.tile_begin = item.tile_begin + begin;
      piece.tile_count = end - begin;
      piece.partial = plan.num_partials + begin;
      cut.push_back(piece);
    }
    plan.num_partials += item.tile_count;
  }
  plan.items.swap(cut);
}

// Requests of one new token whose query comes after the first tile, in the order of their block tables: those that
// begin alike stand together.
std::vector<int32_t> in_order_of_tables(const AttentionLayer& layer, const AttentionBatch& batch) {
  std::vector<int32_t> order;
  for (int r = 0; r < batch.num_requests; ++r)
    if (batch.query_start[r + 1] - batch.query_start[r] == 1 && batch.context_lens[r] > kTile) order.push_back(r);
  const auto table = [&](int32_t r) { return batch.block_tables + r * batch.table_stride; };
  const auto end = [&](int32_t r) { return table(r) + (batch.context_lens[r] - 1) / layer.block_size + 1; };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::lexicographical_compare(table(a), end(a), table(b), end(b));
  });
  return order;
}

// Tiles before both requests' queries, at most `limit`, that lie in the same blocks.
int tiles_in_common(const AttentionLayer& layer, const AttentionBatch& batch, int32_t a, int32_t b, int limit) {
  limit = std::min({limit, (batch.context_lens[a] - 1) / kTile, (batch.context_lens[b] - 1) / kTile});
  const int32_t* mine = batch.block_tables + a * batch.table_stride;
  const int32_t* other = batch.block_tables + b * batch.table_stride;
  const int blocks = (limit * kTile + layer.block_size - 1) / layer.block_size;
  const int same = static_cast<int>(std::mismatch(mine, mine + blocks, other).first - mine);
  return std::min(limit, same * layer.block_size / kTile);
}

// Whether there is one item for each request, in their order, and each request has one new token.
bool one_each(const std::vector<AttentionItem>& items, const AttentionBatch& batch) {
  bool each = static_cast<int>(items.size()) == batch.num_requests;
  for (int r = 0; each && r < batch.num_requests; ++r)
    each = items[static_cast<size_t>(r)].request == r && batch.query_start[r + 1] == r + 1;
  return each;
}

// From the dearest down to the cheapest, dealt like cards, there and back: the team's ranks take equal shares that lie
// side by side, and each then costs about the same.
void deal(std::vector<AttentionItem>& items, int num_threads) {
  const auto n = static_cast<int64_t>(items.size());
  const int64_t rounds = n / num_threads;
  int64_t left = rounds * num_threads;  // the last, incomplete round goes to the ranks with the larger shares
  std::vector<AttentionItem> dealt;
  dealt.reserve(items.size());
  for (int rank = 0; rank < num_threads; ++rank) {
    for (int64_t round = 0; round < rounds; ++round) {
      const int64_t seat = round % 2 == 0 ? rank : num_threads - 1 - rank;
      dealt.push_back(items[static_cast<size_t>(round * num_threads + seat)]);
    }
    const int64_t share = n * (rank + 1) / num_threads - n * rank / num_threads;
    if (share > rounds) dealt.push_back(items[static_cast<size_t>(left++)]);
  }
  items.swap(dealt);
}

}  // namespace

// Requests that share their first tiles walk them together: each key is then read, and each value widened, for the rows
// of all. Of the requests that may join one, so many do as save most reading. A group costs `most` at the most, so that
// there are enough of them to go round.
void AttentionPlan::group_requests(const AttentionLayer& layer, const AttentionBatch& batch, int64_t most) {
  const int heads = layer.group_heads(), room = kTileRows / heads;
  members = in_order_of_tables(layer, batch);
  std::vector<AttentionItem> groups;
  std::vector<bool> grouped(static_cast<size_t>(batch.num_requests));
  for (size_t i = 0; i + 1 < members.size();) {
    AttentionItem best{members[i], 0, 1, 0, heads, 0, 0, -1, &members[i], 0};
    AttentionItem item = best;
    int shared = std::numeric_limits<int>::max(), saved = 0;
    for (size_t j = i; j < members.size() && j - i < static_cast<size_t>(room); ++j) {
      if (j > i) shared = tiles_in_common(layer, batch, members[i], members[j], shared);
      item.row_count = static_cast<int>(j - i + 1) * heads;
      item.tile_count = std::max(item.tile_count, (batch.context_lens[members[j]] - 1) / kTile + 1);
      item.shared_tiles = shared;
      if (shared == 0 || cost_of(item) > most) break;
      const int saves = static_cast<int>(j - i) * shared;
      if (saves > saved) best = item, saved = saves;
    }
    const size_t end = i + static_cast<size_t>(best.row_count / heads);
    if (saved > 0) groups.push_back(best);
    for (; i < end; ++i) grouped[static_cast<size_t>(members[i])] = saved > 0;
  }
  std::erase_if(items, [&](const AttentionItem& item) { return grouped[static_cast<size_t>(item.request)]; });
  for (int kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head) {  // the groups of a head in turn: their keys may be one
    for (AttentionItem item : groups) {
      item.kv_head = kv_head;
      items.push_back(item);
    }
  }
}

void AttentionPlan::build(const AttentionLayer& layer, const AttentionBatch& batch, int num_threads, bool rows_stay) {
  items.clear();
  merges.clear();
  num_partials = 0;
  ranks_follow_rows = 0;
  const int heads = layer.group_heads();
  for (int r = 0; r < batch.num_requests; ++r) {
    const int queries = batch.query_start[r + 1] - batch.query_start[r], start = batch.context_lens[r] - queries;
    const int together = queries == 1 && batch.num_requests >= kRequestsPerRank * num_threads ? layer.num_kv_heads : 1;
    for (int kv_head = 0; kv_head < layer.num_kv_heads; kv_head += together) {
      for (int row = 0; row < queries * heads; row += kTileRows) {
        const int rows = std::min(kTileRows, queries * heads - row);
        const int first = start + row / heads;
        const int last = layer.causal ? start + (row + rows - 1) / heads : batch.context_lens[r] - 1;
        const int oldest = layer.window ? std::max(0, first - layer.window + 1) : 0;
        const int tile = oldest / kTile;
        items.push_back({r, kv_head, together, row, rows, tile, last / kTile + 1 - tile, -1});
      }
    }
  }
  int64_t total = 0;
  for (const auto& item : items) total += cost_of(item);
  const int64_t most = num_threads > 1 ? total / (4 * num_threads) + 1 : total;
  if (layer.causal && layer.window == 0) group_requests(layer, batch, most);
  if (num_threads > 1) {
    cut_long_items(*this, most);
    if (rows_stay && one_each(items, batch)) ranks_follow_rows = num_threads;
    const auto n = static_cast<int64_t>(items.size());
    const auto dearest_first = [&](int64_t begin, int64_t end) {
      std::stable_sort(items.begin() + begin, items.begin() + end,
                       [](const AttentionItem& a, const AttentionItem& b) { return cost_of(a) > cost_of(b); });
    };
    if (ranks_follow_rows > 0) {
      for (int rank = 0; rank < num_threads; ++rank) dearest_first(n * rank / num_threads, n * (rank + 1) / num_threads);
    } else {
      dearest_first(0, n);
      deal(items, num_threads);
    }
  }
  extents.resize(static_cast<size_t>(num_threads));
}

// Of the requests with one new token: with more the keys are few for the work that they cause. Nor the tiles that several
// requests share, of which the same holds. In the order of the items; blocks that lie side by side are one extent.
void AttentionPlan::list_extents(const AttentionLayer& layer, const AttentionBatch& batch, const Team& team) {
  const int64_t head_bytes = layer.head_words() * 4;
  std::vector<Extent>& out = extents[static_cast<size_t>(team.rank())];
  out.clear();
  int64_t bytes = 0;
  const auto add = [&](const AttentionItem& item, int request, int tile_begin, int tile_end) {
    const int32_t* table = batch.block_tables + request * batch.table_stride;
    const int context = batch.context_lens[request], oldest = layer.window ? std::max(0, context - layer.window) : 0;
    const int first = std::max(tile_begin * kTile, oldest) / layer.block_size;
    const int last = (std::min(tile_end * kTile, context) - 1) / layer.block_size;
    for (int i = first; i <= last && bytes < kMostAhead; ++i) {
      const Extent next{table[i] * layer.block_bytes() + item.kv_head * head_bytes, item.head_count * head_bytes};
      bytes += next.bytes;
      if (!out.empty() && out.back().begin + out.back().bytes == next.begin)
        out.back().bytes += next.bytes;
      else
        out.push_back(next);
    }
  };
  const auto n = static_cast<int64_t>(items.size());
  for (int64_t i = team.first_of_share(n); i < team.end_of_share(n) && bytes < kMostAhead; ++i) {
    const AttentionItem& item = items[static_cast<size_t>(i)];
    if (item.members != nullptr) {
      for (int m = 0; m < item.row_count / layer.group_heads(); ++m)
        add(item, item.members[m], item.shared_tiles, (batch.context_lens[item.members[m]] - 1) / kTile + 1);
    } else if (batch.query_start[item.request + 1] - batch.query_start[item.request] == 1) {
      add(item, item.request, item.tile_begin, item.tile_begin + item.tile_count);
    }
  }
}

void attention_run(Team& team, const AttentionPlan& plan, const AttentionCall& call, float* memory) {
  const AttentionTable& table = pick_attention();
  table.items(team, call, plan.items.data(), static_cast<int64_t>(plan.items.size()), memory);
  if (plan.merges.empty()) return;
  team.barrier();
  const auto merges = static_cast<int64_t>(plan.merges.size());
  team.for_each(merges, [&](int64_t i) { table.merge(call, plan.merges[i], memory); });
}

}  // namespace pm
