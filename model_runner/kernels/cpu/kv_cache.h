// The paged KV cache of one layer: storage types, block addresses, and writing a token's key and value.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>

#include "half_precision.h"
#include "rounding.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

// The step with the blocks of a layer's cache group.
inline const SwStep &step_of(const SwKvCache &cache, const SwStep &step) {
  return cache.group == 0 ? step : step.groups[cache.group - 1];
}

// Calls work.template operator()<T>() for the number type T of a cache.
template <typename Work>
inline void with_number_type(const SwKvCache &cache, const Work &work) {
  switch (cache.type) {
    case SW_KV_FLOAT32: return work.template operator()<float>();
    case SW_KV_BFLOAT16: return work.template operator()<Bfloat16>();
    default: return work.template operator()<int8_t>();
  }
}

inline float to_float(float x) { return x; }

inline float to_float(int8_t x) { return x; }

// A block's keys and values of one key-value head. In bfloat16 they are stored in pairs (half_precision.h): two
// dimensions of a key, zero-padded if their number is odd, and two places of a value.
template <typename T>
struct Tile {
  T *keys;              // [key_dim, block_size], in bfloat16 [key_dim / 2, block_size, 2]
  T *values;            // [block_size, value_dim], in bfloat16 [block_size / 2, value_dim, 2]
  float *key_scales;    // [block_size]; null unless int8
  float *value_scales;  // [block_size]; null unless int8
  const T *next_keys;   // of the next tile, to prefetch it; null for none
  const T *next_values;
};

template <typename T>
constexpr int64_t kInterleaved = std::is_same_v<T, Bfloat16> ? 2 : 1;  // numbers stored as a pair

// Numbers that a stored key takes.
template <typename T>
inline int64_t stored_key_dim(int64_t key_dim) {
  return round_up(key_dim, kInterleaved<T>);
}

// Index of dimension d of a place in a tile's keys and values.
template <typename T>
inline int64_t key_at(int64_t block_size, int64_t place, int64_t d) {
  constexpr int64_t n = kInterleaved<T>;
  return (d / n * block_size + place) * n + d % n;
}

template <typename T>
inline int64_t value_at(int64_t value_dim, int64_t place, int64_t d) {
  constexpr int64_t n = kInterleaved<T>;
  return (place / n * value_dim + d) * n + place % n;
}

template <typename T>
inline Tile<T> tile_of(const SwKvCache &cache, int64_t block, int64_t head) {
  const int64_t index = block * cache.kv_heads + head, places = cache.block_size;
  return {static_cast<T *>(cache.keys) + index * stored_key_dim<T>(cache.key_dim) * places,
          static_cast<T *>(cache.values) + index * cache.value_dim * places,
          cache.key_scales ? cache.key_scales + index * places : nullptr,
          cache.value_scales ? cache.value_scales + index * places : nullptr, nullptr, nullptr};
}

// Copies a place of a tile to a place of another tile, which may hold integers as floats.
template <typename T, typename S>
inline void copy_place(const SwKvCache &cache, const Tile<T> &from, int64_t from_place, const Tile<S> &to,
                       int64_t to_place) {
  const int64_t key_dim = stored_key_dim<T>(cache.key_dim), places = cache.block_size, value_dim = cache.value_dim;
  for (int64_t d = 0; d < key_dim; ++d)
    to.keys[key_at<S>(places, to_place, d)] = static_cast<S>(from.keys[key_at<T>(places, from_place, d)]);
  for (int64_t d = 0; d < value_dim; ++d)
    to.values[value_at<S>(value_dim, to_place, d)] = static_cast<S>(from.values[value_at<T>(value_dim, from_place, d)]);
  if (!from.key_scales) return;
  to.key_scales[to_place] = from.key_scales[from_place];
  to.value_scales[to_place] = from.value_scales[from_place];
}

// Prefetches memory into the L2 cache. A KV cache is larger than any processor cache, and waiting for one line after
// another takes longer than the arithmetic. A core can keep too few lines in flight to L1 to use the full memory
// bandwidth.
inline void prefetch(const void *memory, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char *>(memory) + i, 0, 2);
}

// Rounds x to integers of at most 127, to nearest, ties to even, and stores them `stride` apart from `to` on. Returns
// the scale, as in Rounding.
inline float write_integers(const float *x, int64_t n, int8_t *to, int64_t stride) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Rounding rounding = rounding_of(x, n, 127.0f);
  for (int64_t i = 0; i < n; ++i)
    to[i * stride] = rounding.factor != 0 ? static_cast<int8_t>(x[i] * rounding.factor + kMagic - kMagic) : 0;
  return rounding.scale;
}

