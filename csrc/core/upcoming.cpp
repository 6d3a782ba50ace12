#include "core/upcoming.h"

#include <algorithm>

namespace pm {

void Upcoming::begin(const std::byte* base, const Extent* extents, size_t count) {
  base_ = base;
  at_ = extents;
  end_ = extents + count;
  taken_ = 0;
}

Upcoming::Piece Upcoming::take(int64_t most) {
  if (at_ == end_) return {nullptr, 0};
  const Piece piece{base_ + at_->begin + taken_, std::min(most, at_->bytes - taken_)};
  taken_ += piece.bytes;
  if (taken_ == at_->bytes) ++at_, taken_ = 0;
  return piece;
}

}  // namespace pm
