// Linear layers in int8: y = x W^T, W with one scale for each output, x quantised with one scale for each row.
//
// Products are summed in 32-bit integers, which is exact in any order, so a row's result cannot depend on the other rows.
// |q| <= 127 on both sides, so a sum of 2^31 / 127^2 = 133,000 products cannot overflow.
//
// A packed weight is a sequence of panels of 16 outputs. A panel holds, group after group of kGroup inputs, the weights of
// the 16 outputs, kGroup each: what one integer instruction multiplies and sums. Outputs and inputs are padded with zeros.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "samewise.h"
#include "simd.h"
#include "threads.h"

namespace SW_ISA {

constexpr int kPanel = 16;  // outputs of a panel
constexpr int kInputStep = 4;  // inputs are padded to a multiple of this

// A quantised number of a row, the inputs of a group, and the rows that are multiplied with a panel at once: as many sums
// as the registers hold. AVX2 sums products of 8 bits in 16 bits with saturation, so there numbers are widened first.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
typedef int16_t RowNumber;
constexpr int kGroup = 2;
constexpr int kTileRows = 6;
#else
typedef int8_t RowNumber;
constexpr int kGroup = 4;
constexpr int kTileRows = 4;
#endif

constexpr float kSmallest = 1e-30f;  // rows below this count as zero: 127 / x must be finite

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline int64_t num_panels(const SwInt8Weight &weight) { return round_up(weight.outputs, kPanel) / kPanel; }

inline int64_t panel_bytes(int64_t inputs) { return round_up(inputs, kInputStep) * kPanel; }

// Bytes of a quantised row of that many inputs.
inline int64_t row_bytes(int64_t inputs) { return round_up(inputs * sizeof(RowNumber), 64); }

// Quantised rows. A row with a number that is not finite gets the scale NaN, so that all its results are NaN.
struct Int8Rows {
  char *data;      // [rows, stride] of RowNumber
  float *scales;   // [rows]
  int32_t *sums;   // [rows] the sum of the row's quantised numbers
  int64_t stride;  // row_bytes(inputs)

  RowNumber *row(int64_t index) const { return reinterpret_cast<RowNumber *>(data + index * stride); }
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

// Rounds x * factor to the nearest integers, halves to even. |x * factor| < 2^22.
inline IntVec rounded(Vec x, Vec factor) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23
  return bits(x * factor + magic) - bits(magic);
}

inline void store_narrow(RowNumber *to, IntVec v) {
  typedef RowNumber Narrow __attribute__((vector_size(kWidth * sizeof(RowNumber))));
  const Narrow narrow = __builtin_convertvector(v, Narrow);
  std::memcpy(to, &narrow, sizeof narrow);
}

inline int32_t sum(IntVec v) {
  int32_t total = 0;
  for (int lane = 0; lane < kWidth; ++lane) total += v[lane];
  return total;
}

inline void quantize_row(const float *x, int64_t n, const Int8Rows &rows, int64_t row) {
  RowNumber *q = rows.row(row);
  const float highest = largest_magnitude(x, n);
  const bool usable = highest >= kSmallest && std::isfinite(highest);
  rows.scales[row] = usable ? highest / 127.0f : (highest < kSmallest ? 0.0f : __builtin_nanf(""));
  rows.sums[row] = 0;
  if (!usable) {
    std::memset(q, 0, rows.stride);
    return;
  }
  const Vec factor = broadcast(127.0f / highest);
  IntVec total{};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const IntVec v = rounded(load(x + i), factor);
    store_narrow(q + i, v);
    total += v;
  }
  if (i < n) {
    float last[kWidth] = {};
    std::memcpy(last, x + i, (n - i) * sizeof(float));
    const IntVec v = rounded(load(last), factor);
    for (int lane = 0; i + lane < n; ++lane) q[i + lane] = static_cast<RowNumber>(v[lane]);
    total += v;
    i = n;
  }
  std::memset(q + i, 0, rows.stride - i * sizeof(RowNumber));
  rows.sums[row] = sum(total);
}

// What the instruction set stores for a weight q: AVX-512's product takes one unsigned side.
inline int8_t stored(int8_t q) {
#if defined(__AVX512VNNI__)
  return static_cast<int8_t>(q ^ 0x80);
#else
  return q;
#endif
}

