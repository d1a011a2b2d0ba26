// The arithmetic of attention with keys and values in bfloat16: queries and weights are rounded to bfloat16, too, and
// multiplied in couples of dimensions and of places; see bfloat16.h. Otherwise all is as in attention_tile.h.
//
// Scores are exponents of two: queries are scaled by log2(e) as well. The weights' sum is that of the rounded weights, so
// that rounding them makes them no smaller or larger on the whole.
#pragma once
#include <algorithm>

#include "attention_tile.h"
#include "bfloat16.h"
#include "kv_cache.h"
#include "simd.h"

namespace SW_ISA {

constexpr float kLog2E = 1.44269504f;

// As many as the registers hold sums of, two vectors each.
#if defined(__AVX512F__)
constexpr int kCouplePairs = 8;
#else
constexpr int kCouplePairs = 4;
#endif

// Of a tile, for R pairs.
template <int R>
constexpr int couple_vectors_at_once() {
  return R > kCouplePairs * 3 / 4 ? 2 : 4;
}

inline const Factor *query_factors(const Pair &pair) { return reinterpret_cast<const Factor *>(pair.query); }

// Rounds x * scale for Pair::query, which has room for whole vectors.
inline void store_query(const float *x, float scale, int64_t n, float *query) {
  Factor *to = reinterpret_cast<Factor *>(query);
  int64_t d = 0;
  for (; d + kWidth <= n; d += kWidth) store_factors(to + d, rounded_to_bfloat16(load(x + d) * scale));
  if (d == n) return;
  float last[kWidth] = {};
  std::memcpy(last, x + d, (n - d) * sizeof(float));
  store_factors(to + d, rounded_to_bfloat16(load(last) * scale));
}

// Scores [R, block_size] of V vectors of places.
template <int R, int V>
inline void score_couples(const Tile<Bfloat16> &tile, const TileShape &shape, const Pair *const *pairs, int place,
                          float *scores) {
  Vec sums[R][V] = {};
  const Bfloat16 *keys = tile.keys + 2 * place;
  for (int d = 0; d < shape.key_dim; d += 2, keys += 2 * shape.block_size) {
    if (place == 0 && tile.next_keys)
      ask_for(tile.next_keys + int64_t{d} * shape.block_size, 2 * shape.block_size * sizeof(Bfloat16));
    Couples couples[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) couples[v] = load_couples(keys + 2 * v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Couples factor = broadcast_couple(query_factors(*pairs[r]) + d);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = add_products(couples[v], factor, sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * shape.block_size + place + v * kWidth, sums[r][v]);
}

template <int R>
inline void score_couples(const Tile<Bfloat16> &tile, const TileShape &shape, const Pair *const *pairs, float *scores) {
  constexpr int kVectors = couple_vectors_at_once<R>();
  int place = 0;
  for (; place + kVectors * kWidth <= shape.block_size; place += kVectors * kWidth)
    score_couples<R, kVectors>(tile, shape, pairs, place, scores);
  if constexpr (kVectors > 2)
    for (; place + 2 * kWidth <= shape.block_size; place += 2 * kWidth)
      score_couples<R, 2>(tile, shape, pairs, place, scores);
  for (; place < shape.block_size; place += kWidth) score_couples<R, 1>(tile, shape, pairs, place, scores);
}

// Caps the raw scores of a pair and hides the places that it does not see. Returns the highest of all so far.
inline float finish_powers(const TileShape &shape, const Pair &pair, float *scores) {
  const bool sees_all = pair.low <= 0 && pair.high >= shape.block_size;
  const Vec before = broadcast(pair.highest), hidden = broadcast(-__builtin_inff());
  Vec highest = before;
  for (int first = 0; first < shape.block_size; first += kWidth) {
    Vec s = load(scores + first);
    if (shape.softcap != 0) s = shape.softcap * kLog2E * tanh(s / shape.softcap);
    if (!sees_all) {
      const IntVec place = lane_numbers() + first;
      s = (place >= pair.low) & (place < pair.high) ? s : hidden;
    }
    highest = max(s, highest);
    if (!sees_all || shape.softcap != 0) store(scores + first, s);
  }
  return any_above(highest, before) ? max(highest) : pair.highest;
}

// Takes up a new highest score; see raise.
inline void raise_power(const TileShape &shape, float highest, Pair &pair) {
  const Vec factor = exp2_not_positive(broadcast(pair.highest - highest));
  for (int lane = 0; lane < kLanes; lane += kWidth) store(pair.totals + lane, load(pair.totals + lane) * factor);
  for (int d = 0; d < shape.value_dim; d += kWidth)
    store(pair.output + d, without_smaller(load(pair.output + d) * factor, kTinySum));
  pair.highest = highest;
}

// Turns finished scores of a pair into the weights of its values, which are rounded and take their place.
inline void weigh_powers(const TileShape &shape, Pair &pair, float *scores) {
  Lanes totals = load_lanes(pair.totals);
  Factor *weights = reinterpret_cast<Factor *>(scores);
  for (int first = 0; first < shape.block_size; first += kLanes) {
    int place = first;
    for (Vec &part : totals.parts) {
      part += store_nearest(weights + place, exp2_not_positive(load(scores + place) - pair.highest));
      place += kWidth;
    }
  }
  std::memcpy(pair.totals, &totals, sizeof totals);
}

inline const Factor *weights_of(const TileShape &shape, const float *scores, int r) {
  return reinterpret_cast<const Factor *>(scores + r * shape.block_size);
}

// Adds the weighted values of couples first to end to V vectors of the outputs from dimension d on. What is read of the
// tile is load_values(couple, dimension).
template <int R, int V, typename Load>
inline __attribute__((always_inline)) void add_couples(const TileShape &shape, const Pair *const *pairs,
                                                       const float *scores, int d, int first, int end,
                                                       const Load &load_values) {
  Vec sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = load(pairs[r]->output + d + v * kWidth);
  for (int couple = first; couple < end; ++couple) {
    Couples couples[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) couples[v] = load_values(couple, d + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Couples factor = broadcast_couple(weights_of(shape, scores, r) + 2 * couple);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = add_products(couples[v], factor, sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(pairs[r]->output + d + v * kWidth, sums[r][v]);
}

// The last couples of a row, fewer than a vector has, and zeros.
struct LastCouples {
  Bfloat16 numbers[2 * kWidth] = {};
};

inline LastCouples last_couples(const Bfloat16 *from, int count) {
  LastCouples last;
  std::memcpy(last.numbers, from, count * 2 * sizeof *from);
  return last;
}

// Adds the weighted values of couples first to end, which all R pairs see, to all dimensions of the outputs.
template <int R>
inline void add_couples(const Tile<Bfloat16> &tile, const TileShape &shape, const Pair *const *pairs,
                        const float *scores, int first, int end) {
  constexpr int kVectors = couple_vectors_at_once<R>();
  const int64_t stride = 2 * shape.value_dim;
  const auto load_values = [&](int couple, int d) { return load_couples(tile.values + couple * stride + 2 * d); };
  int d = 0;
  for (; d + kVectors * kWidth <= shape.value_dim; d += kVectors * kWidth)
    add_couples<R, kVectors>(shape, pairs, scores, d, first, end, [&](int couple, int of) {
      if (of == 0 && tile.next_values) ask_for(tile.next_values + couple * stride, stride * sizeof(Bfloat16));
      return load_values(couple, of);
    });
  for (; d + kWidth <= shape.value_dim; d += kWidth)
    add_couples<R, 1>(shape, pairs, scores, d, first, end, load_values);
  if (d == shape.value_dim) return;
  add_couples<R, 1>(shape, pairs, scores, d, first, end, [&](int couple, int of) {
    return load_couples(last_couples(tile.values + couple * stride + 2 * of, shape.value_dim - of).numbers);
  });
}

// The same for one pair, which sees of the first and of the last couple one place or both. What it does not see is left
// out and not weighted with zero, for anything may stand there, even NaN.
inline void add_seen_couples(const Tile<Bfloat16> &tile, const TileShape &shape, const Pair *const *pair,
                             const float *scores, int first, int end) {
  const int64_t stride = 2 * shape.value_dim;
  const auto kept = [&](int couple) {
    const uint32_t numbers = (2 * couple >= (*pair)->low ? 0xffffu : 0) | (2 * couple + 1 < (*pair)->high ? 0xffff0000u : 0);
    return static_cast<int32_t>(numbers);
  };
  int d = 0;
  for (; d + kWidth <= shape.value_dim; d += kWidth)
    add_couples<1, 1>(shape, pair, scores, d, first, end, [&](int couple, int of) {
      return load_couples(tile.values + couple * stride + 2 * of, kept(couple));
    });
  if (d == shape.value_dim) return;
  add_couples<1, 1>(shape, pair, scores, d, first, end, [&](int couple, int of) {
    return load_couples(last_couples(tile.values + couple * stride + 2 * of, shape.value_dim - of).numbers, kept(couple));
  });
}

// R pairs against a tile; scores [R, block_size] is scratch memory.
template <int R>
void attend_couples(const Tile<Bfloat16> &tile, const TileShape &shape, Pair *const *pairs, float *scores) {
  score_couples<R>(tile, shape, pairs, scores);
  for (int r = 0; r < R; ++r) {
    const float highest = finish_powers(shape, *pairs[r], scores + r * shape.block_size);
    if (highest > pairs[r]->highest) raise_power(shape, highest, *pairs[r]);
  }
  int first = 0, end = shape.block_size / 2;  // couples of which all pairs see both places
  for (int r = 0; r < R; ++r) {
    weigh_powers(shape, *pairs[r], scores + r * shape.block_size);
    first = std::max(first, (pairs[r]->low + 1) / 2);
    end = std::min(end, pairs[r]->high / 2);
  }
  end = std::max(first, end);
  const auto add_alone = [&](int r, int from, int to) {
    if (from < to) add_seen_couples(tile, shape, pairs + r, scores + r * shape.block_size, from, to);
  };
  for (int r = 0; r < R; ++r) add_alone(r, pairs[r]->low / 2, std::min(first, (pairs[r]->high + 1) / 2));
  if (first < end) add_couples<R>(tile, shape, pairs, scores, first, end);
  for (int r = 0; r < R; ++r) add_alone(r, std::max(end, pairs[r]->low / 2), (pairs[r]->high + 1) / 2);
}

}  // namespace SW_ISA
