// Arithmetic of attention: query rows against one tile of positions, with a running softmax (Milakov and Gimelshein,
// arXiv:1805.02867).
//
// Several (row, head) pairs are processed at once, so that each load of the tile serves all of them. Each pair has its
// own sums in a fixed order: over dimensions for a score, over positions for an output. So a pair's result does not
// depend on the other pairs.
#pragma once
#include <algorithm>

#include "half_precision.h"
#include "kv_cache.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kPairsAtOnce = 6;

// How many vectors of a tile to process at once for R pairs: as many as the registers have sums for, to hide the
// latency of dependent additions.
template <int R>
constexpr int vectors_at_once() {
#if defined(__AVX512F__)
  return 4;
#else
  return R > 3 ? 2 : 4;
#endif
}

constexpr float kLowest = -3.402823466e38f;

struct TileShape {
  int block_size;
  int key_dim;
  int value_dim;
  float softcap;
};

// One head of a query row, and its running softmax.
struct Pair {
  float *query;   // [key_dim], scaled; with a bfloat16 cache it holds Factors
  float *totals;  // [kLanes] partial sums of the weights; their sum is the divisor
  float *output;  // [value_dim] sum of weighted values so far
  float highest;  // highest score so far, initially the sink or else the lowest finite number
  int low, high;  // places of the current tile that the row sees: low <= place < high
  const uint16_t *selected;  // of these places, the ones whose bit is set; null for all
};

inline IntVec lane_numbers() {
  IntVec numbers;
  for (int lane = 0; lane < kWidth; ++lane) numbers[lane] = lane;
  return numbers;
}

// Which of kWidth places from `first` on a pair sees: all bits of a lane, or none.
inline IntVec seen_places(const Pair &pair, int first) {
  const IntVec place = lane_numbers() + first;
  const IntVec seen = (place >= pair.low) & (place < pair.high);
  if (!pair.selected) return seen;
  const IntVec bits = (pair.selected[first / 16] + IntVec{}) >> (lane_numbers() + first % 16);
  return seen & -(bits & 1);
}

// sums[r] += factor(r) * V vectors starting at `from`. Keeps whichever are fewer, factors or vectors, in registers.
template <int R, int V, typename T, typename Factor>
inline __attribute__((always_inline)) void add_products(const Factor &factor, const T *from, Vec (&sums)[R][V]) {
  if constexpr (R > V) {
    Vec vectors[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) vectors[v] = load(from + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec f = broadcast(factor(r));
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = fma(f, vectors[v], sums[r][v]);
    }
  } else {
    Vec factors[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) factors[r] = broadcast(factor(r));
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const Vec vector = load(from + v * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][v] = fma(factors[r], vector, sums[r][v]);
    }
  }
}

// Scores [R, block_size] of V vectors of places.
template <int R, int V, typename T>
inline void score_places(const Tile<T> &tile, const TileShape &shape, const Pair *const *pairs, int place,
                         float *scores) {
  Vec sums[R][V] = {};
  const T *keys = tile.keys + place;
  for (int d = 0; d < shape.key_dim; ++d, keys += shape.block_size) {
    if (place == 0 && tile.next_keys)
      prefetch(tile.next_keys + int64_t{d} * shape.block_size, shape.block_size * sizeof(T));
    add_products<R, V>([&](int r) { return pairs[r]->query[d]; }, keys, sums);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * shape.block_size + place + v * kWidth, sums[r][v]);
}

template <int R, typename T>
inline void score(const Tile<T> &tile, const TileShape &shape, const Pair *const *pairs, float *scores) {
  constexpr int kVectors = vectors_at_once<R>();
  int place = 0;
  for (; place + kVectors * kWidth <= shape.block_size; place += kVectors * kWidth)
    score_places<R, kVectors>(tile, shape, pairs, place, scores);
  for (; place + 2 * kWidth <= shape.block_size; place += 2 * kWidth)
    score_places<R, 2>(tile, shape, pairs, place, scores);
  for (; place < shape.block_size; place += kWidth) score_places<R, 1>(tile, shape, pairs, place, scores);
}

