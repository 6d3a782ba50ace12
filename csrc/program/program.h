// The recorded step: a list of instructions over buffers in one arena, replayed by one call.
//
// An instruction works on a range of rows. Most treat each row alone; attention reads what all rows of the step have
// written. The instructions between two attentions form a segment, and a segment runs tile of rows by tile of rows, so
// that a long chunk's activations stay in the cache: a buffer that no other segment reads holds one tile.
//
// With rows enough for every rank, a tile is one rank's from the segment's first instruction to its last: nothing passes
// between the cores, and the ranks wait for each other once a segment; or later, when they have attended for their own
// rows, if the plan of the attention after it says so (AttentionPlan::ranks_follow_rows). With few rows that would read all
// weights once for each rank; then the ranks share the columns of each product, with a barrier after each instruction.
//
// Order within run(): plan the attention (calling thread) -> one parallel region over the segments.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "core/team.h"
#include "ops/attention_plan.h"

namespace pm {

struct PackedLinear;

// One kind of layers' view of the KV cache in this step.
struct GroupInputs {
  const int32_t* slots = nullptr;         // [num_tokens] block_id * block_size + offset; -1: not written
  const int32_t* block_tables = nullptr;  // [num_requests][table_stride]
  int64_t table_stride = 0;
};

// One step's arrays, the caller's; nothing is kept after run().
struct ProgramInputs {
  int64_t num_tokens = 0;
  int num_requests = 0;
  int64_t num_logits = 0;
  const int32_t* token_ids = nullptr;     // [num_tokens]
  const int32_t* positions = nullptr;     // [num_tokens]
  const int32_t* query_start = nullptr;   // [num_requests + 1]
  const int32_t* context_lens = nullptr;  // [num_requests]
  const int32_t* logits_rows = nullptr;   // [num_logits]
  std::vector<GroupInputs> groups;
  float* logits = nullptr;  // [num_logits][vocabulary], rows logits_stride floats apart
  int64_t logits_stride = 0;
  const bool* logits_kept = nullptr;  // [num_logits] false: only the following is wanted, the row may stay as it is
  // Of each row of logits: the lowest id of the highest, that logit, and whether all are finite.
  int64_t* best = nullptr;
  float* highest = nullptr;
  bool* finite = nullptr;
};

// Which rows a buffer has, and which an instruction runs over.
enum class RowKind : uint8_t { tokens, logits };

class Program;

// What an instruction sees while it runs: the step, the tile, the buffers.
struct Frame {
  const Program* program;
  const ProgramInputs* in;
  int64_t first, count;  // rows of this tile
  std::byte* local;      // where the buffers lie that hold one tile

  std::byte* row(int buffer, int64_t row) const;
  float* floats(int buffer, int64_t at) const { return reinterpret_cast<float*>(row(buffer, at)); }
  int64_t row_bytes(int buffer) const;
  float* scratch(int rank) const;  // Program::scratch_floats long
  float* scratch(const Team& team) const { return scratch(team.rank()); }
  Upcoming* upcoming(const Team& team) const;  // what this rank reads of the cache in the next attention
};

class Instruction {
 public:
  virtual ~Instruction() = default;
  virtual const char* name() const = 0;
  // On every rank; rows are shared out by the team. No barrier at the end.
  virtual void run(Team& team, const Frame& frame) const = 0;
  virtual RowKind rows() const { return RowKind::tokens; }
  // Reads rows that another tile writes, so it stands alone between two segments.
  virtual bool whole_step() const { return false; }
  // Keeps notes on the tile in work, so the ranks must work on the same one.
  virtual bool together() const { return false; }
  virtual std::vector<int> buffers() const = 0;  // read or written
  // The weights it multiplies with, if it is a product; and those of the product after it, to be fetched ahead.
  virtual const PackedLinear* weights() const { return nullptr; }
  virtual void set_next_weights(const PackedLinear*) {}
  // The cache that it reads, if it is an attention, and its plan's number.
  virtual std::optional<std::pair<const std::byte*, int>> reads() const { return std::nullopt; }
};

class Program {
 public:
  // At most max_tokens rows a step, max_logits of them with logits; segments run in tiles of tile_rows.
  Program(int64_t max_tokens, int64_t max_logits, int64_t tile_rows);

