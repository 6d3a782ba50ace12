// Memory that a rank is about to read, handed out in pieces to whoever can fetch it into the cache along with other work.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pm {

// Bytes [begin, begin + bytes) from a base that is known later.
struct Extent {
  int64_t begin, bytes;
};

// A walk over extents, in order, each byte once. A rank's own: on a line of its own, so that no other waits for it.
class alignas(64) Upcoming {
 public:
  struct Piece {
    const std::byte* data;
    int64_t bytes;  // 0: nothing is left
  };

  // `extents` are borrowed.
  void begin(const std::byte* base, const Extent* extents, size_t count);
  // The next bytes, at most `most` of them. Out of line, as Team::draw.
  Piece take(int64_t most);

 private:
  const std::byte* base_ = nullptr;
  const Extent *at_ = nullptr, *end_ = nullptr;
  int64_t taken_ = 0;  // of the extent at hand
};

}  // namespace pm