// Scales and caps a pair's raw scores, sets places it does not see to -inf, and returns the highest.
inline float finish_scores(const TileShape &shape, const float *key_scales, const Pair &pair, float *scores) {
  const Vec hidden = broadcast(-__builtin_inff());
  Vec highest = hidden;
  for (int first = 0; first < shape.block_size; first += kWidth) {
    Vec s = load(scores + first);
    if (key_scales) s *= load(key_scales + first);
    if (shape.softcap != 0) s = shape.softcap * tanh(s / shape.softcap);
    s = seen_places(pair, first) ? s : hidden;
    highest = max(s, highest);
    store(scores + first, s);
  }
  return max(highest);
}

// Updates the highest score: multiplies the sums so far by e^(old - new).
inline void rescale(const TileShape &shape, float highest, Pair &pair) {
  const Vec factor = exp_not_positive(broadcast(pair.highest - highest));
  for (int lane = 0; lane < kLanes; lane += kWidth) store(pair.totals + lane, load(pair.totals + lane) * factor);
  transform(pair.output, shape.value_dim, [=](Vec sum) { return sum * factor; }, pair.output);
  pair.highest = highest;
}

// Turns a pair's finished scores into weights. NaN scores become NaN weights.
inline void weigh(const TileShape &shape, const float *value_scales, Pair &pair, float *scores) {
  Lanes totals = load_lanes(pair.totals);
  for (int first = 0; first < shape.block_size; first += kLanes) {
    int place = first;
    for (Vec &part : totals.parts) {
      Vec weight = exp_not_positive(load(scores + place) - pair.highest);
      part += weight;
      if (value_scales) weight *= load(value_scales + place);
      store(scores + place, weight);
      place += kWidth;
    }
  }
  std::memcpy(pair.totals, &totals, sizeof totals);
}

// Turns the raw scores of R pairs into weights. Each step runs for all pairs before the next, so that they overlap.
template <int R>
inline void weigh_pairs(const TileShape &shape, const float *key_scales, const float *value_scales,
                        Pair *const *pairs, float *scores) {
  float highest[R];
  for (int r = 0; r < R; ++r) highest[r] = finish_scores(shape, key_scales, *pairs[r], scores + r * shape.block_size);
  for (int r = 0; r < R; ++r)
    if (highest[r] > pairs[r]->highest) rescale(shape, highest[r], *pairs[r]);
  for (int r = 0; r < R; ++r) weigh(shape, value_scales, *pairs[r], scores + r * shape.block_size);
}

