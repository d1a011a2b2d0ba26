// int4 weights in groups of 32 inputs (Int4Group). Within a group, products are summed in integers; then
//
//     y = sum over groups of (scale * sum of x q + minimum * sum of x)
//
// is added in float32 in the order of groups, whatever rows are multiplied together.
//
// A panel of 16 outputs is a sequence of groups. Each output also has a power of two that brings its largest weight to
// the upper end of half precision, so that the scales of weights of any size keep all their bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "block_panels.h"
#include "half_precision.h"
#include "quantized_rows.h"
#include "simd.h"

namespace SW_ISA {

// ---------------------------------------------------------------------------------------------------------------------
// int4 weights of 32 inputs and 16 outputs: w = scale * q + minimum with q from 0 to 15, and with a half-precision
// scale and minimum per output. Weights that came from such groups are reproduced exactly.

constexpr int kWordPairs = 4;                         // pairs of inputs whose weights share one word
constexpr int kWords = kGroup / kPair / kWordPairs;  // words per output for the first inputs of the pairs

// Packed layout: 16-bit words of four nibbles, the lowest first, in the order of the input pairs. An output's two words
// hold the first and the second inputs of the pairs.
struct Int4Group {
  uint16_t words[kWords][kPanel][kPair];
  uint16_t scales[kPanel];
  uint16_t minimums[kPanel];
};

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

// ---------------------------------------------------------------------------------------------------------------------

struct Int4Panels {
  using Sum = float;

  static constexpr bool kHasTiles = true;
  static constexpr int kTilePanels = 1;

#if defined(__AVX512VNNI__)
  static constexpr int kTileRows = 4;
#else
  static constexpr int kTileRows = 6;
#endif

  static int64_t panel_bytes(int64_t inputs) { return inputs / kGroup * sizeof(Int4Group); }

  // Packs one panel, like Int8Panels::pack.
  static void pack(const float *weight, int64_t outputs, int64_t inputs, int64_t panel, int8_t *packed, float *scales) {
    float factors[kPanel];
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t output = panel * kPanel + lane;
      const Magnitude magnitude = magnitude_of(weight + output * inputs, output < outputs ? inputs : 0);
      scales[output] = magnitude.scale;
      factors[lane] = magnitude.factor;
    }
    Int4Group *to = reinterpret_cast<Int4Group *>(packed + panel * panel_bytes(inputs));
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

  // As BlockPanels::repack.
  static bool repack(const BlockFormat &format, const uint8_t *const *rows, int64_t inputs, int8_t *panel) {
    static_assert(sizeof(Int4Group) == sizeof(Q4_1Panels::Block));
    return Q4_1Panels::repack(format, rows, inputs, panel);
  }

