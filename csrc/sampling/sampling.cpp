#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/isa.h"

namespace pm {
PM_DEFINE_PICK(SamplingTable, sampling)

namespace {

bool heavier(const Candidate& a, const Candidate& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

double mass_of(const Candidate* found, int64_t count) {
  double mass = 0;
  for (int64_t i = 0; i < count; ++i) mass += found[i].weight;
  return mass;
}

double mass_of(const float* block_mass, int64_t vocab) {
  double mass = 0;
  for (int64_t b = 0; b * kMassBlock < vocab; ++b) mass += block_mass[b];
  return mass;
}

// Candidates enough for the filters: those above a bound that is lowered until top_k of them, or the mass of top_p, are
// among them. Ascending ids.
int64_t enough(const SamplingTable& table, const Draw& row, const DrawMemory& memory, double wanted_mass) {
  for (float least = 0x1p-8f;; least = least > 0x1p-60f ? least * 0x1p-8f : 0x1p-149f) {
    const int64_t count = table.collect(memory.weights, row.vocab, least, memory.found);
    if (least == 0x1p-149f) return count;
    if (row.top_k > 0 ? count >= row.top_k : mass_of(memory.found, count) >= wanted_mass) return count;
  }
}

// The last candidate, heaviest first, before which the mass is below `limit`. Reorders found. Expected O(count).
Candidate last_within(Candidate* found, int64_t count, double limit) {
  int64_t low = 0, high = count;  // the one looked for is in [low, high)
  double before = 0;              // mass of [0, low)
  while (high - low > 32) {
    Candidate a = found[low], b = found[(low + high) / 2], c = found[high - 1];
    if (heavier(b, a)) std::swap(a, b);
    const Candidate pivot = heavier(c, a) ? a : heavier(c, b) ? c : b;  // the median: something lies on each side of it
    const int64_t middle =
        std::partition(found + low, found + high, [&](const Candidate& x) { return heavier(x, pivot); }) - found;
    const double mass = mass_of(found + low, middle - low);
    if (before + mass >= limit) {
      high = middle;
    } else {
      before += mass;
      low = middle;
    }
  }
  std::sort(found + low, found + high, heavier);
  int64_t last = low;
  for (int64_t i = low; i < high && (i == 0 || before < limit); ++i) {
    last = i;
    before += found[i].weight;
  }
  return found[last];
}

// The last of the candidates, heaviest first, that top_k and top_p keep.
Candidate last_kept(const Draw& row, Candidate* found, int64_t count, double whole) {
  if (row.top_k > 0 && row.top_k < count) {
    std::nth_element(found, found + row.top_k - 1, found + count, heavier);
    count = row.top_k;
  }
  if (row.top_p >= 1) return *std::max_element(found, found + count, heavier);
  return last_within(found, count, static_cast<double>(row.top_p) * (row.top_k > 0 ? mass_of(found, count) : whole));
}

// Along whole blocks first, then along the weights of the one where the target lies.
int64_t pick(const DrawMemory& memory, int64_t vocab, double target) {
  double before = 0;
  int64_t last_weighty = 0;
  for (int64_t b = 0; b * kMassBlock < vocab; ++b) {
    if (!(memory.block_mass[b] > 0)) continue;
    last_weighty = b;
    if (before + memory.block_mass[b] > target) break;
    before += memory.block_mass[b];
  }
  const int64_t first = last_weighty * kMassBlock, last = std::min(first + kMassBlock, vocab);
  int64_t picked = first;
  for (int64_t i = first; i < last; ++i) {
    if (!(memory.weights[i] > 0)) continue;
    picked = i;
    before += memory.weights[i];
    if (before > target) break;
  }
  return picked;
}

}  // namespace

double uniform(uint64_t seed, uint64_t position) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
  }
  return ((c0 >> 5) * 67108864.0 + (c1 >> 6) + 0.5) * 0x1p-53;
}

int64_t draw(const SamplingTable& table, const Draw& row, const DrawMemory& memory) {
  const float highest = table.extremes(row.logits, row.vocab, nullptr).highest;
  table.weigh(row.logits, row.vocab, highest, 1.0f / row.temperature, row.min_p, memory.weights, memory.block_mass);
  const double noise = uniform(row.seed, row.position);
  const double whole = mass_of(memory.block_mass, row.vocab);
  if ((row.top_k <= 0 || row.top_k >= row.vocab) && row.top_p >= 1) return pick(memory, row.vocab, noise * whole);
  const int64_t count = enough(table, row, memory, row.top_p * whole);
  table.cut(memory.weights, row.vocab, last_kept(row, memory.found, count, whole), memory.block_mass);
  return pick(memory, row.vocab, noise * mass_of(memory.block_mass, row.vocab));
}

ChosenLogprob logprobs(const SamplingTable& table, const float* logits, int64_t vocab, int64_t chosen, int64_t most,
                       const DrawMemory& memory, int64_t* ids, float* values) {
  const float highest = table.extremes(logits, vocab, nullptr).highest;
  table.weigh(logits, vocab, highest, 1.0f, 0.0f, memory.weights, memory.block_mass);
  const double log_sum = highest + std::log(mass_of(memory.block_mass, vocab));
  int64_t count = 0;
  float below = 4;
  for (; most > 0 && count < most && std::isfinite(highest - below); below *= 4)
    count = table.collect(logits, vocab, highest - below, memory.found);
  if (count < most) {  // fewer are above minus infinity, or the highest is infinite itself: all of them, NaN last
    for (count = 0; count < vocab; ++count) {
      const bool is_number = !std::isnan(logits[count]);
      const float weight = is_number ? logits[count] : -std::numeric_limits<float>::infinity();
      memory.found[count] = {weight, static_cast<int32_t>(count)};
    }
  }
  std::partial_sort(memory.found, memory.found + most, memory.found + count, heavier);
  for (int64_t i = 0; i < most; ++i) {
    ids[i] = memory.found[i].id;
    values[i] = static_cast<float>(memory.found[i].weight - log_sum);
  }
  return {static_cast<float>(logits[chosen] - log_sum), 1 + table.count_above(logits, vocab, logits[chosen])};
}

}  // namespace pm
