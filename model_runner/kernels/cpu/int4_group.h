// The weights of 32 inputs and 16 outputs in int4: w = scale * q + minimum with q from 0 to 15, and with a scale and a
// minimum for each output in half precision. Weights that came from groups like these are found again as they were.
#pragma once
#include <cstdint>
#include <cstring>

#include "half.h"
#include "quantized_rows.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kWordPairs = 4;                         // pairs of inputs whose weights stand in one word
constexpr int kWords = kGroup / kPair / kWordPairs;  // words of each output for the first inputs of pairs

// As it is packed: 16-bit words of four nibbles, the lowest first, in the order of the inputs' pairs. The two words of
// an output belong to the first and to the second inputs of the pairs.
struct Int4Group {
  uint16_t words[kWords][kPanel][kPair];
  uint16_t scales[kPanel];
  uint16_t minimums[kPanel];
};

// Finds integers, scale and minimum of a group for as many outputs as a vector has: first between the smallest and the
// largest weight, then a few times with the line that fits the last integers best, by least squares. What had the
// smallest squared error is taken. Outputs do not meet, so every instruction set finds the same.
class Int4Fit {
 public:
  // Weights [inputs][16], of which those of the outputs from `lane` on are taken; none above 2^14.
  Int4Fit(const float (*weights)[kPanel], int lane) : lane_(lane) {
    constexpr int kFits = 4;
    for (int input = 0; input < kGroup; ++input) weights_[input] = load(weights[input] + lane);
    Line line = range();
    Vec error = round(line);
    best_ = line;
    Vec lowest_error = error;
    for (int fit = 0; fit < kFits; ++fit) {
      line = fitted();
      error = round(line);
      best_.scale = error < lowest_error ? line.scale : best_.scale;
      best_.minimum = error < lowest_error ? line.minimum : best_.minimum;
      lowest_error = error < lowest_error ? error : lowest_error;
    }
    round(best_);
  }

  void store(Int4Group *to) const {
    for (int word = 0; word < kWords; ++word)
      for (int k = 0; k < kPair; ++k) {
        IntVec nibbles{};
        for (int p = 0; p < kWordPairs; ++p) {
          const Vec q = integers_[(word * kWordPairs + p) * kPair + k];
          nibbles |= __builtin_convertvector(q, IntVec) << (p * 4);
        }
        for (int i = 0; i < kWidth; ++i) to->words[word][lane_ + i][k] = static_cast<uint16_t>(nibbles[i]);
      }
    store_halves(to->scales + lane_, to_halves(best_.scale));
    store_halves(to->minimums + lane_, to_halves(best_.minimum));
  }

 private:
  static constexpr float kLevels = 15;  // the largest integer

  struct Line {
    Line(Vec scale, Vec minimum) : scale(from_halves(to_halves(scale))), minimum(from_halves(to_halves(minimum))) {}
    Line() = default;

    Vec scale;
    Vec minimum;
  };

  // From the smallest to the largest weight.
  Line range() const {
    Vec low = weights_[0], high = weights_[0];
    for (const Vec w : weights_) {
      low = w < low ? w : low;
      high = max(high, w);
    }
    return {(high - low) / kLevels, low};
  }

  // Through the points (integer, weight) with the smallest sum of squared distances.
  Line fitted() const {
    Vec q{}, qq{}, w{}, wq{};
    for (int input = 0; input < kGroup; ++input) {
      q += integers_[input];
      qq += integers_[input] * integers_[input];
      w += weights_[input];
      wq += weights_[input] * integers_[input];
    }
    const Vec spread = static_cast<float>(kGroup) * qq - q * q;
    const Vec slope = (static_cast<float>(kGroup) * wq - q * w) / spread;
    const Vec scale = spread > 0.0f ? slope : Vec{};  // it is 0 if all integers are the same
    return {scale, (w - scale * q) / static_cast<float>(kGroup)};
  }

  // Takes the integers nearest to a line; returns their squared error.
  Vec round(const Line &line) {
    const Vec factor = line.scale > 0.0f ? 1.0f / line.scale : Vec{};
    const Vec levels = broadcast(kLevels);
    Vec error{};
    for (int input = 0; input < kGroup; ++input) {
      const Vec x = max((weights_[input] - line.minimum) * factor, Vec{});
      const Vec q = __builtin_convertvector(rounded(x < levels ? x : levels, broadcast(1.0f)), Vec);
      const Vec off = weights_[input] - (line.scale * q + line.minimum);
      integers_[input] = q;
      error += off * off;
    }
    return error;
  }

  const int lane_;
  Vec weights_[kGroup], integers_[kGroup];
  Line best_;
};

}  // namespace SW_ISA
