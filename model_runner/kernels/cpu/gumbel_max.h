// Draws a token as sampling/noise.py does, bit for bit: the argmax of logit / temperature + Gumbel noise, where the
// noise comes from a hash of key and token.
//
// A token's noise is -log(-log u), u between 0 and 1, and at most -log(1 - u). This bound takes no logarithm but only
// the place of the leading bit of 1 - u, so every token gets it. The few that could win are scored in double precision
// with the C library's log, as Python does, so that every instruction set gets the same.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace SW_ISA {

// No noise is outside these, as u is between 2^-53 and 1 - 2^-53.
constexpr float kLeastNoise = -3.61f, kMostNoise = 36.75f;
// Above the rounding of a bound, at most 1e-5: what can win is at most 41 below the highest logit.
constexpr float kRounding = 1e-3f;

// Output number `index` (from 0) of SplitMix64 started at `state`.
inline uint64_t splitmix(uint64_t state, uint64_t index) {
  uint64_t x = state + (index + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline double gumbel(uint64_t hash) {
  const double uniform = (static_cast<double>(hash >> 12) + 0.5) * 0x1p-52;
  return -std::log(-std::log(uniform));
}

// An upper bound of gumbel(hash), but for rounding. With r = the top 31 bits of ~hash, 2^31 (1 - u) >= r + 2^-22.
inline float gumbel_bound(uint64_t hash) {
  const float remainder = static_cast<float>(static_cast<int32_t>(~hash >> 33)) + 0x1p-22f;
  int32_t exponent;
  std::memcpy(&exponent, &remainder, sizeof exponent);
  return 0.6931472f * static_cast<float>(127 + 31 - (exponent >> 23));
}

inline float highest_of(const float *x, int64_t size) {
  Vec highest = broadcast(x[0]);
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) highest = max(highest, load(x + i));
  float result = max(highest);
  for (; i < size; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

inline bool any_reaches(const float *bounds, int count, float floor) {
  int32_t reaches = 0;
  for (int i = 0; i < count; ++i) reaches |= bounds[i] >= floor;
  return reaches;
}

// The drawn token, the lowest among equals. At least one logit is finite, and none is above or NaN.
inline int64_t draw(const float *logits, int64_t width, double temperature, uint64_t key) {
  constexpr int kBlock = 64;
  const double highest = highest_of(logits, width);
  const double inverse = std::min(1 / temperature, std::numeric_limits<double>::max());  // finite: times 0 it is 0
  double best = -std::numeric_limits<double>::infinity();
  int64_t best_token = 0;
  float floor = kLeastNoise;  // the highest logit has at least this score
  float bounds[kBlock];
  uint64_t hashes[kBlock];
  for (int64_t start = 0; start < width; start += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, width - start));
    const float *block = logits + start;
    for (int i = 0; i < count; ++i) bounds[i] = static_cast<float>((block[i] - highest) * inverse) + kRounding;
    if (!any_reaches(bounds, count, floor - kMostNoise)) continue;
    for (int i = 0; i < count; ++i) {
      hashes[i] = splitmix(key, start + i);
      bounds[i] += gumbel_bound(hashes[i]);
    }
    if (!any_reaches(bounds, count, floor)) continue;
    for (int i = 0; i < count; ++i) {
      if (bounds[i] < floor) continue;
      const float relative = static_cast<float>((block[i] - highest) / temperature);
      const double score = relative + gumbel(hashes[i]);
      if (score > best) {
        best = score;
        best_token = start + i;
        floor = std::max(floor, static_cast<float>(best));
      }
    }
  }
  return best_token;
}

}  // namespace SW_ISA
