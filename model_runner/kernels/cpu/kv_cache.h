// The paged KV cache of one layer: its storage types, where a block lies, and writing a token's key and value.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>

#include "rounding.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

struct Bfloat16 {
  uint16_t bits;
};

inline Vec load(const Bfloat16 *from) {
#if defined(__AVX512F__)
  const IntVec words = (IntVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
#elif defined(__AVX2__)
  const IntVec words = (IntVec)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#else
  IntVec words;
  for (int lane = 0; lane < kWidth; ++lane) words[lane] = from[lane].bits;
#endif
  return from_bits(words << 16);
}

inline Vec load(const int8_t *from) {
#if defined(__AVX512F__)
  const IntVec numbers = (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#elif defined(__AVX2__)
  const IntVec numbers = (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
#else
  IntVec numbers;
  for (int lane = 0; lane < kWidth; ++lane) numbers[lane] = from[lane];
#endif
  return __builtin_convertvector(numbers, Vec);
}

inline float to_float(float x) { return x; }

inline float to_float(Bfloat16 x) {
  const uint32_t word = uint32_t{x.bits} << 16;
  float result;
  std::memcpy(&result, &word, sizeof result);
  return result;
}

inline float to_float(int8_t x) { return x; }

// A block's keys and values of one key-value head.
template <typename T>
struct Tile {
  T *keys;              // [key_dim, block_size]
  T *values;            // [block_size, value_dim]
  float *key_scales;    // [block_size]; null where numbers are stored as they are
  float *value_scales;  // likewise
  const T *next_keys;   // of the tile that comes after, to ask for them early; null for none
  const T *next_values;
};

template <typename T>
inline Tile<T> tile_of(const SwKvCache &cache, int64_t block, int64_t head) {
  const int64_t index = block * cache.kv_heads + head, places = cache.block_size;
  return {static_cast<T *>(cache.keys) + index * cache.key_dim * places,
          static_cast<T *>(cache.values) + index * cache.value_dim * places,
          cache.key_scales ? cache.key_scales + index * places : nullptr,
          cache.value_scales ? cache.value_scales + index * places : nullptr, nullptr, nullptr};
}

// Asks for memory that will be needed soon: a cache of keys and values is larger than any processor's, and waiting for one
// line after the other takes longer than the arithmetic. It is asked for into the second-level cache: of lines on their
// way to the first, a core can keep too few to use all of the memory's bandwidth.
inline void ask_for(const void *memory, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char *>(memory) + i, 0, 2);
}

inline void store_rounded(float x, float *to) { *to = x; }

inline void store_rounded(float x, Bfloat16 *to) {  // to nearest, halves to even; NaN stays NaN
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  const uint32_t rounded = word + 0x7fff + (word >> 16 & 1);
  to->bits = static_cast<uint16_t>((x == x ? rounded : word | 0x400000) >> 16);
}

// Every `stride`th number from `to` on takes one of x.
template <typename T>
inline void write_vector(const float *x, int64_t n, T *to, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) store_rounded(x[i], to + i * stride);
}

// The same as integers of at most 127, to nearest, halves to even. Returns their scale; see Rounding.
inline float write_vector(const float *x, int64_t n, int8_t *to, int64_t stride) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Rounding rounding = rounding_of(x, n, 127.0f);
  for (int64_t i = 0; i < n; ++i)
    to[i * stride] = rounding.factor != 0 ? static_cast<int8_t>(x[i] * rounding.factor + kMagic - kMagic) : 0;
  return rounding.scale;
}

template <typename T>
inline void write_token(const SwKvCache &cache, int64_t block, int64_t place, const float *key, const float *value) {
  const int64_t key_dim = cache.key_dim, value_dim = cache.value_dim;
  for (int64_t head = 0; head < cache.kv_heads; ++head) {
    const Tile<T> tile = tile_of<T>(cache, block, head);
    T *key_to = tile.keys + place, *value_to = tile.values + place * value_dim;
    if constexpr (std::is_same_v<T, int8_t>) {
      tile.key_scales[place] = write_vector(key + head * key_dim, key_dim, key_to, cache.block_size);
      tile.value_scales[place] = write_vector(value + head * value_dim, value_dim, value_to, 1);
    } else {
      write_vector(key + head * key_dim, key_dim, key_to, cache.block_size);
      write_vector(value + head * value_dim, value_dim, value_to, 1);
    }
  }
}

template <typename T>
inline void ask_for_token(const SwKvCache &cache, int64_t block, int64_t place) {
  for (int64_t head = 0; head < cache.kv_heads; ++head) {
    const Tile<T> tile = tile_of<T>(cache, block, head);
    for (int64_t d = 0; d < cache.key_dim; ++d) __builtin_prefetch(tile.keys + d * cache.block_size + place);
    ask_for(tile.values + place * cache.value_dim, cache.value_dim * sizeof(T));
  }
}

// Asks for the memory that write_kv will write: a token's key is spread over as many lines as it has dimensions.
inline void ask_for_kv(const SwKvCache &cache, const SwStep &step, int64_t token) {
  const auto ask = cache.type == SW_KV_FLOAT32    ? ask_for_token<float>
                   : cache.type == SW_KV_BFLOAT16 ? ask_for_token<Bfloat16>
                                                  : ask_for_token<int8_t>;
  ask(cache, step.block_of[token], step.offset_of[token]);
}

// Stores a token's key [kv_heads, key_dim] and value [kv_heads, value_dim] at its block and offset.
inline void write_kv(const SwKvCache &cache, const SwStep &step, int64_t token, const float *key, const float *value) {
  const int64_t block = step.block_of[token], place = step.offset_of[token];
  if (cache.type == SW_KV_FLOAT32)
    write_token<float>(cache, block, place, key, value);
  else if (cache.type == SW_KV_BFLOAT16)
    write_token<Bfloat16>(cache, block, place, key, value);
  else
    write_token<int8_t>(cache, block, place, key, value);
}

}  // namespace SW_ISA
