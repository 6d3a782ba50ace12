// Memory for packed weights and scratch: aligned to a cache line, on huge pages where it is large.
#pragma once

#include <cstddef>

namespace pm {

// Owns `bytes` of zeroed memory. From 1 MiB on it comes straight from the system, 2 MiB-aligned and advised for huge
// pages: a decode step reads all weights once, and with 4 KiB pages the page walks show.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
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
  size_t mapped_ = 0;  // > 0: from mmap
  void* base_ = nullptr;
};

}  // namespace pm