  // Declares a buffer; returns its number.
  int new_buffer(RowKind rows, int64_t row_bytes);
  int num_buffers() const { return static_cast<int>(buffers_.size()); }
  RowKind buffer_rows(int buffer) const { return buffers_[static_cast<size_t>(buffer)].rows; }
  int64_t buffer_row_bytes(int buffer) const { return buffers_[static_cast<size_t>(buffer)].row_bytes; }  // >= declared
  // Appends an instruction whose scratch need is `scratch_floats` per rank.
  void append(std::unique_ptr<Instruction> instruction, int64_t scratch_floats);
  // An attention layer's plan number; layers of one shape, window and group share a plan.
  int plan_for(const AttentionLayer& layer, int group);
  // Lays out the arena. After it nothing can be appended.
  void finish();
  bool finished() const { return finished_; }
  void run(const ProgramInputs& in);

  // While on, run() adds up what each instruction takes on the calling thread, the wait for the others included.
  void set_profiling(bool on);
  struct Timing {
    const char* name;
    double seconds;
  };
  std::vector<Timing> timings() const;

  // The attention layers that this step's tables must fit, one for each plan.
  template <class F>
  void for_each_plan(F f) const {
    for (const PlanEntry& entry : plans_) f(entry.layer, entry.group);
  }

  const AttentionPlan& plan(int i) const { return plans_[static_cast<size_t>(i)].plan; }
  const AttentionBatch& batch(int i) const { return plans_[static_cast<size_t>(i)].batch; }
  float* partials() const { return partials_.as<float>(); }
  int64_t max_tokens() const { return max_tokens_; }
  int64_t max_logits() const { return max_logits_; }
  int64_t tile_rows() const { return tile_rows_; }
  // Of the buffers that hold all rows of a step, and of one rank's that hold a tile.
  int64_t arena_bytes() const { return static_cast<int64_t>(arena_.size()) + local_bytes_; }
  int64_t num_instructions() const { return static_cast<int64_t>(instructions_.size()); }

 private:
  friend struct Frame;
  struct BufferInfo {
    RowKind rows;
    int64_t row_bytes;
    int first = -1, last = -1;  // segments that use it
    int first_op = -1, last_op = -1;
    bool whole = false;    // holds all rows of the step, not of a tile
    int64_t offset = 0;    // into the arena, or into a rank's part of the local memory
  };
  struct Segment {
    size_t begin, end;
    RowKind rows;
    bool tiled;
    bool together;
  };
  struct PlanEntry {
    AttentionLayer layer;
    int group;
    AttentionPlan plan;
    AttentionBatch batch;
  };

  void cut_segments();
  // Lays out the buffers that hold the whole step, or those that hold a tile; returns the bytes they take.
  int64_t place_buffers(bool whole);
  // Cuts the step's attention and finds memory for so many ranks.
  void prepare(const ProgramInputs& in, int threads);
  void run_segments(Team& team, const ProgramInputs& in);
  // Whether an instruction is an attention that each of so many ranks may begin, with its own rows, before the others are
  // there. They may be fewer than were planned for.
  bool follows_rows(size_t at, int ranks) const;
  // This rank's list of what the next attention at or after an instruction reads.
  void look_ahead(const Team& team, size_t from);
  void run_tile(Team& team, const Segment& segment, const Frame& frame);
  bool profiles(const Team& team) const { return !seconds_.empty() && team.rank() == 0; }
  int64_t rows_of(const BufferInfo& buffer) const;

  int64_t max_tokens_, max_logits_, tile_rows_;
  int64_t scratch_floats_ = 16;
  bool finished_ = false;
  std::vector<BufferInfo> buffers_;
  std::vector<std::unique_ptr<Instruction>> instructions_;
  std::vector<Segment> segments_;
  std::vector<PlanEntry> plans_;
  std::unique_ptr<Upcoming[]> upcoming_;  // of each rank
  std::vector<double> seconds_;  // of each instruction; empty unless profiling
  int64_t local_bytes_ = 0;
  Buffer arena_, locals_, scratch_, partials_;
};

}  // namespace pm
