// The arithmetic of attention: query rows against one tile of positions, with a running softmax (Milakov and
// Gimelshein, arXiv:1805.02867).
//
// Several pairs of a row and a head are worked on at once, so that what is loaded of the tile serves all of them. Each
// has its own sums, always taken in the same order: over dimensions for a score, over positions for an output. So a
// pair's result is the same whichever others are beside it.
#pragma once
#include <algorithm>

#include "kv_cache.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kPairsAtOnce = 6;

// How many vectors of a tile to work on at once for R pairs: as many as the registers can hold sums of, since a sum waits
// for the one before.
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

// One head of a query row on its way over the tiles.
struct Pair {
  float *query;   // [key_dim], scaled
  float *totals;  // [kLanes] sums of the weights so far, whose sum is the divisor
  float *output;  // [value_dim] weighted values so far
  float highest;  // score so far, at first the lowest finite number
  int low, high;  // places of the tile at hand that the row sees: low <= place < high
};

inline IntVec lane_numbers() {
  IntVec numbers;
  for (int lane = 0; lane < kWidth; ++lane) numbers[lane] = lane;
  return numbers;
}

// sums[r] += factor(r) * V vectors from `from` on. Of the factors and the vectors, the fewer stay in registers.
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
      ask_for(tile.next_keys + int64_t{d} * shape.block_size, shape.block_size * sizeof(T));
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

// Scales and caps the raw scores of a pair, hides the places that it does not see, and returns the highest.
inline float finish_scores(const TileShape &shape, const float *key_scales, const Pair &pair, float *scores) {
  const Vec hidden = broadcast(-__builtin_inff());
  Vec highest = hidden;
  for (int first = 0; first < shape.block_size; first += kWidth) {
    Vec s = load(scores + first);
    if (key_scales) s *= load(key_scales + first);
    if (shape.softcap != 0) s = shape.softcap * tanh(s / shape.softcap);
    const IntVec place = lane_numbers() + first;
    s = (place >= pair.low) & (place < pair.high) ? s : hidden;
    highest = max(s, highest);
    store(scores + first, s);
  }
  return max(highest);
}

// Takes up a new highest score: what the pair has so far is multiplied by e^(old - new).
inline void raise(const TileShape &shape, float highest, Pair &pair) {
  const Vec factor = exp_not_positive(broadcast(pair.highest - highest));
  for (int lane = 0; lane < kLanes; lane += kWidth) store(pair.totals + lane, load(pair.totals + lane) * factor);
  int d = 0;
  for (; d + kWidth <= shape.value_dim; d += kWidth) store(pair.output + d, load(pair.output + d) * factor);
  for (; d < shape.value_dim; ++d) pair.output[d] *= factor[0];
  pair.highest = highest;
}

// Turns finished scores of a pair into the weights of its values. A weight is NaN where a score was.
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

// The weights of R pairs from their raw scores. Each step is taken for all pairs before the next, as they can overlap.
template <int R>
inline void weigh_pairs(const TileShape &shape, const float *key_scales, const float *value_scales,
                        Pair *const *pairs, float *scores) {
  float highest[R];
  for (int r = 0; r < R; ++r) highest[r] = finish_scores(shape, key_scales, *pairs[r], scores + r * shape.block_size);
  for (int r = 0; r < R; ++r)
    if (highest[r] > pairs[r]->highest) raise(shape, highest[r], *pairs[r]);
  for (int r = 0; r < R; ++r) weigh(shape, value_scales, *pairs[r], scores + r * shape.block_size);
}

// Adds weighted values of places low to high to V vectors of the outputs from dimension d on.
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
      ask_for(tile.next_values + int64_t{place} * shape.value_dim, shape.value_dim * sizeof(T));
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

// R pairs against a tile; scores [R, block_size] is scratch memory.
template <int R, typename T>
void attend_pairs(const Tile<T> &tile, const TileShape &shape, Pair *const *pairs, float *scores) {
  score<R>(tile, shape, pairs, scores);
  weigh_pairs<R>(shape, tile.key_scales, tile.value_scales, pairs, scores);
  int low = 0, high = shape.block_size;  // what all of them see
  for (int r = 0; r < R; ++r) {
    low = std::max(low, pairs[r]->low);
    high = std::min(high, pairs[r]->high);
  }
  high = std::max(low, high);
  // Places that a row does not see are left out and not weighted with zero, for anything may stand there, even NaN.
  const auto add_alone = [&](int r, int from, int to) {
    if (from < to) add_values<1>(tile, shape, pairs + r, scores + r * shape.block_size, from, to);
  };
  for (int r = 0; r < R; ++r) add_alone(r, pairs[r]->low, std::min(low, pairs[r]->high));
  add_values<R>(tile, shape, pairs, scores, low, high);
  for (int r = 0; r < R; ++r) add_alone(r, std::max(high, pairs[r]->low), pairs[r]->high);
}

}  // namespace SW_ISA