  // Multiplies rows with panels, like Int8Panels::multiply.
  template <int Rows, int Count>
  static void multiply(const QuantizedRows &rows, int64_t row, const int8_t *panel, int64_t inputs, const int8_t *ahead,
                       Sum *sums) {
    static_assert(Count == 1);
    const Int4Group *groups = reinterpret_cast<const Int4Group *>(panel);
#if defined(__AVX512VNNI__)
    constexpr int kChains = Rows > 2 ? 2 : 4;  // independent sums, because one product takes several cycles
    const __m512i nibble = _mm512_set1_epi16(15);
    __m512 total[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) total[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < inputs / kGroup; ++g) {
      const Int4Group &group = groups[g];
      __m512i acc[Rows][kChains];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) acc[r][c] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int word = 0; word < kWords; ++word) {
        const __m512i w = _mm512_loadu_si512(group.words[word]);
        if (ahead) __builtin_prefetch(ahead + g * sizeof group + word * 64, 0, 2);
        const __m512i pairs[kWordPairs] = {
            _mm512_and_si512(w, nibble), _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble),
            _mm512_and_si512(_mm512_srli_epi16(w, 8), nibble), _mm512_srli_epi16(w, 12)};
#pragma GCC unroll 4
        for (int p = 0; p < kWordPairs; ++p)
#pragma GCC unroll 8
          for (int r = 0; r < Rows; ++r)
            acc[r][p % kChains] = _mm512_dpwssd_epi32(
                acc[r][p % kChains], pairs[p],
                _mm512_set1_epi32(rows.pair(row + r, (g * kWords + word) * kWordPairs + p)));
      }
      if (ahead) __builtin_prefetch(ahead + g * sizeof group + sizeof group.words, 0, 2);
      const __m512 scale = (__m512)load_halves(group.scales), minimum = (__m512)load_halves(group.minimums);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int c = 1; c < kChains; ++c) acc[r][0] = _mm512_add_epi32(acc[r][0], acc[r][c]);
        total[r] = _mm512_fmadd_ps(scale, (__m512)__builtin_convertvector((IntVec)acc[r][0], Vec), total[r]);
        total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows.sums(row + r)[g].sum), total[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(sums + r * kPanel, total[r]);
#elif defined(__AVX2__)
    const __m256i nibble = _mm256_set1_epi16(15);
    __m256 total[Rows][2] = {};
    for (int64_t g = 0; g < inputs / kGroup; ++g) {
      const Int4Group &group = groups[g];
      __m256i acc[Rows][2];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
      for (int word = 0; word < kWords; ++word) {
        const __m256i *words = reinterpret_cast<const __m256i *>(group.words[word]);
        __m256i w[2] = {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
        if (ahead) __builtin_prefetch(ahead + g * sizeof group + word * 64, 0, 2);
#pragma GCC unroll 4
        for (int p = 0; p < kWordPairs; ++p) {
          const __m256i pair[2] = {_mm256_and_si256(w[0], nibble), _mm256_and_si256(w[1], nibble)};
#pragma GCC unroll 8
          for (int r = 0; r < Rows; ++r) {
            const __m256i xs = _mm256_set1_epi32(rows.pair(row + r, (g * kWords + word) * kWordPairs + p));
            acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(pair[0], xs));
            acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(pair[1], xs));
            // Otherwise the compiler makes more products before adding them than there are registers.
            if constexpr (Rows > 2) asm volatile("" : "+x"(acc[r][0]), "+x"(acc[r][1]));
          }
          w[0] = _mm256_srli_epi16(w[0], 4);
          w[1] = _mm256_srli_epi16(w[1], 4);
        }
      }
      if (ahead) __builtin_prefetch(ahead + g * sizeof group + sizeof group.words, 0, 2);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256 scale = (__m256)load_halves(group.scales + half * 8);
        const __m256 minimum = (__m256)load_halves(group.minimums + half * 8);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          total[r][half] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(acc[r][half]), total[r][half]);
          total[r][half] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(rows.sums(row + r)[g].sum), total[r][half]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      _mm256_storeu_ps(sums + r * kPanel, total[r][0]);
      _mm256_storeu_ps(sums + r * kPanel + 8, total[r][1]);
    }
#else
    static_cast<void>(ahead);
    std::fill(sums, sums + Rows * kPanel, 0.0f);
    for (int64_t g = 0; g < inputs / kGroup; ++g) {
      const Int4Group &group = groups[g];
      int16_t weights[kGroup * kPanel];  // as in an int8 panel
      for (int word = 0; word < kWords; ++word) {
        const uint16_t *from = group.words[word][0];
        int16_t *to = weights + word * kWordPairs * kPair * kPanel;
#pragma GCC unroll 4
        for (int p = 0; p < kWordPairs; ++p)
          for (int i = 0; i < kPair * kPanel; ++i) *to++ = from[i] >> (p * 4) & 15;
      }
      float scale[kPanel], minimum[kPanel];
      for (int lane = 0; lane < kPanel; lane += kWidth) {
        store(scale + lane, load_halves(group.scales + lane));
        store(minimum + lane, load_halves(group.minimums + lane));
      }
      for (int r = 0; r < Rows; ++r) {
        const int16_t *x = rows.row(row + r) + g * kGroup;
        int32_t acc[kPanel] = {};
        for (int pair = 0; pair < kGroup / kPair; ++pair)
          for (int lane = 0; lane < kPanel; ++lane)
            for (int k = 0; k < kPair; ++k)
              acc[lane] += x[pair * kPair + k] * weights[(pair * kPanel + lane) * kPair + k];
        const float sum = rows.sums(row + r)[g].sum;
        for (int lane = 0; lane < kPanel; ++lane) {
          float &total = sums[r * kPanel + lane];
          total = fma(scale[lane], static_cast<float>(acc[lane]), total);
          total = fma(minimum[lane], sum, total);
        }
      }
    }
#endif
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
