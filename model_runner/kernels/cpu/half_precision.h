// 16-bit floats: IEEE 754 half precision, with eleven significant bits, and bfloat16, with eight.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace SW_ISA {

typedef uint16_t Halves __attribute__((vector_size(kWidth * sizeof(uint16_t))));

// Rounds to nearest, ties to even. |x| < 65520.
inline Halves to_halves(Vec x) {
  const IntVec word = bits(x) & 0x7fffffff;
  // Below 2^-14 the step is 2^-24, the unit in the last place of a float from 0.5 to 1.
  const IntVec small = bits(from_bits(word) + 0.5f) - (126 << 23);
  const IntVec normal = (word - (112 << 23) + 0xfff + (word >> 13 & 1)) >> 13;
  const IntVec half = (word < 113 << 23 ? small : normal) | (bits(x) >> 16 & 0x8000);
  return __builtin_convertvector(half, Halves);
}

// Converts finite numbers.
inline Vec from_halves(Halves x) {
  const IntVec half = __builtin_convertvector(x, IntVec);
  const Vec magnitude = from_bits((half & 0x7fff) << 13) * 0x1p112f;  // the difference of the exponent biases
  return from_bits(bits(magnitude) | (half & 0x8000) << 16);
}

inline Vec load_halves(const uint16_t *from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#else
  return from_halves(load_as<Halves>(from));
#endif
}

inline void store_halves(uint16_t *to, Halves halves) { std::memcpy(to, &halves, sizeof halves); }

// ---------------------------------------------------------------------------------------------------------------------
// Numbers in bfloat16, and sums of their products in float32.
//
// They are multiplied in pairs of neighbours: first the product of the second numbers is added to the sum, then the
// product of the first ones, each by a fused multiply-add. VDPBF16PS does the same, except that it treats subnormal
// numbers as zero. So none may occur. Factors are zero or at least kTiny, and so multiples of 2^-63; all sums are then
// multiples of 2^-126, the smallest normal number. With that, all instruction sets agree.

struct Bfloat16 {
  uint16_t bits;
};

constexpr float kTiny = 0x1p-56f;      // smaller numbers are treated as zero
constexpr float kTinySum = 0x1p-103f;  // so are smaller sums after a multiplication: the others are multiples of 2^-126

inline Vec without_smaller(Vec x, float least) {  // NaN stays NaN
  return (x < least) & (x > -least) ? Vec{} : x;
}

typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));

// Rounds to nearest, ties to even. A NaN must come from bfloat16 numbers.
inline Vec nearest_bfloat16(Vec x) {
  const Words word = (Words)bits(x);
  return from_bits((IntVec)((word + 0x7fff + (word >> 16 & 1)) & 0xffff0000));
}

// Rounds any number to nearest, ties to even; NaN stays NaN.
inline Vec rounded_to_bfloat16(Vec x) {
  const Vec rounded = without_smaller(nearest_bfloat16(x), kTiny);
  return x == x ? rounded : broadcast(__builtin_nanf(""));
}

inline void store_bfloat16(Bfloat16 *to, Vec rounded) {
  const Halves halves = __builtin_convertvector(bits(rounded) >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// kWidth pairs. The pair they are multiplied by, the same for all, is two Factors in memory.
#if defined(__AVX512BF16__)

using Factor = Bfloat16;

struct Bf16Pairs {
  IntVec words;  // the first number in the lower half
};

inline Bf16Pairs bf16_pairs_of(IntVec words) { return {words}; }

inline Bf16Pairs broadcast_bf16_pair(const Factor *from) { return {IntVec{} + load_as<int32_t>(from)}; }

inline Vec add_products(Bf16Pairs a, Bf16Pairs b, Vec sum) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a.words, (__m512bh)b.words);
}

inline void store_factors(Factor *to, Vec rounded) { store_bfloat16(to, rounded); }

// Rounds like nearest_bfloat16, stores, and returns the stored numbers.
inline Vec store_nearest(Factor *to, Vec x) {
  const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), halves);
  return from_bits((IntVec)_mm512_maskz_cvtepu16_epi32(0xffff, halves) << 16);
}

#else

using Factor = float;

struct Bf16Pairs {
  Vec first, second;
};

inline Bf16Pairs bf16_pairs_of(IntVec words) {
  return {from_bits(words << 16), from_bits(words & static_cast<int32_t>(0xffff0000))};
}

inline Bf16Pairs broadcast_bf16_pair(const Factor *from) { return {broadcast(from[0]), broadcast(from[1])}; }

inline Vec add_products(Bf16Pairs a, Bf16Pairs b, Vec sum) { return fma(a.first, b.first, fma(a.second, b.second, sum)); }

inline void store_factors(Factor *to, Vec rounded) { store(to, rounded); }

inline Vec store_nearest(Factor *to, Vec x) {
  const Vec rounded = nearest_bfloat16(x);
  store(to, rounded);
  return rounded;
}

#endif

inline Bf16Pairs load_bf16_pairs(const Bfloat16 *from) { return bf16_pairs_of(load_as<IntVec>(from)); }

// Loads pairs and keeps only one number of each; the other counts as zero, whatever it is.
inline Bf16Pairs load_bf16_pairs(const Bfloat16 *from, int32_t kept) { return bf16_pairs_of(load_as<IntVec>(from) & kept); }

}  // namespace SW_ISA
