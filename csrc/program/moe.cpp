// Mixture of experts: route each row, sort the (row, expert) pairs by expert, run every expert over its pairs, sum up.
//
// All experts go through each phase together, so a layer costs a handful of barriers however many experts it has. A
// row's result is the sum over its experts in ascending order of expert: it does not depend on the other rows.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "linear/table.h"
#include "program/instructions.h"

namespace pm {
namespace {

class Moe final : public Instruction {
 public:
  explicit Moe(MoeSpec spec)
      : s_(std::move(spec)),
        num_experts_(static_cast<int64_t>(s_.gate_up.size())),
        chosen_(static_cast<size_t>(s_.max_rows * s_.top_k)),
        slot_(chosen_.size()),
        pair_row_(chosen_.size()),
        begin_(static_cast<size_t>(num_experts_ + 1)) {}

  const char* name() const override { return "moe"; }
  RowKind rows() const override { return s_.rows; }
  bool together() const override { return true; }
  std::vector<int> buffers() const override {
    return {s_.router, s_.act, s_.pairs_in, s_.inner, s_.pairs_act, s_.pairs_out, s_.out};
  }

  void run(Team& team, const Frame& frame) const override {
    const int64_t pairs = frame.count * s_.top_k;
    const LinearTable& linear = pick_linear();
    team.for_each(frame.count, [&](int64_t i) { route(frame.floats(s_.router, frame.first + i), &chosen_[at(i)]); });
    team.barrier();
    if (team.rank() == 0) sort_pairs(frame.count);
    team.barrier();

    const int64_t in_bytes = activation_row_bytes(s_.in_kind, s_.hidden);
    std::byte* in = frame.row(s_.pairs_in, frame.first);
    team.for_each(pairs, [&](int64_t p) {
      const std::byte* from = frame.row(s_.act, frame.first + pair_row_[static_cast<size_t>(p)]);
      std::copy(from, from + in_bytes, in + p * in_bytes);
    });
    team.barrier();

    float* inner = frame.floats(s_.inner, frame.first);
    multiply(team, s_.gate_up, s_.in_kind, s_.hidden, in, in_bytes, inner);
    team.barrier();

    const int64_t act_bytes = activation_row_bytes(s_.down_kind, s_.intermediate);
    std::byte* act = frame.row(s_.pairs_act, frame.first);
    team.for_each(pairs, [&](int64_t p) {
      float* row = inner + p * s_.intermediate;
      if (s_.down_hadamard) linear.hadamard_row(row, s_.intermediate, s_.down_hadamard);
      linear.prepare_row(s_.down_kind, row, s_.intermediate, act + p * act_bytes);
    });
    team.barrier();

    float* out = frame.floats(s_.pairs_out, frame.first);
    multiply(team, s_.down, s_.down_kind, s_.intermediate, act, act_bytes, out);
    team.barrier();

    team.for_each(frame.count, [&](int64_t i) {
      float* to = frame.floats(s_.out, frame.first + i);
      std::fill(to, to + s_.hidden, 0.0f);
      for (int64_t j = 0; j < s_.top_k; ++j) {
        const float* y = out + slot_[at(i) + static_cast<size_t>(j)] * s_.hidden;
        pick_rows().add(to, y, chosen_[at(i) + static_cast<size_t>(j)].second, s_.hidden, to);
      }
    });
  }

 private:
  size_t at(int64_t row) const { return static_cast<size_t>(row * s_.top_k); }

  // The best top_k experts, lower ids first among equals, in ascending order of expert, with their probabilities.
  void route(const float* scores, std::pair<int32_t, float>* chosen) const {
    const float top = *std::max_element(scores, scores + num_experts_);
    float total = 0, kept = 0;
    for (int64_t e = 0; e < num_experts_; ++e) total += std::exp(scores[e] - top);
    for (int64_t j = 0; j < s_.top_k; ++j) {
      int64_t best = -1;
      for (int64_t e = 0; e < num_experts_; ++e) {
        bool taken = false;
        for (int64_t past = 0; past < j; ++past) taken = taken || chosen[past].first == e;
        if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
      }
      chosen[j] = {static_cast<int32_t>(best), std::exp(scores[best] - top) / total};
      kept += chosen[j].second;
    }
    if (s_.renormalize)
      for (int64_t j = 0; j < s_.top_k; ++j) chosen[j].second /= kept;
    std::sort(chosen, chosen + s_.top_k, [](const auto& a, const auto& b) { return a.first < b.first; });
  }

  void sort_pairs(int64_t rows) const {
    std::fill(begin_.begin(), begin_.end(), 0);
    const size_t pairs = at(rows);
    for (size_t p = 0; p < pairs; ++p) ++begin_[static_cast<size_t>(chosen_[p].first) + 1];
    for (size_t e = 0; e + 1 < begin_.size(); ++e) begin_[e + 1] += begin_[e];
    std::vector<int64_t>& next = next_;
    next.assign(begin_.begin(), begin_.end() - 1);
    for (size_t p = 0; p < pairs; ++p) {
      slot_[p] = next[static_cast<size_t>(chosen_[p].first)]++;
      pair_row_[static_cast<size_t>(slot_[p])] = static_cast<int64_t>(p) / s_.top_k;
    }
  }

  void multiply(Team& team, const std::vector<const PackedLinear*>& weights, ActKind kind, int64_t k, std::byte* rows,
                int64_t row_bytes, float* out) const {
    for (int64_t e = 0; e < num_experts_; ++e) {
      const int64_t first = begin_[static_cast<size_t>(e)], count = begin_[static_cast<size_t>(e) + 1] - first;
      if (count == 0) continue;
      const PackedLinear* w = weights[static_cast<size_t>(e)];
      const Activation x{kind, count, k, row_bytes, rows + first * row_bytes};
      linear_run(team, {x, w, out + first * w->n, w->n, false, s_.gate});
    }
  }

  MoeSpec s_;
  int64_t num_experts_;
  // Of the tile in work; a program runs one step at a time.
  mutable std::vector<std::pair<int32_t, float>> chosen_;  // [rows][top_k] expert, weight
  mutable std::vector<int64_t> slot_;                      // [rows][top_k] the pair's place, sorted by expert
  mutable std::vector<int64_t> pair_row_;                  // [pairs] the row of a place
  mutable std::vector<int64_t> begin_;                     // [experts + 1] an expert's first place
  mutable std::vector<int64_t> next_;
};

}  // namespace

std::unique_ptr<Instruction> make_moe(MoeSpec spec) { return std::make_unique<Moe>(std::move(spec)); }

}  // namespace pm
