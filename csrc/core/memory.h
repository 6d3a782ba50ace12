// Memory for packed weights and scratch: aligned to a cache line, on huge pages where it is large.
#pragma once

#include <cstddef>
#include <memory>

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

// Backs [start, start + bytes) with memory without changing it, also while others write there; false where the system
// has no such call.
bool populate(void* start, size_t bytes);

}  // namespace pm
