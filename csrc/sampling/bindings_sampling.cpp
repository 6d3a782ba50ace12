// Sampling for Python: whole steps at a time, rows shared out over the team.
#include <nanobind/nanobind.h>

#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "core/team.h"
#include "sampling/sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pm {
namespace {

// Rows may lie further apart than they are long; see step_logits in worker/native.py.
using Logits = Rows2d<const float>;

constexpr int64_t kMostVocab = int64_t{1} << 27;
constexpr float kLeastTemperature = 0x1p-126f;  // whose inverse is finite
constexpr int64_t kWorthATeam = 1 << 17;  // logits; fewer are looked through before the others would have begun

using TokenMask = Mat<const int32_t>;

template <class F>
void for_each_row(int64_t rows, int64_t vocab, F one) {
  if (rows * vocab < kWorthATeam) {
    for (int64_t r = 0; r < rows; ++r) one(r);
  } else {
    parallel([&](Team& team) { team.for_each(rows, one); });
  }
}

void check_index(const Vec<const int64_t>& index, int64_t rows) {
  for (int64_t i = 0; i < dim(index, 0); ++i) {
    const int64_t row = index.data()[i];
    if (row < 0 || row >= rows) refuse("index names a row that logits does not have: ", row, "; there are ", rows);
  }
}

// One row of bits for each of the rows `index` of logits.
const uint32_t* mask_bits(const TokenMask& mask, const Vec<const int64_t>& index, int64_t vocab) {
  if (dim(mask, 0) != dim(index, 0) || dim(mask, 1) * 32 < vocab) {
    refuse("mask is [", dim(mask, 0), ", ", dim(mask, 1), "]; mask must be [", dim(index, 0), ", ", (vocab + 31) / 32,
           "]: a row for each entry of index, a bit for each column of logits");
  }
  return reinterpret_cast<const uint32_t*>(mask.data());
}

void check_vocab(int64_t vocab) {
  if (vocab < 1 || vocab > kMostVocab) refuse("logits has ", vocab, " columns; it must have from 1 to ", kMostVocab);
}

void row_extremes(Logits logits, Vec<int64_t> best, Vec<float> highest, Vec<bool> finite) {
  const int64_t rows = dim(logits, 0), vocab = dim(logits, 1);
  check_length(best, rows, "best");
  check_length(highest, rows, "highest");
  check_length(finite, rows, "finite");
  check_vocab(vocab);
  const int64_t stride = row_stride(logits, "logits");
  nb::gil_scoped_release release;
  const SamplingTable& table = pick_sampling();
  for_each_row(rows, vocab, [&](int64_t r) {
    const RowExtremes found = table.extremes(logits.data() + r * stride, vocab, nullptr);
    best.data()[r] = found.best;
    highest.data()[r] = found.highest;
    finite.data()[r] = found.finite;
  });
}

void best_allowed(Logits logits, Vec<const int64_t> index, TokenMask mask, Vec<int64_t> best, Vec<float> highest) {
  const int64_t count = dim(index, 0);
  const int64_t vocab = dim(logits, 1), words = dim(mask, 1);
  check_length(best, count, "best");
  check_length(highest, count, "highest");
  check_vocab(vocab);
  check_index(index, dim(logits, 0));
  const int64_t stride = row_stride(logits, "logits");
  const uint32_t* bits = mask_bits(mask, index, vocab);
  nb::gil_scoped_release release;
  const SamplingTable& table = pick_sampling();
  for_each_row(count, vocab, [&](int64_t i) {
    const RowExtremes found = table.extremes(logits.data() + index.data()[i] * stride, vocab, bits + i * words);
    best.data()[i] = found.best;
    highest.data()[i] = found.highest;
  });
}

void forbid_tokens(Rows2d<float> logits, Vec<const int64_t> index, TokenMask mask) {
  const int64_t vocab = dim(logits, 1), words = dim(mask, 1);
  const int64_t stride = row_stride(logits, "logits");
  const uint32_t* bits = mask_bits(mask, index, vocab);
  check_index(index, dim(logits, 0));
  nb::gil_scoped_release release;
  const SamplingTable& table = pick_sampling();
  for_each_row(dim(index, 0), vocab, [&](int64_t i) {
    table.forbid(logits.data() + index.data()[i] * stride, vocab, bits + i * words);
  });
}

// One thread's memory, kept between steps.
struct Scratch {
  std::vector<float> weights, block_mass;
  std::vector<Candidate> found;
  DrawMemory of(int64_t vocab) {
    if (static_cast<int64_t>(found.size()) < vocab) {
      weights.resize(static_cast<size_t>(vocab + 16));
      block_mass.resize(static_cast<size_t>(vocab / kMassBlock + 1));
      found.resize(static_cast<size_t>(vocab));
    }
    return {weights.data(), block_mass.data(), found.data()};
  }
};

void draw_rows(Logits logits, Vec<const int64_t> index, Vec<const float> temperature, Vec<const int32_t> top_k,
               Vec<const float> top_p, Vec<const float> min_p, Vec<const uint64_t> seed, Vec<const int64_t> position,
               Vec<int64_t> out) {
  const int64_t count = dim(index, 0);
  const int64_t vocab = dim(logits, 1), stride = row_stride(logits, "logits");
  check_length(temperature, count, "temperature");
  check_length(top_k, count, "top_k");
  check_length(top_p, count, "top_p");
  check_length(min_p, count, "min_p");
  check_length(seed, count, "seed");
  check_length(position, count, "position");
  check_length(out, count, "out");
  check_vocab(vocab);
  check_index(index, dim(logits, 0));
  for (int64_t i = 0; i < count; ++i) {
    if (!(temperature.data()[i] >= kLeastTemperature)) {
      refuse("temperature ", temperature.data()[i], " is below ", kLeastTemperature, "; take the best token instead");
    }
    if (!(min_p.data()[i] >= 0 && min_p.data()[i] <= 1)) refuse("min_p is ", min_p.data()[i], "; it must be from 0 to 1");
    if (!(top_p.data()[i] >= 0)) refuse("top_p is ", top_p.data()[i], "; it must not be negative, and 1 or more is off");
  }
  nb::gil_scoped_release release;
  const SamplingTable& table = pick_sampling();
  parallel([&](Team& team) {
    team.for_each(count, [&](int64_t i) {
      static thread_local Scratch scratch;
      const Draw row{logits.data() + index.data()[i] * stride, vocab, temperature.data()[i], min_p.data()[i],
                     top_p.data()[i], top_k.data()[i], seed.data()[i], static_cast<uint64_t>(position.data()[i])};
      out.data()[i] = draw(table, row, scratch.of(vocab));
    });
  });
}

void row_logprobs(Logits logits, Vec<const int64_t> index, Vec<const int64_t> chosen, Vec<float> value,
                  Vec<int64_t> rank, Mat<int64_t> best, Mat<float> best_value) {
  const int64_t count = dim(index, 0);
  const int64_t vocab = dim(logits, 1), stride = row_stride(logits, "logits");
  const int64_t most = dim(best, 1);
  check_length(chosen, count, "chosen");
  check_length(value, count, "value");
  check_length(rank, count, "rank");
  check_length(best, count, "best");
  check_shape(best_value, count, most, "best_value");
  check_vocab(vocab);
  if (most > vocab) refuse("best has ", most, " columns, but logits only ", vocab);
  check_index(index, dim(logits, 0));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = chosen.data()[i];
    if (token < 0 || token >= vocab) refuse("chosen names token ", token, "; logits has columns 0 to ", vocab - 1);
  }
  nb::gil_scoped_release release;
  const SamplingTable& table = pick_sampling();
  parallel([&](Team& team) {
    team.for_each(count, [&](int64_t i) {
      static thread_local Scratch scratch;
      const ChosenLogprob own =
          logprobs(table, logits.data() + index.data()[i] * stride, vocab, chosen.data()[i], most, scratch.of(vocab),
                   best.data() + i * most, best_value.data() + i * most);
      value.data()[i] = own.value;
      rank.data()[i] = own.rank;
    });
  });
}

}  // namespace

void register_sampling(nb::module_& m) {
  m.def("row_extremes", &row_extremes, "logits"_a, "best"_a, "highest"_a, "finite"_a);
  m.def("best_allowed", &best_allowed, "logits"_a, "index"_a, "mask"_a, "best"_a, "highest"_a);
  m.def("forbid_tokens", &forbid_tokens, "logits"_a, "index"_a, "mask"_a);
  m.def("row_logprobs", &row_logprobs, "logits"_a, "index"_a, "chosen"_a, "value"_a, "rank"_a, "best"_a,
        "best_value"_a);
  m.def("draw_rows", &draw_rows, "logits"_a, "index"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a,
        "position"_a, "out"_a);
}

}  // namespace pm
