// Chooses the token of a row of logits: the highest, or a draw equal to sampling/noise.py bit for bit. A draw is the
// argmax of logit / temperature + Gumbel noise, with noise from a hash of key and token.
//
// A token's noise is -log(-log u) with u between 0 and 1, and at most -log(1 - u). A cheap bound needs no logarithm,
// only the position of the leading bit of 1 - u, so it is computed for every token. The few tokens that could win are
// scored in double precision with a logarithm that has the same bits everywhere, as in Python.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "double_math.h"
#include "simd.h"

namespace SW_ISA {

// Bounds of all noise, as u is between 2^-53 and 1 - 2^-53.
constexpr float kLeastNoise = -3.61f, kMostNoise = 36.75f;
// Exceeds the rounding error of a bound, at most 1e-5: a token that can win is at most 41 below the highest logit.
constexpr float kRounding = 1e-3f;

// Output number `index` (from 0) of SplitMix64 started at `state`.
inline uint64_t splitmix(uint64_t state, uint64_t index) {
  uint64_t x = state + (index + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The key of the target's noise at an output position.
inline uint64_t noise_key(uint64_t seed, uint64_t choice, uint64_t position) {
  constexpr uint64_t kTargetStream = 0;
  return splitmix(splitmix(splitmix(splitmix(0, seed), choice), kTargetStream), position);
}

inline double gumbel(uint64_t hash) {
  const double uniform = (static_cast<double>(hash >> 12) + 0.5) * 0x1p-52;
  return -log(-log(uniform));
}

// An upper bound of gumbel(hash), up to rounding. With r = the top 31 bits of ~hash, 2^31 (1 - u) >= r + 2^-22.
inline float gumbel_bound(uint64_t hash) {
  const float remainder = static_cast<float>(static_cast<int32_t>(~hash >> 33)) + 0x1p-22f;
  const int32_t exponent = std::bit_cast<int32_t>(remainder) >> 23;
  return 0.6931472f * static_cast<float>(127 + 31 - exponent);
}

constexpr int kBlock = 64;  // tokens processed together

// A row of logits. With a mask, bit t % 32 of word t / 32 says whether token t is allowed.
struct LogitsRow {
  const float *logits;
  int64_t width;
  const uint32_t *mask;

  // Calls look(first, count, block) for the row's blocks in order, skipping blocks without an allowed token. Tokens
  // that are not allowed are -inf. The last block ends with the row.
  template <typename Look>
  void each_block(const Look &look) const {
    float hidden[kBlock];
    for (int64_t first = 0; first < width; first += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, width - first));
      if (!mask) {
        look(first, count, logits + first);
      } else if (const uint64_t bits = bits_of(first, count)) {
        for (int i = 0; i < count; ++i) hidden[i] = bits >> i & 1 ? logits[first + i] : -__builtin_inff();
        look(first, count, hidden);
      }
    }
  }

 private:
  uint64_t bits_of(int64_t first, int count) const {
    const uint32_t *words = mask + first / 32;
    return words[0] | (count > 32 ? uint64_t{words[1]} << 32 : 0);
  }
};

inline float highest_of(const LogitsRow &row) {  // NaN if any is NaN
  float highest = -__builtin_inff();
  int32_t any_nan = 0;
  row.each_block([&](int64_t, int count, const float *block) {
    int i = 0;
    Vec best = broadcast(highest);
    IntVec is_nan{};
    for (; i + kWidth <= count; i += kWidth) {
      const Vec v = load(block + i);
      is_nan |= v != v;
      best = max(best, v);
    }
    highest = max(best);
    for (int lane = 0; lane < kWidth; ++lane) any_nan |= is_nan[lane];
    for (; i < count; ++i) {
      any_nan |= block[i] != block[i];
      highest = block[i] > highest ? block[i] : highest;
    }
  });
  return any_nan ? __builtin_nanf("") : highest;
}

inline bool any_reaches(const float *bounds, int count, float floor) {
  int32_t reaches = 0;
  for (int i = 0; i < count; ++i) reaches |= bounds[i] >= floor;
  return reaches;
}

// The drawn token, the lowest among equals. `highest` is the highest logit and finite.
inline int64_t draw(const LogitsRow &row, double highest, double temperature, uint64_t key) {
  const double inverse = std::min(1 / temperature, std::numeric_limits<double>::max());  // finite: times 0 it is 0
  double best = -std::numeric_limits<double>::infinity();
  int64_t best_token = 0;
  float floor = kLeastNoise;  // the highest logit has at least this score
  row.each_block([&](int64_t first, int count, const float *block) {
    float bounds[kBlock];
    for (int i = 0; i < count; ++i) bounds[i] = static_cast<float>((block[i] - highest) * inverse) + kRounding;
    if (!any_reaches(bounds, count, floor - kMostNoise)) return;
    uint64_t hashes[kBlock];
    for (int i = 0; i < count; ++i) {
      hashes[i] = splitmix(key, first + i);
      bounds[i] += gumbel_bound(hashes[i]);
    }
    if (!any_reaches(bounds, count, floor)) return;
    for (int i = 0; i < count; ++i) {
      if (bounds[i] < floor) continue;
      const float relative = static_cast<float>((block[i] - highest) / temperature);
      const double score = relative + gumbel(hashes[i]);
      if (score > best) {
        best = score;
        best_token = first + i;
        floor = std::max(floor, static_cast<float>(best));
      }
    }
  });
  return best_token;
}

// The first token with the highest logit.
inline int64_t first_of(const LogitsRow &row, float highest) {
  int64_t token = -1;
  row.each_block([&](int64_t first, int count, const float *block) {
    if (token >= 0 || !any_reaches(block, count, highest)) return;
    int i = 0;
    while (block[i] != highest) ++i;
    token = first + i;
  });
  return token;
}

// The token of a row: the highest logit at temperature 0, otherwise a draw; the lowest token among equals. -1 if an
// allowed logit is NaN or +inf, or no allowed logit is finite.
inline int64_t pick(const LogitsRow &row, double temperature, uint64_t key) {
  const float highest = highest_of(row);
  if (!std::isfinite(highest)) return -1;
  return temperature > 0 ? draw(row, highest, temperature, key) : first_of(row, highest);
}

}  // namespace SW_ISA