// Quantises and packs outputs 16 * panel and following; rows of the weight beyond its outputs count as zero.
inline void pack_panel(const float *weight, int64_t outputs, int64_t inputs, int64_t panel, int8_t *packed,
                       float *scales) {
  int8_t *to = packed + panel * panel_bytes(inputs);
  for (int lane = 0; lane < kPanel; ++lane) {
    const int64_t output = panel * kPanel + lane;
    const float *from = weight + output * inputs;
    const float highest = output < outputs ? largest_magnitude(from, inputs) : 0.0f;
    const bool usable = highest >= kSmallest && std::isfinite(highest);
    const float factor = usable ? 127.0f / highest : 0.0f;
    scales[output] = usable ? highest / 127.0f : (highest < kSmallest ? 0.0f : __builtin_nanf(""));
    for (int64_t input = 0; input < round_up(inputs, kInputStep); ++input) {
      const float scaled = usable && input < inputs ? from[input] * factor : 0.0f;
      to[(input / kGroup * kPanel + lane) * kGroup + input % kGroup] =
          stored(static_cast<int8_t>(std::nearbyintf(scaled)));
    }
  }
}

// Sums of the products of Rows rows, from `row` on, with a panel, [Rows, 16]. The panel is read from front to end, once. On
// the way as much is asked of memory from `ahead` on, if that is not null. (Loops are unrolled so that the compiler keeps
// the sums in registers.)
template <int Rows>
inline void multiply(const Int8Rows &rows, int64_t row, const int8_t *packed, int64_t groups, const int8_t *ahead,
                     int32_t *sums) {
  const RowNumber *x = rows.row(row);
  const int64_t stride = rows.stride / sizeof(RowNumber);
  const auto group_of = [=](int r, int64_t group) {  // its numbers as one word
    int32_t word;
    std::memcpy(&word, x + r * stride + group * kGroup, sizeof word);
    return word;
  };
#if defined(__AVX512VNNI__)
  constexpr int kChains = 4;  // independent sums, since one product takes several cycles
  __m512i acc[Rows][kChains];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c)  // weights are stored with 128 added
      acc[r][c] = c ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * rows.sums[row + r]);
  const auto add = [&](int chain, int64_t group) {
    const __m512i w = _mm512_load_si512(packed + group * 64);
    if (ahead) __builtin_prefetch(ahead + group * 64, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
      acc[r][chain] = _mm512_dpbusd_epi32(acc[r][chain], w, _mm512_set1_epi32(group_of(r, group)));
  };
  int64_t g = 0;
  for (; g + kChains <= groups; g += kChains)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) add(c, g + c);
  for (; g < groups; ++g) add(0, g);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
    _mm512_storeu_si512(sums + r * kPanel, _mm512_add_epi32(_mm512_add_epi32(acc[r][0], acc[r][1]),
                                                            _mm512_add_epi32(acc[r][2], acc[r][3])));
#elif defined(__AVX2__)
  __m256i acc[Rows][2] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const __m128i *bytes = reinterpret_cast<const __m128i *>(packed + g * 32);
    const __m256i w[2] = {_mm256_cvtepi8_epi16(_mm_load_si128(bytes)), _mm256_cvtepi8_epi16(_mm_load_si128(bytes + 1))};
    if (ahead) __builtin_prefetch(ahead + g * 32, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const __m256i xs = _mm256_set1_epi32(group_of(r, g));
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
  static_cast<void>(group_of), static_cast<void>(ahead);
  for (int r = 0; r < Rows; ++r) {
    int32_t acc[kPanel] = {};
    for (int64_t g = 0; g < groups; ++g)
      for (int lane = 0; lane < kPanel; ++lane)
        for (int k = 0; k < kGroup; ++k)
          acc[lane] += x[r * stride + g * kGroup + k] * packed[(g * kPanel + lane) * kGroup + k];
    std::memcpy(sums + r * kPanel, acc, sizeof acc);
  }
#endif
}

// Multiplies Rows rows with a panel; see multiply_rows for emit.
template <int Rows, typename Emit>
inline void tile(const SwInt8Weight &weight, const Int8Rows &rows, int64_t row, int64_t panel, bool ask_ahead,
                 const Emit &emit) {
  alignas(64) int32_t sums[Rows * kPanel];
  const int8_t *packed = weight.packed + panel * panel_bytes(weight.inputs);
  multiply<Rows>(rows, row, packed, round_up(weight.inputs, kInputStep) / kGroup,
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
inline void tile_of_rows(int64_t count, const SwInt8Weight &weight, const Int8Rows &rows, int64_t row, int64_t panel,
                         bool ask_ahead, const Emit &emit) {
  if (count == Rows) return tile<Rows>(weight, rows, row, panel, ask_ahead, emit);
  if constexpr (Rows > 1) tile_of_rows<Rows - 1>(count, weight, rows, row, panel, ask_ahead, emit);
}

// All rows times the weight, shared among the threads. emit(row, first, count, results) gets `count` results of a row, from
// output `first` on.
template <typename Emit>
inline void multiply_rows(samewise::ThreadPool &pool, const SwInt8Weight &weight, const Int8Rows &rows, int64_t num_rows,
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
