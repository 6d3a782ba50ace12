#include "program/instructions.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "linear/pack.h"
#include "linear/table.h"
#include "sampling/sampling.h"

namespace pm {
namespace {

template <class F>
void for_rows(Team& team, const Frame& frame, F f) {
  team.for_each(frame.count, [&](int64_t i) { f(frame.first + i); });
}

class Embed final : public Instruction {
 public:
  explicit Embed(EmbedSpec spec) : s_(spec) {}
  const char* name() const override { return "embed"; }
  std::vector<int> buffers() const override { return {s_.out}; }
  void run(Team& team, const Frame& frame) const override {
    for_rows(team, frame, [&](int64_t row) {
      float* out = frame.floats(s_.out, row);
      unpack_row(*s_.table, frame.in->token_ids[row], out);
      if (s_.scale != 1.0f) pick_rows().scale_softcap(out, s_.table->k, s_.scale, 0);
    });
  }

 private:
  EmbedSpec s_;
};

class Positions final : public Instruction {
 public:
  explicit Positions(PositionsSpec spec) : s_(spec) {}
  const char* name() const override { return "positions"; }
  std::vector<int> buffers() const override { return {s_.out}; }
  void run(Team& team, const Frame& frame) const override {
    for_rows(team, frame, [&](int64_t row) {
      const float* from = s_.table + frame.in->positions[row] * s_.columns;
      std::copy(from, from + s_.columns, frame.floats(s_.out, row));
    });
  }

 private:
  PositionsSpec s_;
};

class LayerNorm final : public Instruction {
 public:
  explicit LayerNorm(LayerNormSpec spec) : s_(std::move(spec)) {}
  RowKind rows() const override { return s_.rows; }
  const char* name() const override { return "layer_norm"; }
  std::vector<int> buffers() const override { return {s_.source, s_.out}; }
  void run(Team& team, const Frame& frame) const override {
    const auto columns = static_cast<int64_t>(s_.weight.size());
    for_rows(team, frame, [&](int64_t row) {
      pick_rows().layer_norm(frame.floats(s_.source, row), s_.weight.data(), s_.bias.data(), columns, s_.eps,
                             frame.floats(s_.out, row));
    });
  }

 private:
  LayerNormSpec s_;
};

class ActivateRows final : public Instruction {
 public:
  explicit ActivateRows(ActivateSpec spec) : s_(spec) {}
  RowKind rows() const override { return s_.rows; }
  const char* name() const override { return "activate"; }
  std::vector<int> buffers() const override { return {s_.buffer}; }
  void run(Team& team, const Frame& frame) const override {
    for_rows(team, frame, [&](int64_t row) {
      pick_rows().activate(frame.floats(s_.buffer, row), s_.columns, s_.which);
    });
  }

 private:
  ActivateSpec s_;
};

class Rows final : public Instruction {
 public:
  explicit Rows(RowsSpec spec) : s_(std::move(spec)) {}
  RowKind rows() const override { return s_.rows; }
  const char* name() const override { return "rows"; }
  std::vector<int> buffers() const override {
    std::vector<int> used{s_.source};
    if (s_.out != kNone) used.push_back(s_.out);
    if (s_.act != kNone) used.push_back(s_.act);
    return used;
  }
  void run(Team& team, const Frame& frame) const override {
    const RowsTable& rows = pick_rows();
    const LinearTable& linear = pick_linear();
    for_rows(team, frame, [&](int64_t row) {
      const float* x = frame.floats(s_.source, s_.gather ? frame.in->logits_rows[row] : row);
      float* to = s_.result         ? frame.in->logits + row * frame.in->logits_stride
                  : s_.out != kNone ? frame.floats(s_.out, row)
                                    : frame.scratch(team);
      if (!s_.norm.empty()) {
        rows.rms_norm(x, s_.norm.data(), s_.columns, s_.eps, to);
        x = to;
      }
      if (s_.hadamard) {
        if (x != to) std::copy(x, x + s_.columns, to);
        linear.hadamard_row(to, s_.columns, s_.hadamard);
        x = to;
      }
      if (x != to && (s_.result || s_.out != kNone)) std::copy(x, x + s_.columns, to);
      if (s_.act != kNone) linear.prepare_row(s_.kind, x, s_.columns, frame.row(s_.act, row));
    });
  }

