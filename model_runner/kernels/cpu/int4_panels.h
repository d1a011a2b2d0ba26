// int4 weights in groups of 32 inputs: w = scale * q + minimum with q from 0 to 15, and with a half-precision scale and
// minimum per output. They are packed as blocks of Q4_1 (block_panels.h), and weights that came from such groups are
// reproduced exactly.
//
// Each output also has a power of two that brings its largest weight to the upper end of half precision, so that the
// scales of weights of any size keep all their bits.
#pragma once
#include <cmath>
#include <cstdint>

#include "block_panels.h"
#include "half_precision.h"
#include "quantized_rows.h"
#include "simd.h"

namespace SW_ISA {

// Finds integers, scale and minimum of a group, for as many outputs as a vector has lanes.
//
// It starts with the range from the smallest to the largest weight, then a few times fits a line to the last integers
// by least squares. The fit with the smallest squared error wins. Outputs are independent, so all instruction sets
// agree.
class Int4Fit {
 public:
  // Takes weights [inputs][16] of the outputs from `lane` on; no weight is above 2^14.
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

  void store(Q4_1Panels::Block *to) const {
    for (int i = 0; i < kWidth; ++i) {
      int8_t levels[kGroup];
      for (int input = 0; input < kGroup; ++input) levels[input] = static_cast<int8_t>(integers_[input][i]);
      for (int half = 0; half < 2; ++half) to->levels[half].set(lane_ + i, levels + half * kSubgroup);
    }
    store_halves(to->scales.scales + lane_, to_halves(best_.scale));
    store_halves(to->scales.minimums + lane_, to_halves(best_.minimum));
  }

 private:
  static constexpr float kLevels = 15;  // the largest integer

  struct Line {
    Line(Vec scale, Vec minimum) : scale(from_halves(to_halves(scale))), minimum(from_halves(to_halves(minimum))) {}
    Line() = default;

    Vec scale;
    Vec minimum;
  };

  // The line from the smallest to the largest weight.
  Line range() const {
    Vec low = weights_[0], high = weights_[0];
    for (const Vec w : weights_) {
      low = w < low ? w : low;
      high = max(high, w);
    }
    return {(high - low) / kLevels, low};
  }

  // The least-squares line through the points (integer, weight).
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
    const Vec scale = spread > 0.0f ? slope : Vec{};  // 0 if all integers are equal
    return {scale, (w - scale * q) / static_cast<float>(kGroup)};
  }

  // Rounds the weights to the nearest integers on a line; returns their squared error.
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

struct Int4Panels : Q4_1Panels {
  // Packs one panel, like Int8Panels::pack.
  static void pack(const float *weight, int64_t outputs, int64_t inputs, int64_t panel, int8_t *packed, float *scales) {
    float factors[kPanel];
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t output = panel * kPanel + lane;
      const Magnitude magnitude = magnitude_of(weight + output * inputs, output < outputs ? inputs : 0);
      scales[output] = magnitude.scale;
      factors[lane] = magnitude.factor;
    }
    Block *to = reinterpret_cast<Block *>(packed + panel * panel_bytes(inputs));
    float weights[kGroup][kPanel];
    for (int64_t first = 0; first < inputs; first += kGroup) {
      for (int lane = 0; lane < kPanel; ++lane) {
        const float *from = weight + (panel * kPanel + lane) * inputs + first;
        for (int input = 0; input < kGroup; ++input)
          weights[input][lane] = factors[lane] != 0 ? from[input] * factors[lane] : 0.0f;
      }
      for (int lane = 0; lane < kPanel; lane += kWidth) Int4Fit(weights, lane).store(to);
      ++to;
    }
  }

 private:
  // A power of two and its inverse. Both are 0 for an output that is too small to count; the scale is NaN if a weight
  // is not finite.
  struct Magnitude {
    float factor;
    float scale;
  };

  static Magnitude magnitude_of(const float *weights, int64_t n) {
    constexpr int kHighest = 14;  // the largest weight is scaled to at least 2^13 and below 2^14
    const Rounding rounding = rounding_of(weights, n, 1.0f);
    if (!(rounding.scale > 0)) return {0.0f, rounding.scale};
    int exponent;
    std::frexp(rounding.scale, &exponent);
    return {std::ldexp(1.0f, kHighest - exponent), std::ldexp(1.0f, exponent - kHighest)};
  }
};

}  // namespace SW_ISA
