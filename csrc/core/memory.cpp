#include "core/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace pm {
namespace {
constexpr size_t kHuge = size_t{2} << 20;
}

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes >= kHuge / 2) {
    mapped_ = bytes + kHuge;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
      base_ = nullptr;
      throw std::bad_alloc();
    }
    data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(base_) + kHuge - 1) / kHuge * kHuge);
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes, MADV_HUGEPAGE);  // advice only: without huge pages it still works
#endif
    return;
  }
  data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, bytes);
}

Buffer::~Buffer() {
  if (mapped_ > 0) {
    munmap(base_, mapped_);
  } else {
    std::free(data_);
  }
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  std::swap(base_, other.base_);
  return *this;
}

}  // namespace pm
