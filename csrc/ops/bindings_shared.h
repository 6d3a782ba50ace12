// What the Python bindings of single ops and of programs share: array types and argument checks.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "ops/attention.h"
#include "ops/rows.h"

namespace pm {

template <class T>
using Vec = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Mat = nanobind::ndarray<T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Cube = nanobind::ndarray<T, nanobind::ndim<3>, nanobind::c_contig, nanobind::device::cpu>;

inline void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

AttentionLayer make_layer(int kv_type, int block_size, int num_heads, int num_kv_heads, int head_dim, float scale,
                          int window, float softcap, bool causal = true);
// gelu or tanh.
Activate activation_named(const std::string& name);
// Every index that the attention kernel will follow.
void check_batch(const AttentionLayer& layer, const AttentionBatch& batch, int64_t num_tokens, int64_t num_blocks);
// The size of a qk norm, 0 without one.
int check_norm(const std::optional<Vec<const float>>& norm, int heads, int head_dim);

}  // namespace pm
