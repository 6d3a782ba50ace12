// The thread pool: one for the process, owned by the library.
//
// `parallel(f)` runs f(Team&) on every rank at once; the caller is rank 0. A whole model step is one such region: ops
// are functions `op(Team&, ...)` that every rank calls in the same order, with `team.barrier()` where one op reads what
// another rank wrote. Workers spin briefly after a region, since the next step usually comes within microseconds, and
// then park, so that an idle engine costs nothing and PyTorch's own threads are not disturbed.
//
// Each rank first runs its own share of the tasks, in order, so that it knows what comes next and can fetch it ahead, and
// draws from its own counter, which nobody else touches meanwhile. Then it helps the others: a rank whose core was taken
// by another process delays only the task it holds. Which rank ran a task must never show in a result.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace pm {

namespace detail {
struct Shared;  // the barrier and the counters of the pool
}

class Team {
 public:
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Every rank arrives before any leaves; what was written before it is visible after it.
  void barrier();

  // The first half of a barrier, whose second half is in the next for_each: before this rank helps others or, unless
  // `share_ready` says that its own share reads nothing that others wrote, before all of it. So ranks whose work was
  // unequal do not wait while they have other work. Every rank arrives, each with a `share_ready` of its own.
  void arrive(bool share_ready);

  // Runs f(task) for task = 0 .. n-1, each exactly once: first(rank) and on by `rank`, the rest by who is done first. No
  // barrier before (but see arrive) or after: a rank returns when no task is left to draw, while others may still run
  // theirs. Every rank must make the same calls in the same order. A caller wants tasks of 100 ns or more, and several per
  // rank. Whether this rank ran all of its own share.
  template <class F>
  bool for_each(int64_t n, F&& f) {
    if (size_ == 1) {
      for (int64_t i = 0; i < n; ++i) f(i);
      return true;
    }
    int64_t left = end_of_share(n) - first_of_share(n);  // of this rank's share
    const int slot = open_slot();
    for (int turn = 0; turn < size_; ++turn) {
      const int owner = rank_ + turn < size_ ? rank_ + turn : rank_ + turn - size_;
      const int64_t first = first_task(n, owner), count = first_task(n, owner + 1) - first;
      if (pending_ && (turn > 0 || !share_ready_)) await();
      for (int64_t i; (i = draw(slot, owner, count)) < count;) {
        if (turn == 0) --left;
        f(first + i);
      }
    }
    return left == 0;
  }

  // This rank's share of n tasks is [first_of_share(n), end_of_share(n)).
  int64_t first_of_share(int64_t n) const { return size_ == 1 ? 0 : first_task(n, rank_); }
  int64_t end_of_share(int64_t n) const { return size_ == 1 ? n : first_task(n, rank_ + 1); }

  // A team of this rank alone: it runs all tasks itself, waits for nobody, and has its rank's scratch memory.
  Team alone() const { return Team(rank_, 1, nullptr); }

 private:
  friend struct detail::Shared;
  static constexpr int kSlots = 32;

  Team(int rank, int size, detail::Shared* shared) : rank_(rank), size_(size), shared_(shared) {}
  int64_t first_task(int64_t n, int rank) const { return n * rank / size_; }
  void await();
  int open_slot();
  // Out of line: this header is read by *.isa.cpp files, where an inline copy could be built for the wrong CPU.
  int64_t draw(int slot, int owner, int64_t count);

  int rank_;
  int size_;
  detail::Shared* shared_;
  uint32_t generation_ = 0;  // barriers arrived at
  bool pending_ = false;     // at the last of them not all have arrived, as far as is known
  bool share_ready_ = false;
  int slot_ = 0;             // counters of the next for_each
  int since_barrier_ = 0;    // for_each calls since the last barrier
};

// How many ranks a region gets.
int num_threads();
// 1 <= n <= 256; the pool is rebuilt. Not to be called from within a region.
void set_num_threads(int n);
// Physical cores that affinity and the cgroup's CPU quota leave to this process; the default of num_threads().
int usable_cores();

// Regions begun in this process so far, and whether one runs now: what leaves the cores to the kernels looks here.
uint64_t regions_begun();
bool region_runs();

namespace detail {
void run_region(void (*call)(Team&, void*), void* arg);
}

// Runs f(Team&) on all ranks and returns when all are done. A region opened inside a region runs on one rank. Regions
// opened by different threads queue. `f` must not throw.
template <class F>
void parallel(F&& f) {
  using Fn = std::remove_reference_t<F>;
  detail::run_region([](Team& team, void* p) { (*static_cast<Fn*>(p))(team); },
                     const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace pm
