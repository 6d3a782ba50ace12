#include "core/memory.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "core/team.h"

namespace pm {
namespace {

[[maybe_unused]] constexpr uintptr_t kPage = 4096;
[[maybe_unused]] constexpr std::chrono::milliseconds kQuiet{5};  // without a step: nobody is served just now
constexpr size_t kHuge = size_t{2} << 20, kRegion = size_t{32} << 20, kSmall = size_t{16} << 10;
// Under AddressSanitizer every buffer comes from the allocator, which puts forbidden ground on both sides of it, to the
// byte.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kMap = false;
#else
constexpr bool kMap = true;
#endif

// Zeroed memory, 2 MiB-aligned and advised for huge pages; unmapped with its last owner.
std::shared_ptr<void> map_huge(size_t bytes) {
  const size_t mapped = bytes + kHuge;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  void* start = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(base) + kHuge - 1) / kHuge * kHuge);
#ifdef MADV_HUGEPAGE
  madvise(start, bytes, MADV_HUGEPAGE);  // advice only: without huge pages it still works
#endif
  return {start, [base, mapped](void*) { munmap(base, mapped); }};
}

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (kMap && bytes >= kHuge / 2) {
    owner_ = map_huge(bytes);
    data_ = owner_.get();
    return;
  }
  const size_t room = kMap ? (bytes + 63) / 64 * 64 + 64 : bytes + (bytes == 0);
  if (posix_memalign(&data_, 64, room) != 0) throw std::bad_alloc();
  std::memset(data_, 0, bytes);
}

Buffer Buffer::lasting(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<void> region;  // the one being filled, while any of its buffers lives
  static size_t used = 0;
  if (!kMap || bytes < kSmall || bytes > kRegion / 4) return Buffer(bytes);
  std::lock_guard lock(mutex);
  std::shared_ptr<void> owner = region.lock();
  if (owner == nullptr || used + bytes > kRegion) {
    owner = map_huge(kRegion);
    region = owner;
    used = 0;
  }
  Buffer buffer;
  buffer.data_ = static_cast<std::byte*>(owner.get()) + used;
  buffer.bytes_ = bytes;
  buffer.owner_ = std::move(owner);
  used += (bytes + 63) / 64 * 64;
  return buffer;
}

Buffer::~Buffer() {
  if (owner_ == nullptr) std::free(data_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(owner_, other.owner_);
  return *this;
}

PageWarmer::PageWarmer(std::vector<Range> ranges) : ranges_(std::move(ranges)), thread_([this] { run(); }) {}

PageWarmer::~PageWarmer() {
  stop_ = true;
#ifdef __linux__
  const sched_param usual{};
  pthread_setschedparam(thread_.native_handle(), SCHED_OTHER, &usual);  // it is waited for now
#endif
  thread_.join();
}

void PageWarmer::run() {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
  const sched_param idle{};
  pthread_setschedparam(pthread_self(), SCHED_IDLE, &idle);
  uint64_t regions = 0;
  const auto busy = [&] {
    const uint64_t seen = std::exchange(regions, regions_begun());
    return region_runs() || regions != seen;
  };
  size_t longest = 0;
  for (const Range& range : ranges_) longest = range.bytes > longest ? range.bytes : longest;
  for (size_t first = 0; first < longest; first += kHuge) {
    for (const Range& range : ranges_) {
      if (first >= range.bytes) continue;
      while (busy() && !stop_) std::this_thread::sleep_for(kQuiet);
      if (stop_) return;
      const size_t piece = range.bytes - first < kHuge ? range.bytes - first : kHuge;
      const auto start = reinterpret_cast<uintptr_t>(range.start + first), aligned = start / kPage * kPage;
      if (madvise(reinterpret_cast<void*>(aligned), start + piece - aligned, MADV_POPULATE_WRITE) != 0) return;
    }
  }
#endif
}

}  // namespace pm