 private:
  RowsSpec s_;
};

constexpr float kLowest = -std::numeric_limits<float>::infinity();

constexpr RowBest nothing_known() {
  RowBest best{};
  for (float& value : best.value) value = kLowest;
  return best;
}
constexpr RowBest kNothingKnown = nothing_known();

// Adds what one rank knows of a row.
void merge_best(const RowBest& best, RowExtremes& found) {
  for (int lane = 0; lane < 16; ++lane) {
    const int64_t id = static_cast<int64_t>(best.step[lane]) * 16 + lane;
    if (best.value[lane] > found.highest || (best.value[lane] == found.highest && id < found.best)) {
      found.best = id;
      found.highest = best.value[lane];
    }
    found.finite = found.finite && best.taint[lane] == 0;
  }
}

void report_best(const ProgramInputs& in, int64_t row, const RowExtremes& found) {
  in.best[row] = found.best;
  in.highest[row] = found.highest;
  in.finite[row] = found.finite;
}

class Linear final : public Instruction {
 public:
  explicit Linear(LinearSpec spec) : s_(spec) {}
  RowKind rows() const override { return s_.rows; }
  const char* name() const override { return s_.out == kNone ? "logits" : s_.weight->gated ? "gated" : "linear"; }
  std::vector<int> buffers() const override {
    return s_.out == kNone ? std::vector<int>{s_.act} : std::vector<int>{s_.act, s_.out};
  }
  void run(Team& team, const Frame& frame) const override {
    const ProgramInputs& in = *frame.in;
    const Activation x{s_.kind, frame.count, s_.weight->k, frame.row_bytes(s_.act), frame.row(s_.act, frame.first)};
    LinearArgs args{.x = x, .w = s_.weight, .gate = s_.gate, .next = next_, .upcoming = frame.upcoming(team)};
    if (s_.out != kNone) {
      args.out = frame.floats(s_.out, frame.first);
      args.ldo = frame.row_bytes(s_.out) / 4;
      args.accumulate = s_.accumulate;
      return linear_run(team, args);
    }
    args.out = in.logits + frame.first * in.logits_stride;
    args.ldo = in.logits_stride;
    if (!s_.find_best) return linear_run(team, args);
    args.best = row_bests(frame, team.rank());
    args.kept = in.logits_kept + frame.first;
    std::fill(args.best, args.best + frame.count, kNothingKnown);
    linear_run(team, args);
    team.barrier();
    for_rows(team, frame, [&](int64_t row) {
      RowExtremes found{0, kLowest, true};
      const int first = team.size() == 1 ? team.rank() : 0;
      for (int rank = first; rank < first + team.size(); ++rank) merge_best(row_bests(frame, rank)[row - frame.first], found);
      report_best(in, row, found);
    });
  }
  const PackedLinear* weights() const override { return s_.weight; }
  void set_next_weights(const PackedLinear* next) override { next_ = next; }

 private:
  static RowBest* row_bests(const Frame& frame, int rank) { return reinterpret_cast<RowBest*>(frame.scratch(rank)); }

  LinearSpec s_;
  const PackedLinear* next_ = nullptr;
};

class Add final : public Instruction {
 public:
  explicit Add(AddSpec spec) : s_(spec) {}
  RowKind rows() const override { return s_.rows; }
  const char* name() const override { return "add"; }
  std::vector<int> buffers() const override { return {s_.out, s_.y}; }
  void run(Team& team, const Frame& frame) const override {
    for_rows(team, frame, [&](int64_t row) {
      float* out = frame.floats(s_.out, row);
      pick_rows().add(out, frame.floats(s_.y, row), s_.scale, s_.columns, out);
    });
  }

