// Linear layers with weights in int8: y = x W^T, W with one scale for each output, x rounded to integers of 12 bits with
// one scale for each row. (With 8 bits a row's largest number leaves too few steps to the others: SmolLM2-135M then
// prefers another token than in float32 at one place in nine, with 12 bits at one in twenty-three.)
//
// Products are summed in 32-bit integers, which is exact in any order, so a row's result cannot depend on the other rows.
//
// A packed weight is a sequence of panels of 16 outputs. A panel holds, for each pair of inputs, the 16 outputs' two weights
// each: what an integer instruction multiplies and sums once they are widened. Outputs and inputs are padded with zeros.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "samewise.h"
#include "simd.h"
#include "threads.h"

namespace SW_ISA {

constexpr int kPanel = 16;  // outputs of a panel
constexpr int kPair = 2;    // inputs that one integer instruction sums
constexpr int kWeightLevels = 127;  // the largest integer that a weight becomes
constexpr float kSmallest = 1e-30f;  // rows below this count as zero: levels / x must be finite

// Rows that are multiplied with a panel at once: as many sums as the registers hold.
#if defined(__AVX512VNNI__)
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 6;
#endif

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline int64_t num_panels(const SwInt8Weight &weight) { return round_up(weight.outputs, kPanel) / kPanel; }

inline int64_t panel_bytes(int64_t inputs) { return round_up(inputs, kPair) * kPanel; }

// The largest integer that a number of a row becomes: with more inputs it is smaller, so that sums fit in 32 bits.
inline float row_levels(int64_t inputs) {
  return static_cast<float>(std::min<int64_t>(2047, INT32_MAX / (kWeightLevels * std::max<int64_t>(inputs, 1))));
}

// Bytes of a quantised row of that many inputs.
inline int64_t row_bytes(int64_t inputs) { return round_up(inputs * sizeof(int16_t), 64); }

// Quantised rows. A row with a number that is not finite gets the scale NaN, so that all its results are NaN.
struct Int16Rows {
  char *data;      // [rows, stride] of int16
  float *scales;   // [rows]
  int64_t stride;  // row_bytes(inputs)

  int16_t *row(int64_t index) const { return reinterpret_cast<int16_t *>(data + index * stride); }
};

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
  for (; i < n; ++i) {
    int32_t m;
    std::memcpy(&m, x + i, 4);
    m &= 0x7fffffff;
    result = m > result ? m : result;
  }
  float magnitude_of;
  std::memcpy(&magnitude_of, &result, 4);
  return magnitude_of;
}

// How numbers become integers of at most `levels`: times `factor`, and back times `scale`. Rows too small to count have
// both 0; with a number that is not finite the scale is NaN, so that nothing that went wrong is hidden.
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

// Rounds x * factor to the nearest integers, halves to even. |x * factor| < 2^22.
inline IntVec rounded(Vec x, Vec factor) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23
  return bits(x * factor + magic) - bits(magic);
}

inline void store_narrow(int16_t *to, IntVec v) {
  typedef int16_t Narrow __attribute__((vector_size(kWidth * sizeof(int16_t))));
  const Narrow narrow = __builtin_convertvector(v, Narrow);
  std::memcpy(to, &narrow, sizeof narrow);
}

inline void quantize_row(const float *x, int64_t n, const Int16Rows &rows, int64_t row) {
  int16_t *q = rows.row(row);
  const Rounding rounding = rounding_of(x, n, row_levels(n));
  rows.scales[row] = rounding.scale;
  if (rounding.factor == 0) {
    std::memset(q, 0, rows.stride);
    return;
  }
  const Vec factor = broadcast(rounding.factor);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store_narrow(q + i, rounded(load(x + i), factor));
  if (i < n) {
    float last[kWidth] = {};
    std::memcpy(last, x + i, (n - i) * sizeof(float));
    const IntVec v = rounded(load(last), factor);
    for (int lane = 0; i < n; ++i, ++lane) q[i] = static_cast<int16_t>(v[lane]);
  }
  std::memset(q + n, 0, rows.stride - n * sizeof(int16_t));
}

// Quantises and packs outputs 16 * panel and following; rows of the weight beyond its outputs count as zero.
inline void pack_panel(const float *weight, int64_t outputs, int64_t inputs, int64_t panel, int8_t *packed,
                       float *scales) {
  int8_t *to = packed + panel * panel_bytes(inputs);
  for (int lane = 0; lane < kPanel; ++lane) {
    const int64_t output = panel * kPanel + lane;
    const float *from = weight + output * inputs;
    const Rounding rounding = rounding_of(from, output < outputs ? inputs : 0, kWeightLevels);
    scales[output] = rounding.scale;
    for (int64_t input = 0; input < round_up(inputs, kPair); ++input) {
      const float scaled = rounding.factor != 0 && input < inputs ? from[input] * rounding.factor : 0.0f;
      to[(input / kPair * kPanel + lane) * kPair + input % kPair] = static_cast<int8_t>(std::nearbyintf(scaled));
    }
  }
}

