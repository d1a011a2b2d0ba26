// Rounding of floats to integers of few bits, with one scale for many numbers.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace SW_ISA {

constexpr float kSmallest = 1e-30f;  // rows without larger numbers count as zero: levels / x must be finite

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline float largest_magnitude(const float *x, int64_t n) {  // NaN or infinite if any number is
  IntVec highest{};
  const IntVec magnitude = IntVec{} + 0x7fffffff;  // as integers, magnitudes have the same order, and NaN the highest
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const IntVec m = bits(load(x + i)) & magnitude;
    highest = m > highest ? m : highest;
  }
  int32_t result = 0;
  for (int lane = 0; lane < kWidth; ++lane) result = highest[lane] > result ? highest[lane] : result;
  for (; i < n; ++i) result = std::max(result, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
  return std::bit_cast<float>(result);
}

// Factors to round numbers to integers of at most `levels` and back. Rows of too small numbers have 0 for both. With a
// non-finite number the scale is NaN, so that the error stays visible.
struct Rounding {
  float factor;
  float scale;
};

inline Rounding rounding_of(const float *x, int64_t n, float levels) {
  const float highest = largest_magnitude(x, n);
  if (highest < kSmallest) return {0.0f, 0.0f};
  if (!std::isfinite(highest)) return {0.0f, __builtin_nanf("")};
  return {levels / highest, highest / levels};
}

// Rounds x * factor to the nearest integers, ties to even. |x * factor| < 2^22.
inline IntVec rounded(Vec x, Vec factor) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23
  return bits(x * factor + magic) - bits(magic);
}

}  // namespace SW_ISA
