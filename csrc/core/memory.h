// Memory for packed weights and scratch: aligned to a cache line, on huge pages where it is large.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

namespace pm {

// Owns `bytes` of zeroed memory. From 1 MiB on it comes straight from the system, 2 MiB-aligned and advised for huge
// pages: a decode step reads all weights once, and with 4 KiB pages the page walks show.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  // For what lives long and is read in full again and again: from 16 KiB on, carved from regions of 32 MiB on huge pages
  // that such buffers share. A small model's matrices are a few hundred KiB each; on 4 KiB pages of their own they come
  // from memory at a third of the speed. A region is given back when its last buffer goes.
  static Buffer lasting(size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <class T = std::byte>
  T* as() const { return static_cast<T*>(data_); }
  size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  std::shared_ptr<void> owner_;  // of the mapping that data_ lies in; none: from aligned_alloc
};

// Has the system back memory with pages before it is written: the first write to a page otherwise waits until one is
// found and zeroed. Runs on a thread that gets only time nobody else wants, and while the team rests: a page takes
// milliseconds, for which a step would have to wait. What the memory holds stays, also while others write there. Does
// nothing where the system has no such call.
class PageWarmer {
 public:
  struct Range {
    std::byte* start;
    size_t bytes;
  };
  // The ranges, which must outlive this, are backed in turn, a piece of each at a time.
  explicit PageWarmer(std::vector<Range> ranges);
  ~PageWarmer();  // stops it
  PageWarmer(const PageWarmer&) = delete;
  PageWarmer& operator=(const PageWarmer&) = delete;

 private:
  void run();
  std::vector<Range> ranges_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace pm
