#include "core/team.h"

#include <pthread.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace pm {
namespace detail {

// Each counter has its own cache line: a rank that draws tasks must not slow one that waits at the barrier.
struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

struct Shared {
  explicit Shared(int n) : size(n), drawn(static_cast<size_t>(n) * Team::kSlots) {}
  static Team make_team(int rank, int size, Shared* shared) { return Team(rank, size, shared); }

  const int size;
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> generation{0};  // barriers completed since the region began
  std::vector<Counter> drawn;  // [slot][owner] tasks drawn from the owner's share
  alignas(64) std::atomic<uint32_t> epoch{0};  // regions begun; workers wait for it to change
  alignas(64) std::atomic<int> running{0};     // workers that have not finished the current region
  void (*call)(Team&, void*) = nullptr;
  void* arg = nullptr;
  bool stop = false;
};

}  // namespace detail

namespace {

using detail::Shared;

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until done(): pauses first, and gives the core away when that takes long, because the rank waited for may be
// runnable on this very core.
template <class Done>
void spin_until(Done done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins < 2048) {
      cpu_pause();
    } else {
      std::this_thread::yield();
    }
  }
}

class Pool {
 public:
  explicit Pool(int size) : shared_(size) {
    try {
      for (int rank = 1; rank < size; ++rank) workers_.emplace_back([this, rank] { work(rank); });
    } catch (const std::system_error& error) {
      stop();
      throw std::runtime_error("the system gives this process no more than " + std::to_string(workers_.size() + 1) + " of " +
                               std::to_string(size) + " threads (" + error.what() + "); ask for fewer with --num-threads");
    }
  }

  ~Pool() { stop(); }

  int size() const { return shared_.size; }

  void run(void (*call)(Team&, void*), void* arg) {
    shared_.call = call;
    shared_.arg = arg;
    shared_.generation.store(0, std::memory_order_relaxed);
    for (auto& counter : shared_.drawn) counter.value.store(0, std::memory_order_relaxed);
    shared_.running.store(shared_.size - 1, std::memory_order_relaxed);
    shared_.epoch.fetch_add(1, std::memory_order_release);
    shared_.epoch.notify_all();  // a system call only if a worker is parked
    Team team = Shared::make_team(0, shared_.size, &shared_);
    call(team, arg);
    spin_until([this] { return shared_.running.load(std::memory_order_acquire) == 0; });
  }

 private:
  void stop() {
    shared_.stop = true;
    shared_.epoch.fetch_add(1, std::memory_order_release);
    shared_.epoch.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  void work(int rank) {
    in_region() = true;  // a region opened by a worker is nested by definition
    uint32_t seen = 0;
    for (;;) {
      wait_for_region(seen);
      seen = shared_.epoch.load(std::memory_order_acquire);
      if (shared_.stop) return;
      Team team = Shared::make_team(rank, shared_.size, &shared_);
      shared_.call(team, shared_.arg);
      shared_.running.fetch_sub(1, std::memory_order_release);
    }
  }

  void wait_for_region(uint32_t seen) {
    const auto changed = [&] { return shared_.epoch.load(std::memory_order_acquire) != seen; };
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
    while (std::chrono::steady_clock::now() < deadline) {
      for (int i = 0; i < 32; ++i) {
        if (changed()) return;
        cpu_pause();
      }
    }
    while (!changed()) shared_.epoch.wait(seen, std::memory_order_acquire);
  }

 public:
  static bool& in_region() {
    thread_local bool value = false;
    return value;
  }

 private:
  Shared shared_;
  std::vector<std::thread> workers_;
};

struct Global {
  std::mutex mutex;
  std::unique_ptr<Pool> pool;
  std::atomic<int> wanted{0};  // 0: not decided yet
};

std::atomic<uint64_t> begun{0};
std::atomic<int> running{0};

// Counts a region, on however many ranks, while it runs.
struct Counted {
  Counted() {
    begun.fetch_add(1, std::memory_order_relaxed);
    running.fetch_add(1, std::memory_order_relaxed);
  }
  ~Counted() { running.fetch_sub(1, std::memory_order_relaxed); }
};

// Never destroyed: a worker must not outlive what it waits on while the interpreter shuts down.
Global* global_state = nullptr;

Global& global() {
  static std::once_flag once;
  std::call_once(once, [] {
    global_state = new Global;
    // The child of a fork has none of the parent's threads, and perhaps a locked mutex: it starts afresh.
    pthread_atfork(nullptr, nullptr, [] {
      const int wanted = global_state->wanted.load();
      global_state = new Global;
      global_state->wanted.store(wanted);
      Pool::in_region() = false;
    });
  });
  return *global_state;
}

}  // namespace

