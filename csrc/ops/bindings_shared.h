// What the Python bindings of single ops and of programs share: checks of attention's arguments.
#pragma once

#include <string>

#include "arrays.h"
#include "ops/attention.h"
#include "ops/rows.h"

namespace pm {

AttentionLayer make_layer(int kv_type, int block_size, int num_heads, int num_kv_heads, int head_dim, float scale,
                          int window, float softcap, bool causal = true);
// gelu or tanh.
Activate activation_named(const std::string& name);
// Every index that the attention kernel will follow.
void check_batch(const AttentionLayer& layer, const AttentionBatch& batch, int64_t num_tokens, int64_t num_blocks);
// The size of a qk norm, 0 where the argument was None.
int check_norm(const Vec<const float>& norm, int heads, int head_dim);
// The values of a head that a table rotates, 0 where the argument was None.
int check_rotary(const Cube<const float>& table, int head_dim);

}  // namespace pm
