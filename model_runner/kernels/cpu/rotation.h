// Rows and weights rotated alike, before they are rounded to 8 bits: an outlier of a row, which would leave few steps to
// its other numbers, is spread over all of them. A product of two vectors stays what it is when both are multiplied by
// the same orthogonal matrix (Ashkboos et al., QuaRot, arXiv:2404.00456).
//
// The matrix has Hadamard matrices in blocks on its diagonal, of the largest powers of two that add up to the number of
// inputs, which is padded with zeros to a multiple of the smallest. Every number goes through the same additions in the
// same order, whatever the width of vectors is.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "rounding.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kSmallestBlock = 64;
constexpr int64_t kWidestRotated = 32768;  // inputs; so that a rotated row has room on the stack

inline int64_t rotated_size(int64_t inputs) { return round_up(inputs, kSmallestBlock); }

inline int64_t largest_block(int64_t inputs) { return std::bit_floor(static_cast<uint64_t>(rotated_size(inputs))); }

// What a product of two rotated vectors has to be multiplied with: each is shorter than it was by the root of this.
inline float rotated_product_scale(int64_t inputs) { return static_cast<float>(largest_block(inputs)); }

// Lane i gets what lane i ^ Stride has.
template <int Stride>
inline Vec swapped(Vec v) {
#if defined(__AVX512F__)
  if constexpr (Stride == 8) return (Vec)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
  if constexpr (Stride == 4) return (Vec)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
  if constexpr (Stride == 2) return (Vec)_mm512_permute_ps((__m512)v, 0x4e);
  if constexpr (Stride == 1) return (Vec)_mm512_permute_ps((__m512)v, 0xb1);
#elif defined(__AVX2__)
  if constexpr (Stride == 4) return (Vec)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
  if constexpr (Stride == 2) return (Vec)_mm256_permute_ps((__m256)v, 0x4e);
  if constexpr (Stride == 1) return (Vec)_mm256_permute_ps((__m256)v, 0xb1);
#else
  Vec result{};
  for (int lane = 0; lane < kWidth; ++lane) result[lane] = v[lane ^ Stride];
  return result;
#endif
}

// Sums and differences of lanes that are Stride apart: the product with 1 or -1 is exact, so nothing is rounded twice.
template <int Stride>
inline Vec butterfly_of_lanes(Vec v) {
  Vec sign;
  for (int lane = 0; lane < kWidth; ++lane) sign[lane] = lane & Stride ? -1.0f : 1.0f;
  return fma(v, sign, swapped<Stride>(v));
}

// The first stages: factor * x[64] times a Hadamard matrix of 64, in registers.
inline void rotate_smallest(const float *x, float factor, float *to) {
  constexpr int kVecs = kSmallestBlock / kWidth;
  Vec v[kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; ++i) {
    v[i] = load(x + i * kWidth) * factor;
    v[i] = butterfly_of_lanes<1>(v[i]);
    v[i] = butterfly_of_lanes<2>(v[i]);
    if constexpr (kWidth > 4) v[i] = butterfly_of_lanes<4>(v[i]);
    if constexpr (kWidth > 8) v[i] = butterfly_of_lanes<8>(v[i]);
  }
#pragma GCC unroll 4
  for (int stride = 1; stride < kVecs; stride *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i)
      if (!(i & stride)) {
        const Vec a = v[i], b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; ++i) store(to + i * kWidth, v[i]);
}

// The stages between numbers that are 64 or more apart; two at a time, for half as many ways to the cache.
inline void rotate_larger(float *x, int64_t block) {
  int64_t stride = kSmallestBlock;
  for (; stride * 4 <= block; stride *= 4)
    for (int64_t start = 0; start < block; start += stride * 4)
      for (int64_t i = start; i < start + stride; i += kWidth) {
        const Vec a = load(x + i), b = load(x + i + stride);
        const Vec c = load(x + i + 2 * stride), d = load(x + i + 3 * stride);
        const Vec ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
        store(x + i, ab + cd);
        store(x + i + stride, a_b + c_d);
        store(x + i + 2 * stride, ab - cd);
        store(x + i + 3 * stride, a_b - c_d);
      }
  if (stride == block) return;
  for (int64_t i = 0; i < stride; i += kWidth) {
    const Vec a = load(x + i), b = load(x + i + stride);
    store(x + i, a + b);
    store(x + i + stride, a - b);
  }
}

// rotated[rotated_size(n)] = x[n] times the matrix, divided by the root of the largest block: so no number becomes
// larger than the largest of x, and what is finite stays so. What is not finite comes out as such in some places.
inline void rotate_inputs(const float *x, int64_t n, float *rotated) {
  const int64_t largest = largest_block(n);
  for (int64_t start = 0; start < n;) {
    const int64_t block = std::min<int64_t>(largest, std::bit_floor(static_cast<uint64_t>(rotated_size(n - start))));
    const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block) * static_cast<double>(largest)));
    for (int64_t i = start; i < start + block; i += kSmallestBlock) {
      if (i + kSmallestBlock <= n) {
        rotate_smallest(x + i, factor, rotated + i);
      } else {
        float last[kSmallestBlock] = {};
        std::memcpy(last, x + i, (n - i) * sizeof(float));
        rotate_smallest(last, factor, rotated + i);
      }
    }
    rotate_larger(rotated + start, block);
    start += block;
  }
}

}  // namespace SW_ISA
