// Paged attention: what a step and a layer look like to the kernel, and how the work is cut.
//
// KV layout. The cache of a layer is [num_blocks][block_bytes]; inside a block, in words of 32 bits,
//   [kv_head][block_size / 16] groups of 16 tokens, each
//     keys    [key_steps][16]          a word holds one token's float d, bf16 pair (d, d + 1) or bytes d .. d + 3
//     values  [value_steps][padded]    a float of token s, or the bf16 or byte pair of tokens (2 s, 2 s + 1)
//     scales  [2][16] bf16             of the tokens' keys and values, where they are bytes
// with padded = head_dim rounded up to 16. A register of scores thus holds 16 keys of one query, one of outputs 16
// dimensions, and no lane is ever summed across.
//
// Bytes. A token's key and value in one KV head are each 127 steps of one bf16 scale to either side of 0. Keys are
// multiplied by a Hadamard matrix first, as queries are before the product: a few dimensions of a key are much larger
// than the rest, and would cost 0.15 % of perplexity (SmolLM2-135M) by the coarse steps they force. Keys are stored
// plus 128, as the instruction that multiplies unsigned by signed bytes wants them; values as they are.
//
// Exactness. A query's keys are walked in tiles of 256 positions aligned to position 0. Each tile alone yields a
// maximum, a sum and an output; they are merged in order of position. So chunks, neighbours, threads and physical
// blocks cannot change a bit, a long context may be cut at any tile, and requests may walk the tiles they share together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pm {

class Team;

enum class KvType : int32_t { kBf16 = 0, kF32 = 1, kI8 = 2 };

constexpr int kGroup = 16;  // tokens of one group
constexpr int kTile = 256;  // positions of one tile
constexpr int kTileRows = 24;  // (query, head) rows of one work item; 4 x 6, 6 x 4 and 12 x 2 blocks fill it

struct AttentionLayer {
  KvType type;
  int block_size;  // tokens, a multiple of 16
  int num_heads, num_kv_heads, head_dim;
  float scale;    // > 0
  int window;     // a query sees this many positions, itself included; 0: all
  float softcap;  // 0: none
  bool causal = true;  // a query sees the keys up to its own; else all of its request's, and window is 0

  int group_heads() const { return num_heads / num_kv_heads; }
  int padded_dim() const { return (head_dim + 15) / 16 * 16; }
  bool bytes() const { return type == KvType::kI8; }
  int key_steps() const { return bytes() ? (head_dim + 3) / 4 : type == KvType::kBf16 ? (head_dim + 1) / 2 : head_dim; }
  int value_steps() const { return type == KvType::kF32 ? kGroup : kGroup / 2; }
  int value_step_words() const { return bytes() ? padded_dim() / 2 : padded_dim(); }
  int scales_at() const { return kGroup * key_steps() + value_steps() * value_step_words(); }  // words into a group
  int group_words() const { return scales_at() + (bytes() ? kGroup : 0); }
  int query_words() const { return bytes() ? padded_dim() / 4 : key_steps(); }  // of a row that meets the keys
  int hadamard_block() const { return head_dim & -head_dim; }                   // the largest that fits
  int64_t head_words() const { return int64_t{group_words()} * (block_size / kGroup); }
  int64_t block_bytes() const { return head_words() * num_kv_heads * 4; }
};

// The rows of a step, in the order of their queries. Plain arrays, owned by the caller.
struct AttentionBatch {
  int num_requests = 0;
  const int32_t* query_start = nullptr;   // [num_requests + 1]
  const int32_t* context_lens = nullptr;  // [num_requests], the new tokens included
  const int32_t* block_tables = nullptr;  // [num_requests][table_stride]
  int64_t table_stride = 0;
};

struct AttentionItem {
  int32_t request, kv_head, head_count;  // KV heads [kv_head, kv_head + head_count), more than one where queries are few
  int32_t row_begin, row_count;    // rows of (query, head of the group) in each, query-major; at most kTileRows
  int32_t tile_begin, tile_count;  // tiles to walk
  int32_t partial;                 // -1: write the output; else the first of tile_count slots, merged afterwards; then
                                   // head_count is 1
  // Requests of one new token each, `request` the first, whose block tables begin alike; else null. The rows, all heads
  // of each in turn, walk shared_tiles tiles together and then each request's own, the most of which tile_count covers.
  const int32_t* members = nullptr;
  int32_t shared_tiles = 0;
};

// Floats one thread needs, and floats one partial slot takes.
int64_t attention_scratch_floats(const AttentionLayer& layer);
int64_t attention_partial_floats(const AttentionLayer& layer);

struct AttentionCall {
  const AttentionLayer* layer;
  const AttentionBatch* batch;
  const uint8_t* cache;  // [num_blocks][block_bytes]
  const float* query;    // [num_tokens][query_stride], head h at h * head_dim
  int64_t query_stride;
  float* out;  // [num_tokens][out_stride]
  int64_t out_stride;
  float* partials;  // [num_partials][attention_partial_floats]
};

// What each instruction set provides. `memory`: attention_scratch_floats() floats of this thread alone. `items` shares its
// items out by the team's for_each, without a barrier at either end.
struct AttentionTable {
  void (*items)(Team&, const AttentionCall&, const AttentionItem* items, int64_t n, float* memory);
  void (*merge)(const AttentionCall&, const AttentionItem&, float* memory);
};
const AttentionTable& pick_attention();

}  // namespace pm