// Sums of the products of Rows rows, from `row` on, with a panel, [Rows, 16]. The panel is read from front to end, once. On
// the way as much is asked of memory from `ahead` on, if that is not null. (Loops are unrolled so that the compiler keeps
// the sums in registers.)
template <int Rows>
inline void multiply(const Int16Rows &rows, int64_t row, const int8_t *packed, int64_t pairs, const int8_t *ahead,
                     int32_t *sums) {
  const int16_t *x = rows.row(row);
  const int64_t stride = rows.stride / sizeof(int16_t);
  const auto pair_of = [=](int r, int64_t pair) {  // its two numbers as one word
    int32_t word;
    std::memcpy(&word, x + r * stride + pair * kPair, sizeof word);
    return word;
  };
#if defined(__AVX512VNNI__)
  constexpr int kChains = 4;  // independent sums, since one product takes several cycles
  __m512i acc[Rows][kChains];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) acc[r][c] = _mm512_setzero_si512();
  const auto add = [&](int chain, int64_t pair) {
    const __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(packed + pair * 32)));
    if (ahead) __builtin_prefetch(ahead + pair * 32, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
      acc[r][chain] = _mm512_dpwssd_epi32(acc[r][chain], w, _mm512_set1_epi32(pair_of(r, pair)));
  };
  int64_t p = 0;
  for (; p + kChains <= pairs; p += kChains)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) add(c, p + c);
  for (; p < pairs; ++p) add(0, p);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
    _mm512_storeu_si512(sums + r * kPanel, _mm512_add_epi32(_mm512_add_epi32(acc[r][0], acc[r][1]),
                                                            _mm512_add_epi32(acc[r][2], acc[r][3])));
#elif defined(__AVX2__)
  __m256i acc[Rows][2] = {};
  for (int64_t p = 0; p < pairs; ++p) {
    const __m128i *bytes = reinterpret_cast<const __m128i *>(packed + p * 32);
    const __m256i w[2] = {_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)),
                          _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))};
    if (ahead) __builtin_prefetch(ahead + p * 32, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const __m256i xs = _mm256_set1_epi32(pair_of(r, p));
      acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(w[0], xs));
      acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(w[1], xs));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(sums + r * kPanel), acc[r][0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(sums + r * kPanel + 8), acc[r][1]);
  }
#else
  static_cast<void>(pair_of), static_cast<void>(ahead);
  for (int r = 0; r < Rows; ++r) {
    int32_t acc[kPanel] = {};
    for (int64_t p = 0; p < pairs; ++p)
      for (int lane = 0; lane < kPanel; ++lane)
        for (int k = 0; k < kPair; ++k)
          acc[lane] += x[r * stride + p * kPair + k] * packed[(p * kPanel + lane) * kPair + k];
    std::memcpy(sums + r * kPanel, acc, sizeof acc);
  }
#endif
}

// Multiplies Rows rows with a panel; see multiply_rows for emit.
template <int Rows, typename Emit>
inline void tile(const SwInt8Weight &weight, const Int16Rows &rows, int64_t row, int64_t panel, bool ask_ahead,
                 const Emit &emit) {
  alignas(64) int32_t sums[Rows * kPanel];
  const int8_t *packed = weight.packed + panel * panel_bytes(weight.inputs);
  multiply<Rows>(rows, row, packed, round_up(weight.inputs, kPair) / kPair,
                 ask_ahead ? packed + panel_bytes(weight.inputs) : nullptr, sums);
  const int64_t first = panel * kPanel;
  alignas(64) float results[kPanel];
  for (int r = 0; r < Rows; ++r) {
    const Vec row_scale = broadcast(rows.scales[row + r]);
    for (int i = 0; i < kPanel; i += kWidth) {
      IntVec s;
      std::memcpy(&s, sums + r * kPanel + i, sizeof s);
      Vec y = __builtin_convertvector(s, Vec) * load(weight.scales + first + i) * row_scale;
      if (weight.bias) y += load(weight.bias + first + i);
      store(results + i, y);
    }
    if (first + kPanel <= weight.outputs)
      emit(row + r, first, kPanel, results);
    else
      emit(row + r, first, weight.outputs - first, results);
  }
}

// The tile of `count` rows, which are at most Rows.
template <int Rows, typename Emit>
inline void tile_of_rows(int64_t count, const SwInt8Weight &weight, const Int16Rows &rows, int64_t row, int64_t panel,
                         bool ask_ahead, const Emit &emit) {
  if (count == Rows) return tile<Rows>(weight, rows, row, panel, ask_ahead, emit);
  if constexpr (Rows > 1) tile_of_rows<Rows - 1>(count, weight, rows, row, panel, ask_ahead, emit);
}

// All rows times the weight, shared among the threads. emit(row, first, count, results) gets `count` results of a row, from
// output `first` on.
template <typename Emit>
inline void multiply_rows(samewise::ThreadPool &pool, const SwInt8Weight &weight, const Int16Rows &rows, int64_t num_rows,
                          const Emit &emit) {
  constexpr int64_t kUnitRows = 120;  // a multiple of every tile's rows; a unit's rows stay in the second-level cache
  constexpr int64_t kUnitBytes = 131072;  // of weights: long stretches are read faster
  const int64_t panels = num_panels(weight);
  const int64_t wanted = round_up(panels * panel_bytes(weight.inputs) / kUnitBytes + 1, pool.size());
  const int64_t unit_panels = (panels + wanted - 1) / wanted;
  const int64_t panel_units = (panels + unit_panels - 1) / unit_panels;
  const int64_t row_units = (num_rows + kUnitRows - 1) / kUnitRows;
  pool.for_each(panel_units * row_units, [&](int64_t unit) {
    const int64_t first_row = unit / panel_units * kUnitRows;
    const int64_t end_row = std::min(first_row + kUnitRows, num_rows);
    const int64_t first_panel = unit % panel_units * unit_panels;
    const int64_t end_panel = std::min(first_panel + unit_panels, panels);
    for (int64_t panel = first_panel; panel < end_panel; ++panel) {
      for (int64_t row = first_row; row < end_row; row += kTileRows) {
        // The first tile of rows brings the panel into the cache, so memory would be idle during the second.
        const bool ask_ahead = row == first_row + kTileRows && panel + 1 < end_panel;
        tile_of_rows<kTileRows>(std::min<int64_t>(kTileRows, end_row - row), weight, rows, row, panel, ask_ahead, emit);
      }
    }
  });
}

}  // namespace SW_ISA
