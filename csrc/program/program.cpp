#include "program/program.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "core/planned.h"
#include "linear/table.h"

namespace pm {
namespace {

// Rows for each rank from which on a rank takes whole tiles: it reads all weights, and computes on each about as long
// as the next takes to arrive.
constexpr int64_t kRowsAlone = 8;

bool rows_stay(int64_t rows, int64_t threads) { return threads > 1 && rows >= kRowsAlone * threads; }

using Clock = std::chrono::steady_clock;

}  // namespace

std::byte* Frame::row(int buffer, int64_t at) const {
  const auto& info = program->buffers_[static_cast<size_t>(buffer)];
  return info.whole ? program->arena_.as<>() + info.offset + at * info.row_bytes
                    : local + info.offset + (at - first) * info.row_bytes;
}

int64_t Frame::row_bytes(int buffer) const { return program->buffers_[static_cast<size_t>(buffer)].row_bytes; }

float* Frame::scratch(int rank) const { return program->scratch_.as<float>() + rank * program->scratch_floats_; }

Upcoming* Frame::upcoming(const Team& team) const {
  return &program->upcoming_[static_cast<size_t>(team.rank())];
}

Program::Program(int64_t max_tokens, int64_t max_logits, int64_t tile_rows)
    : max_tokens_(max_tokens), max_logits_(max_logits), tile_rows_(tile_rows) {
  if (max_tokens < 1 || max_logits < 1 || tile_rows < 1) {
    throw std::invalid_argument("max_tokens, max_logits and tile_rows must be at least 1");
  }
}

int Program::new_buffer(RowKind rows, int64_t row_bytes) {
  buffers_.push_back({rows, (row_bytes + 63) / 64 * 64});
  return static_cast<int>(buffers_.size()) - 1;
}

void Program::append(std::unique_ptr<Instruction> instruction, int64_t scratch_floats) {
  if (finished_) throw std::logic_error("the program is finished; nothing can be appended");
  for (const int buffer : instruction->buffers()) {
    if (buffer < 0 || buffer >= static_cast<int>(buffers_.size())) {
      throw std::invalid_argument("an instruction names a buffer that was not declared");
    }
  }
  scratch_floats_ = std::max(scratch_floats_, (scratch_floats + 15) / 16 * 16);
  instructions_.push_back(std::move(instruction));
}

int Program::plan_for(const AttentionLayer& layer, int group) {
  for (size_t i = 0; i < plans_.size(); ++i) {
    const AttentionLayer& other = plans_[i].layer;
    if (plans_[i].group == group && other.num_heads == layer.num_heads && other.num_kv_heads == layer.num_kv_heads &&
        other.head_dim == layer.head_dim && other.window == layer.window && other.causal == layer.causal) {
      return static_cast<int>(i);
    }
  }
  plans_.push_back({layer, group, {}, {}});
  return static_cast<int>(plans_.size()) - 1;
}

void Program::cut_segments() {
  for (size_t i = 0; i < instructions_.size(); ++i) {
    const Instruction& op = *instructions_[i];
    const bool alone = op.whole_step();
    if (segments_.empty() || alone || !segments_.back().tiled || segments_.back().rows != op.rows()) {
      segments_.push_back({i, i, op.rows(), !alone, false});
    }
    segments_.back().end = i + 1;
    segments_.back().together |= op.together();
    for (const int b : op.buffers()) {
      BufferInfo& buffer = buffers_[static_cast<size_t>(b)];
      const int segment = static_cast<int>(segments_.size()) - 1;
      if (buffer.first < 0) {
        buffer.first = segment;
        buffer.first_op = static_cast<int>(i);
      }
      buffer.last = segment;
      buffer.last_op = static_cast<int>(i);
    }
  }
  for (BufferInfo& buffer : buffers_) {
    const bool used = buffer.first >= 0;
    buffer.whole = buffer.first != buffer.last || (used && !segments_[static_cast<size_t>(buffer.first)].tiled);
  }
}

int64_t Program::rows_of(const BufferInfo& buffer) const {
  const int64_t all = buffer.rows == RowKind::tokens ? max_tokens_ : max_logits_;
  return buffer.whole ? all : std::min(all, tile_rows_);
}

// First fit by size, largest first: a buffer takes the lowest place that is free for as long as it lives. A buffer of
// a tile lives from its first to its last instruction. One that crosses segments lives through all of them and, where
// the last one runs in tiles, the one after: a rank may begin an attention while another is still at its tiles before it.
int64_t Program::place_buffers(bool whole) {
  std::vector<BufferInfo*> order, placed;
  for (BufferInfo& buffer : buffers_) {
    if (buffer.first < 0 || buffer.whole != whole) continue;
    if (whole) {
      size_t last = static_cast<size_t>(buffer.last);
      if (segments_[last].tiled && last + 1 < segments_.size()) ++last;
      buffer.first_op = static_cast<int>(segments_[static_cast<size_t>(buffer.first)].begin);
      buffer.last_op = static_cast<int>(segments_[last].end) - 1;
    }
    order.push_back(&buffer);
  }
  const auto bytes = [&](const BufferInfo& b) { return rows_of(b) * b.row_bytes; };
  std::stable_sort(order.begin(), order.end(), [&](auto* a, auto* b) { return bytes(*a) > bytes(*b); });
  int64_t total = 0;
  for (BufferInfo* buffer : order) {
    int64_t at = 0;
    for (const BufferInfo* other : placed) {  // sorted by offset
      if (other->last_op < buffer->first_op || other->first_op > buffer->last_op) continue;
      if (at + bytes(*buffer) <= other->offset) break;
      at = std::max(at, other->offset + bytes(*other));
    }
    buffer->offset = at;
    placed.insert(std::upper_bound(placed.begin(), placed.end(), buffer,
                                   [](const auto* a, const auto* b) { return a->offset < b->offset; }),
                  buffer);
    total = std::max(total, at + bytes(*buffer));
  }
  return total + 64;
}

void Program::finish() {
  if (finished_) return;
  cut_segments();
  arena_ = Buffer(static_cast<size_t>(place_buffers(true)));
  local_bytes_ = place_buffers(false);
  const PackedLinear* next = nullptr;
  for (auto op = instructions_.rbegin(); op != instructions_.rend(); ++op) {
    (*op)->set_next_weights(next);
    if ((*op)->weights()) next = (*op)->weights();
  }
  finished_ = true;
}

void Program::run(const ProgramInputs& in) {
  if (!finished_) throw std::logic_error("finish() the program before it runs");
  if (in.num_tokens < 1 || in.num_tokens > max_tokens_ || in.num_logits > max_logits_) {
    throw std::invalid_argument("the step has more rows than the program was made for, or none");
  }
  parallel_planned([&](int threads) { prepare(in, threads); }, [&](Team& team) { run_segments(team, in); });
}

void Program::prepare(const ProgramInputs& in, int threads) {
  int64_t partials = 0;
  const bool stay = rows_stay(in.num_tokens, threads) && std::none_of(segments_.begin(), segments_.end(), [](auto& s) {
                      return s.together && s.rows == RowKind::tokens;
                    });
  for (PlanEntry& entry : plans_) {
    const GroupInputs& group = in.groups.at(static_cast<size_t>(entry.group));
    entry.batch = {in.num_requests, in.query_start, in.context_lens, group.block_tables, group.table_stride};
    entry.plan.build(entry.layer, entry.batch, threads, stay);
    partials = std::max(partials, entry.plan.num_partials * attention_partial_floats(entry.layer));
  }
  if (partials_.size() < static_cast<size_t>(partials) * sizeof(float)) {
    partials_ = Buffer(static_cast<size_t>(partials) * sizeof(float));
  }
  const size_t scratch_bytes = static_cast<size_t>(threads * scratch_floats_) * sizeof(float);
  if (scratch_.size() < scratch_bytes) scratch_ = Buffer(scratch_bytes);
  upcoming_ = std::make_unique<Upcoming[]>(static_cast<size_t>(threads));
  const size_t local_bytes = static_cast<size_t>(threads * local_bytes_);
  if (locals_.size() < local_bytes) locals_ = Buffer(local_bytes);
}

void Program::run_segments(Team& team, const ProgramInputs& in) {
  const bool profiling = profiles(team);
  if (pick_linear().fetches_cache)
    for (PlanEntry& entry : plans_) entry.plan.list_extents(entry.layer, entry.batch, team);
  look_ahead(team, 0);
  for (const Segment& segment : segments_) {
    const int64_t rows = segment.rows == RowKind::tokens ? in.num_tokens : in.num_logits;
    if (rows == 0) continue;
    const int64_t size = team.size(), fewest = segment.tiled ? (rows + tile_rows_ - 1) / tile_rows_ : 1;
    const bool alone = segment.tiled && !segment.together && rows_stay(rows, size);
    const int64_t tiles = alone ? (fewest + size - 1) / size * size : fewest;
    const auto frame = [&](int64_t tile, int rank) {  // even tiles: no small last one
      const int64_t first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
      return Frame{this, &in, first, last - first, locals_.as<>() + rank * local_bytes_};
    };
    if (!alone) {
      for (int64_t tile = 0; tile < tiles; ++tile) run_tile(team, segment, frame(tile, 0));
      if (!segment.tiled) look_ahead(team, segment.end);
      continue;
    }
    const bool own = team.for_each(tiles, [&](int64_t tile) {
      Team solo = team.alone();
      run_tile(solo, segment, frame(tile, team.rank()));
    });
    if (follows_rows(segment.end, team.size())) {
      team.arrive(own);
      continue;
    }
    const Clock::time_point before = Clock::now();
    team.barrier();
    if (profiling) seconds_[segment.end - 1] += std::chrono::duration<double>(Clock::now() - before).count();
  }
}

bool Program::follows_rows(size_t at, int ranks) const {
  const auto reads = at < instructions_.size() ? instructions_[at]->reads() : std::nullopt;
  return reads && plan(reads->second).ranks_follow_rows == ranks;
}

void Program::look_ahead(const Team& team, size_t from) {
  Upcoming& upcoming = upcoming_[static_cast<size_t>(team.rank())];
  for (size_t i = from; i < instructions_.size(); ++i) {
    if (const auto reads = instructions_[i]->reads()) {
      const std::vector<Extent>& extents = plan(reads->second).extents[static_cast<size_t>(team.rank())];
      return upcoming.begin(reads->first, extents.data(), extents.size());
    }
  }
  upcoming.begin(nullptr, nullptr, 0);
}

void Program::run_tile(Team& team, const Segment& segment, const Frame& frame) {
  const bool profiling = profiles(team);
  Clock::time_point before = Clock::now();
  for (size_t i = segment.begin; i < segment.end; ++i) {
    instructions_[i]->run(team, frame);
    team.barrier();
    if (!profiling) continue;
    const Clock::time_point now = Clock::now();
    seconds_[i] += std::chrono::duration<double>(now - before).count();
    before = now;
  }
}

void Program::set_profiling(bool on) { seconds_.assign(on ? instructions_.size() : 0, 0.0); }

std::vector<Program::Timing> Program::timings() const {
  std::vector<Timing> result;
  for (size_t i = 0; i < seconds_.size(); ++i) result.push_back({instructions_[i]->name(), seconds_[i]});
  return result;
}

}  // namespace pm
