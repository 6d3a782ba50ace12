// Choosing tokens: best token and finiteness of a row of logits, and seeded draws from filtered rows.
//
// Definition of a draw (pagemill/sampling/noise.py has the same for every sampler): with m = max of the row, token i
// weighs w_i = exp((l_i - m) / T). min_p drops w_i < min_p; of the others top_k keeps the k heaviest and top_p of those
// the heaviest while the mass before is below p of theirs; equal weights count by ascending id. One uniform number, from
// (seed, position) alone, picks along the ids in ascending order.
//
// Exactness. Rows share nothing, and every sum's order depends on the row alone.
#pragma once

#include <cstdint>

namespace pm {

constexpr int kMassBlock = 256;  // weights that are summed together

struct RowExtremes {
  int64_t best;  // lowest id of the highest allowed logit
  float highest;
  bool finite;   // all of the row, also what is not allowed
};

struct Candidate {
  float weight;
  int32_t id;
};

// One row to draw from.
struct Draw {
  const float* logits;  // [vocab], finite or -inf, not all -inf
  int64_t vocab;
  float temperature;  // > 0
  float min_p;        // 0: off
  float top_p;        // >= 1: off
  int32_t top_k;      // 0: off
  uint64_t seed;
  uint64_t position;
};

struct SamplingTable {
  // Token i is allowed where bit i % 32 of mask[i / 32] is 1; null: all.
  RowExtremes (*extremes)(const float* logits, int64_t vocab, const uint32_t* mask);
  // weights[i] = exp((logits[i] - highest) * scale), 0 where below `least`; block_mass[b] = their sum over each block of
  // kMassBlock. Both padded: weights to a multiple of 16.
  void (*weigh)(const float* logits, int64_t vocab, float highest, float scale, float least, float* weights,
                float* block_mass);
  // All (weight, id) with weight >= least, by ascending id, into found; returns how many. Also for logits.
  int64_t (*collect)(const float* weights, int64_t vocab, float least, Candidate* found);
  // Sets to 0 every weight that is lighter than `last`, or as heavy with a higher id; block_mass anew.
  void (*cut)(float* weights, int64_t vocab, Candidate last, float* block_mass);
  // How many logits are above `bound`.
  int64_t (*count_above)(const float* logits, int64_t vocab, float bound);
  // logits[i] = -inf where bit i % 32 of mask[i / 32] is 0.
  void (*forbid)(float* logits, int64_t vocab, const uint32_t* mask);
};
const SamplingTable& pick_sampling();

// A number in (0, 1) from (seed, position): Philox4x32-10, stream 0.
double uniform(uint64_t seed, uint64_t position);

// Memory of one thread for draws from rows of up to `vocab` tokens.
struct DrawMemory {
  float* weights;      // [vocab rounded up to 16]
  float* block_mass;   // [ceil(vocab / kMassBlock)]
  Candidate* found;    // [vocab]
};
int64_t draw(const SamplingTable& table, const Draw& row, const DrawMemory& memory);

// Log probability of `chosen` and its rank (1: the best; equals share one), and the `most` best tokens, ids [most] and
// values [most], best first and equals by ascending id. The row is finite; most <= vocab.
struct ChosenLogprob {
  float value;
  int64_t rank;
};
ChosenLogprob logprobs(const SamplingTable& table, const float* logits, int64_t vocab, int64_t chosen, int64_t most,
                       const DrawMemory& memory, int64_t* ids, float* values);

}  // namespace pm