inline void write_place(const SwKvCache &cache, const Tile<int8_t> &tile, int64_t place, const float *key,
                        const float *value) {
  const int64_t value_dim = cache.value_dim;
  tile.key_scales[place] = write_integers(key, cache.key_dim, tile.keys + place, cache.block_size);
  tile.value_scales[place] = write_integers(value, value_dim, tile.values + place * value_dim, 1);
}

inline void write_place(const SwKvCache &cache, const Tile<float> &tile, int64_t place, const float *key,
                        const float *value) {
  for (int64_t d = 0; d < cache.key_dim; ++d) tile.keys[d * cache.block_size + place] = key[d];
  if (cache.value_dim > 0)  // index keys have no values, and no memory for them
    std::memcpy(tile.values + place * cache.value_dim, value, cache.value_dim * sizeof(float));
}

// Calls take(d, count, numbers) for n numbers from x on, rounded to bfloat16, kWidth at a time. The last may be padded
// with zeros; before them, the count is a constant of the compiler, which makes writing single numbers faster.
template <typename Take>
inline void round_to_bfloat16(const float *x, int64_t n, const Take &take) {
  Bfloat16 numbers[kWidth];
  int64_t d = 0;
  for (; d + kWidth <= n; d += kWidth) {
    store_bfloat16(numbers, rounded_to_bfloat16(load(x + d)));
    take(d, std::integral_constant<int, kWidth>(), numbers);
  }
  if (d == n) return;
  store_bfloat16(numbers, rounded_to_bfloat16(load_some(x + d, n - d)));
  take(d, static_cast<int>(n - d), numbers);
}

inline void write_place(const SwKvCache &cache, const Tile<Bfloat16> &tile, int64_t place, const float *key,
                        const float *value) {
  const int64_t places = cache.block_size, value_dim = cache.value_dim;
  round_to_bfloat16(key, cache.key_dim, [&](int64_t d, auto count, const Bfloat16 *numbers) {
    Bfloat16 *to = tile.keys + key_at<Bfloat16>(places, place, d);
    for (int i = 0; i < count; i += 2, to += 2 * places) std::memcpy(to, numbers + i, 2 * sizeof *to);
  });
  round_to_bfloat16(value, value_dim, [&](int64_t d, auto count, const Bfloat16 *numbers) {
    Bfloat16 *to = tile.values + value_at<Bfloat16>(value_dim, place, d);
    for (int i = 0; i < count; ++i) to[2 * i] = numbers[i];
  });
}

// Prefetches the memory that write_kv will write: a token's key is spread over as many lines as it has dimensions.
inline void prefetch_kv(const SwKvCache &cache, const SwStep &step, int64_t token) {
  const int64_t block = step.block_of[token], place = step.offset_of[token];
  with_number_type(cache, [&]<typename T>() {
    for (int64_t head = 0; head < cache.kv_heads; ++head) {
      const Tile<T> tile = tile_of<T>(cache, block, head);
      for (int64_t d = 0; d < cache.key_dim; d += kInterleaved<T>)
        __builtin_prefetch(tile.keys + key_at<T>(cache.block_size, place, d));
      prefetch(tile.values + value_at<T>(cache.value_dim, place, 0), kInterleaved<T> * cache.value_dim * sizeof(T));
    }
  });
}

// Stores a token's key [kv_heads, key_dim] and value [kv_heads, value_dim] at its block and offset.
inline void write_kv(const SwKvCache &cache, const SwStep &step, int64_t token, const float *key, const float *value) {
  const int64_t block = step.block_of[token], place = step.offset_of[token];
  with_number_type(cache, [&]<typename T>() {
    for (int64_t head = 0; head < cache.kv_heads; ++head)
      write_place(cache, tile_of<T>(cache, block, head), place, key + head * cache.key_dim,
                  value + head * cache.value_dim);
  });
}

// Makes a move in the cache of one layer.
inline void move_kv(const SwKvCache &cache, const SwMove &move) {
  with_number_type(cache, [&]<typename T>() {
    for (int64_t head = 0; head < cache.kv_heads; ++head)
      copy_place(cache, tile_of<T>(cache, move.from_block, head), move.from_offset,
                 tile_of<T>(cache, move.to_block, head), move.to_offset);
  });
}

}  // namespace SW_ISA
