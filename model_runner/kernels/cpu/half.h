// IEEE 754 half precision: 16 bits with eleven significant ones.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace SW_ISA {

typedef uint16_t Halves __attribute__((vector_size(kWidth * sizeof(uint16_t))));

// To nearest, halves to even. |x| < 65520.
inline Halves to_halves(Vec x) {
  const IntVec word = bits(x) & 0x7fffffff;
  // Below 2^-14 the step is 2^-24, which is what the last bit of a float from 0.5 to 1 stands for.
  const IntVec small = bits(from_bits(word) + 0.5f) - (126 << 23);
  const IntVec normal = (word - (112 << 23) + 0xfff + (word >> 13 & 1)) >> 13;
  const IntVec half = (word < 113 << 23 ? small : normal) | (bits(x) >> 16 & 0x8000);
  return __builtin_convertvector(half, Halves);
}

// Of numbers that are finite.
inline Vec from_halves(Halves x) {
  const IntVec half = __builtin_convertvector(x, IntVec);
  const Vec magnitude = from_bits((half & 0x7fff) << 13) * 0x1p112f;  // the difference of the exponents' zeros
  return from_bits(bits(magnitude) | (half & 0x8000) << 16);
}

inline Vec load_halves(const uint16_t *from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#else
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return from_halves(halves);
#endif
}

inline void store_halves(uint16_t *to, Halves halves) { std::memcpy(to, &halves, sizeof halves); }

}  // namespace SW_ISA