 private:
  AddSpec s_;
};

class Rope final : public Instruction {
 public:
  explicit Rope(RopeSpec spec) : s_(std::move(spec)) {
    s_.call.layer = &s_.layer;
    s_.call.q_norm = s_.q_norm.empty() ? nullptr : s_.q_norm.data();
    s_.call.k_norm = s_.k_norm.empty() ? nullptr : s_.k_norm.data();
    s_.call.q_norm_size = static_cast<int>(s_.q_norm.size());
    s_.call.k_norm_size = static_cast<int>(s_.k_norm.size());
  }
  const char* name() const override { return "rope"; }
  std::vector<int> buffers() const override { return {s_.qkv}; }
  void run(Team& team, const Frame& frame) const override {
    RopeCall call = s_.call;
    call.stride = frame.row_bytes(s_.qkv) / 4;
    call.qkv = frame.floats(s_.qkv, frame.first) - frame.first * call.stride;
    call.positions = frame.in->positions;
    call.slots = frame.in->groups[static_cast<size_t>(s_.group)].slots;
    rope_run(team, call, frame.first, frame.count, frame.scratch(team));
  }

 private:
  RopeSpec s_;
};

class Attention final : public Instruction {
 public:
  explicit Attention(AttentionSpec spec) : s_(spec) {}
  bool whole_step() const override { return true; }
  const char* name() const override { return "attention"; }
  std::optional<std::pair<const std::byte*, int>> reads() const override {
    return std::pair{reinterpret_cast<const std::byte*>(s_.cache), s_.plan};
  }
  std::vector<int> buffers() const override { return {s_.query, s_.out}; }
  void run(Team& team, const Frame& frame) const override {
    const Program& program = *frame.program;
    const AttentionCall call{&s_.layer,
                             &program.batch(s_.plan),
                             s_.cache,
                             frame.floats(s_.query, 0),
                             frame.row_bytes(s_.query) / 4,
                             frame.floats(s_.out, 0),
                             frame.row_bytes(s_.out) / 4,
                             program.partials()};
    attention_run(team, program.plan(s_.plan), call, frame.scratch(team));
  }

 private:
  AttentionSpec s_;
};

class ScaleSoftcap final : public Instruction {
 public:
  explicit ScaleSoftcap(LogitsSpec spec) : s_(spec) {}
  RowKind rows() const override { return RowKind::logits; }
  const char* name() const override { return "scale_softcap"; }
  std::vector<int> buffers() const override { return {}; }
  void run(Team& team, const Frame& frame) const override {
    for_rows(team, frame, [&](int64_t row) {
      float* logits = frame.in->logits + row * frame.in->logits_stride;
      pick_rows().scale_softcap(logits, s_.columns, s_.scale, s_.softcap);
      report_best(*frame.in, row, pick_sampling().extremes(logits, s_.columns, nullptr));
    });
  }

 private:
  LogitsSpec s_;
};

}  // namespace

std::unique_ptr<Instruction> make_embed(EmbedSpec spec) { return std::make_unique<Embed>(spec); }
std::unique_ptr<Instruction> make_positions(PositionsSpec spec) { return std::make_unique<Positions>(spec); }
std::unique_ptr<Instruction> make_layer_norm(LayerNormSpec spec) {
  return std::make_unique<LayerNorm>(std::move(spec));
}
std::unique_ptr<Instruction> make_activate(ActivateSpec spec) { return std::make_unique<ActivateRows>(spec); }
std::unique_ptr<Instruction> make_rows(RowsSpec spec) { return std::make_unique<Rows>(std::move(spec)); }
std::unique_ptr<Instruction> make_linear(LinearSpec spec) { return std::make_unique<Linear>(spec); }
std::unique_ptr<Instruction> make_add(AddSpec spec) { return std::make_unique<Add>(spec); }
std::unique_ptr<Instruction> make_rope(RopeSpec spec) { return std::make_unique<Rope>(std::move(spec)); }
std::unique_ptr<Instruction> make_attention(AttentionSpec spec) { return std::make_unique<Attention>(spec); }
std::unique_ptr<Instruction> make_scale_softcap(LogitsSpec spec) { return std::make_unique<ScaleSoftcap>(spec); }

}  // namespace pm