// Adds weighted values of places low to high to V vectors of the outputs, from dimension d on.
template <int R, int V, typename T>
inline void add_dimensions(const Tile<T> &tile, const TileShape &shape, const Pair *const *pairs, const float *weights,
                           int d, int low, int high) {
  Vec sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = load(pairs[r]->output + d + v * kWidth);
  for (int place = low; place < high; ++place) {
    if (d == 0 && tile.next_values)
      prefetch(tile.next_values + int64_t{place} * shape.value_dim, shape.value_dim * sizeof(T));
    add_products<R, V>([&](int r) { return weights[r * shape.block_size + place]; },
                       tile.values + int64_t{place} * shape.value_dim + d, sums);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(pairs[r]->output + d + v * kWidth, sums[r][v]);
}

// Adds weighted values of places low to high to all dimensions of the outputs.
template <int R, typename T>
inline void add_values(const Tile<T> &tile, const TileShape &shape, const Pair *const *pairs, const float *weights,
                       int low, int high) {
  constexpr int kVectors = vectors_at_once<R>();
  int d = 0;
  for (; d + kVectors * kWidth <= shape.value_dim; d += kVectors * kWidth)
    add_dimensions<R, kVectors>(tile, shape, pairs, weights, d, low, high);
  for (; d + kWidth <= shape.value_dim; d += kWidth)
    add_dimensions<R, 1>(tile, shape, pairs, weights, d, low, high);
  for (; d < shape.value_dim; ++d)
    for (int r = 0; r < R; ++r) {
      float total = pairs[r]->output[d];
      for (int place = low; place < high; ++place)
        total = fma(weights[r * shape.block_size + place],
                    to_float(tile.values[int64_t{place} * shape.value_dim + d]), total);
      pairs[r]->output[d] = total;
    }
}

// Processes a tile for R pairs. scores [R, block_size] is scratch memory.
template <int R, typename T>
void attend_pairs(const Tile<T> &tile, const TileShape &shape, Pair *const *pairs, float *scores) {
  score<R>(tile, shape, pairs, scores);
  weigh_pairs<R>(shape, tile.key_scales, tile.value_scales, pairs, scores);
  int low = 0, high = shape.block_size;  // the places that all pairs see
  for (int r = 0; r < R; ++r) {
    low = std::max(low, pairs[r]->low);
    high = std::min(high, pairs[r]->high);
  }
  high = std::max(low, high);
  // Places that a row does not see are skipped instead of weighted with zero: they may contain anything, even NaN.
  const auto add_alone = [&](int r, int from, int to) {
    if (from < to) add_values<1>(tile, shape, pairs + r, scores + r * shape.block_size, from, to);
  };
  for (int r = 0; r < R; ++r) add_alone(r, pairs[r]->low, std::min(low, pairs[r]->high));
  add_values<R>(tile, shape, pairs, scores, low, high);
  for (int r = 0; r < R; ++r) add_alone(r, std::max(high, pairs[r]->low), pairs[r]->high);
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention with keys and values in bfloat16. Queries and weights are rounded to bfloat16 too, and multiplied in pairs
// of dimensions and of places (half_precision.h). Otherwise as above.
//
// Scores are exponents of two: queries are also scaled by log2(e). The divisor is the sum of the rounded weights, so
// that rounding does not bias the result.

constexpr float kLog2E = 1.44269504f;

// As many pairs as the registers have sums for, two vectors each.
#if defined(__AVX512F__)
constexpr int kBf16PairsAtOnce = 8;
#else
constexpr int kBf16PairsAtOnce = 4;
#endif

// How many vectors of a tile to process at once for R pairs.
template <int R>
constexpr int bf16_vectors_at_once() {
  return R > kBf16PairsAtOnce * 3 / 4 ? 2 : 4;
}

inline const Factor *query_factors(const Pair &pair) { return reinterpret_cast<const Factor *>(pair.query); }

// Rounds x * scale for Pair::query, which has room for whole vectors.
inline void store_query(const float *x, float scale, int64_t n, float *query) {
  Factor *to = reinterpret_cast<Factor *>(query);
  int64_t d = 0;
  for (; d + kWidth <= n; d += kWidth) store_factors(to + d, rounded_to_bfloat16(load(x + d) * scale));
  if (d == n) return;
  store_factors(to + d, rounded_to_bfloat16(load_some(x + d, n - d) * scale));
}

// Scores [R, block_size] of V vectors of places.
template <int R, int V>
inline void score_bf16(const Tile<Bfloat16> &tile, const TileShape &shape, const Pair *const *pairs, int place,
                          float *scores) {
  Vec sums[R][V] = {};
  const Bfloat16 *keys = tile.keys + 2 * place;
  for (int d = 0; d < shape.key_dim; d += 2, keys += 2 * shape.block_size) {
    if (place == 0 && tile.next_keys)
      prefetch(tile.next_keys + int64_t{d} * shape.block_size, 2 * shape.block_size * sizeof(Bfloat16));
    Bf16Pairs bf16[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) bf16[v] = load_bf16_pairs(keys + 2 * v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Bf16Pairs factor = broadcast_bf16_pair(query_factors(*pairs[r]) + d);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = add_products(bf16[v], factor, sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * shape.block_size + place + v * kWidth, sums[r][v]);
}

template <int R>
inline void score_bf16(const Tile<Bfloat16> &tile, const TileShape &shape, const Pair *const *pairs, float *scores) {
  constexpr int kVectors = bf16_vectors_at_once<R>();
  int place = 0;
  for (; place + kVectors * kWidth <= shape.block_size; place += kVectors * kWidth)
    score_bf16<R, kVectors>(tile, shape, pairs, place, scores);
  if constexpr (kVectors > 2)
    for (; place + 2 * kWidth <= shape.block_size; place += 2 * kWidth)
      score_bf16<R, 2>(tile, shape, pairs, place, scores);
  for (; place < shape.block_size; place += kWidth) score_bf16<R, 1>(tile, shape, pairs, place, scores);
}

// Caps a pair's raw scores and sets places it does not see to -inf. Returns the highest score so far.
inline float finish_powers(const TileShape &shape, const Pair &pair, float *scores) {
  const bool sees_all = pair.low <= 0 && pair.high >= shape.block_size && !pair.selected;
  const Vec before = broadcast(pair.highest), hidden = broadcast(-__builtin_inff());
  Vec highest = before;
  for (int first = 0; first < shape.block_size; first += kWidth) {
    Vec s = load(scores + first);
    if (shape.softcap != 0) s = shape.softcap * kLog2E * tanh(s / shape.softcap);
    if (!sees_all) s = seen_places(pair, first) ? s : hidden;
    highest = max(s, highest);
    if (!sees_all || shape.softcap != 0) store(scores + first, s);
  }
  return any_above(highest, before) ? max(highest) : pair.highest;
}

// Updates the highest score, like `rescale`.
inline void rescale_power(const TileShape &shape, float highest, Pair &pair) {
  const Vec factor = exp2_not_positive(broadcast(pair.highest - highest));
  for (int lane = 0; lane < kLanes; lane += kWidth) store(pair.totals + lane, load(pair.totals + lane) * factor);
  for (int d = 0; d < shape.value_dim; d += kWidth)
    store(pair.output + d, without_smaller(load(pair.output + d) * factor, kTinySum));
  pair.highest = highest;
}

// Turns a pair's finished scores into rounded weights, in place.
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

// Adds weighted values of bf16 pairs first to end to V vectors of the outputs, from dimension d on.
// load_values(bf16 pair, dimension) reads the values from the tile.
template <int R, int V, typename Load>
inline __attribute__((always_inline)) void add_bf16(const TileShape &shape, const Pair *const *pairs,
                                                    const float *scores, int d, int first, int end,
                                                    const Load &load_values) {
  Vec sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = load(pairs[r]->output + d + v * kWidth);
  for (int places = first; places < end; ++places) {
    Bf16Pairs bf16[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) bf16[v] = load_values(places, d + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Bf16Pairs factor = broadcast_bf16_pair(weights_of(shape, scores, r) + 2 * places);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = add_products(bf16[v], factor, sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(pairs[r]->output + d + v * kWidth, sums[r][v]);
}

// The last bf16 pairs of a row, fewer than a vector, padded with zeros.
struct LastBf16Pairs {
  Bfloat16 numbers[2 * kWidth] = {};
};

inline LastBf16Pairs last_bf16_pairs(const Bfloat16 *from, int count) {
  LastBf16Pairs last;
  std::memcpy(last.numbers, from, count * 2 * sizeof *from);
  return last;
}

// Adds weighted values of bf16 pairs first to end, which all R pairs see, to all dimensions of the outputs.
template <int R>
inline void add_bf16(const Tile<Bfloat16> &tile, const TileShape &shape, const Pair *const *pairs,
                        const float *scores, int first, int end) {
  constexpr int kVectors = bf16_vectors_at_once<R>();
  const int64_t stride = 2 * shape.value_dim;
  const auto load_values = [&](int places, int d) { return load_bf16_pairs(tile.values + places * stride + 2 * d); };
  int d = 0;
  for (; d + kVectors * kWidth <= shape.value_dim; d += kVectors * kWidth)
    add_bf16<R, kVectors>(shape, pairs, scores, d, first, end, [&](int places, int of) {
      if (of == 0 && tile.next_values) prefetch(tile.next_values + places * stride, stride * sizeof(Bfloat16));
      return load_values(places, of);
    });
  for (; d + kWidth <= shape.value_dim; d += kWidth)
    add_bf16<R, 1>(shape, pairs, scores, d, first, end, load_values);
  if (d == shape.value_dim) return;
  add_bf16<R, 1>(shape, pairs, scores, d, first, end, [&](int places, int of) {
    return load_bf16_pairs(last_bf16_pairs(tile.values + places * stride + 2 * of, shape.value_dim - of).numbers);
  });
}

// Like add_bf16 for one pair that may see only one place of the first and last bf16 pair. The other place is skipped
// instead of weighted with zero: it may contain anything, even NaN.
inline void add_seen_bf16(const Tile<Bfloat16> &tile, const TileShape &shape, const Pair *const *pair,
                             const float *scores, int first, int end) {
  const int64_t stride = 2 * shape.value_dim;
  const auto kept = [&](int places) {
    const uint32_t first_number = 2 * places >= (*pair)->low ? 0xffffu : 0;
    const uint32_t numbers = first_number | (2 * places + 1 < (*pair)->high ? 0xffff0000u : 0);
    return static_cast<int32_t>(numbers);
  };
  int d = 0;
  for (; d + kWidth <= shape.value_dim; d += kWidth)
    add_bf16<1, 1>(shape, pair, scores, d, first, end, [&](int places, int of) {
      return load_bf16_pairs(tile.values + places * stride + 2 * of, kept(places));
    });
  if (d == shape.value_dim) return;
  add_bf16<1, 1>(shape, pair, scores, d, first, end, [&](int places, int of) {
    const LastBf16Pairs last = last_bf16_pairs(tile.values + places * stride + 2 * of, shape.value_dim - of);
    return load_bf16_pairs(last.numbers, kept(places));
  });
}

// Processes a tile for R pairs. scores [R, block_size] is scratch memory.
template <int R>
void attend_bf16(const Tile<Bfloat16> &tile, const TileShape &shape, Pair *const *pairs, float *scores) {
  score_bf16<R>(tile, shape, pairs, scores);
  for (int r = 0; r < R; ++r) {
    const float highest = finish_powers(shape, *pairs[r], scores + r * shape.block_size);
    if (highest > pairs[r]->highest) rescale_power(shape, highest, *pairs[r]);
  }
  int first = 0, end = shape.block_size / 2;  // bf16 pairs of which all pairs see both places
  for (int r = 0; r < R; ++r) {
    weigh_powers(shape, *pairs[r], scores + r * shape.block_size);
    first = std::max(first, (pairs[r]->low + 1) / 2);
    end = std::min(end, pairs[r]->high / 2);
  }
  end = std::max(first, end);
  const auto add_alone = [&](int r, int from, int to) {
    if (from < to) add_seen_bf16(tile, shape, pairs + r, scores + r * shape.block_size, from, to);
  };
  for (int r = 0; r < R; ++r) add_alone(r, pairs[r]->low / 2, std::min(first, (pairs[r]->high + 1) / 2));
  if (first < end) add_bf16<R>(tile, shape, pairs, scores, first, end);
  for (int r = 0; r < R; ++r) add_alone(r, std::max(end, pairs[r]->low / 2), (pairs[r]->high + 1) / 2);
}

}  // namespace SW_ISA