void Team::barrier() {
  arrive(false);
  await();
}

void Team::arrive(bool share_ready) {
  if (size_ == 1) return;
  await();
  share_ready_ = share_ready;
  const int used = since_barrier_;
  since_barrier_ = 0;
  ++generation_;
  if (shared_->arrived.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    shared_->arrived.store(0, std::memory_order_relaxed);
    shared_->generation.store(generation_, std::memory_order_release);
    // Nobody draws from what was used before this barrier; see open_slot for who uses it next.
    for (int back = 1; back <= used; ++back) {
      const int slot = (slot_ - back + kSlots) % kSlots;
      for (int owner = 0; owner < size_; ++owner) {
        shared_->drawn[static_cast<size_t>(slot * size_ + owner)].value.store(0, std::memory_order_relaxed);
      }
    }
    return;
  }
  pending_ = true;
}

void Team::await() {
  if (!pending_) return;
  spin_until([this] { return shared_->generation.load(std::memory_order_acquire) == generation_; });
  pending_ = false;
}

// Each for_each takes the next of kSlots rows of counters. A row is zeroed by the last rank to arrive at the barrier
// after its use, and is used again kSlots calls later. No barrier is more than kSlots / 2 - 1 calls after the one before,
// so two lie between besides the latest, which may be half done (see arrive), and the second makes the zeros visible.
int Team::open_slot() {
  if (since_barrier_ == kSlots / 2 - 1) barrier();
  ++since_barrier_;
  const int slot = slot_;
  slot_ = (slot_ + 1) % kSlots;
  return slot;
}

int64_t Team::draw(int slot, int owner, int64_t count) {
  std::atomic<int64_t>& drawn = shared_->drawn[static_cast<size_t>(slot * size_ + owner)].value;
  // Looking costs less than drawing where a share is used up, as the others' usually are.
  if (owner != rank_ && drawn.load(std::memory_order_relaxed) >= count) return count;
  return drawn.fetch_add(1, std::memory_order_relaxed);
}

int num_threads() {
  Global& state = global();
  int wanted = state.wanted.load();
  if (wanted == 0) {
    wanted = usable_cores();
    state.wanted.store(wanted);
  }
  return wanted;
}

void set_num_threads(int n) {
  if (n < 1 || n > 256) throw std::invalid_argument("num_threads must be between 1 and 256");
  if (Pool::in_region()) throw std::runtime_error("set_num_threads was called from within a parallel region");
  Global& state = global();
  std::lock_guard lock(state.mutex);
  state.wanted.store(n);
  state.pool.reset();
}

uint64_t regions_begun() { return begun.load(std::memory_order_relaxed); }
bool region_runs() { return running.load(std::memory_order_relaxed) > 0; }

namespace detail {

void run_region(void (*call)(Team&, void*), void* arg) {
  bool& inside = Pool::in_region();
  const int wanted = num_threads();
  const Counted counted;
  if (inside || wanted == 1) {
    Team team = Shared::make_team(0, 1, nullptr);
    call(team, arg);
    return;
  }
  Global& state = global();
  std::lock_guard lock(state.mutex);
  if (!state.pool || state.pool->size() != wanted) {
    state.pool.reset();
    state.pool = std::make_unique<Pool>(wanted);
  }
  inside = true;
  state.pool->run(call, arg);
  inside = false;
}

}  // namespace detail
}  // namespace pm
