// Rows as integers with one scale each, for products with packed weights: of 12 bits, or rotated and then of 8. (With 8
// bits alone a row's largest number leaves too few steps to the others: SmolLM2-135M then prefers another token than in
// float32 at one place in nine, with 12 bits at one in twenty-three, rotated at one in twenty-five.)
#pragma once
#include <algorithm>
#include <cstring>

#include "rotation.h"
#include "rounding.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kPanel = 16;          // outputs of a panel of a weight
constexpr int kPair = 2;            // inputs that one integer instruction sums
constexpr int kGroup = 32;          // inputs that share a scale in int4
constexpr int kWeightLevels = 127;  // the largest integer that a weight in int8 becomes
constexpr int kRotatedLevels = 127;  // ... and a number of a rotated row

#if defined(__AVX512VNNI__)
typedef int8_t RotatedInteger;
#else
typedef int16_t RotatedInteger;  // which needs no widening
#endif

// Quantised rows. A row with a number that is not finite gets the scale NaN, so that all its results are NaN.
struct QuantizedRows {
  char *data;       // [rows, stride]
  float *scales;    // [rows]
  int64_t stride;   // row_bytes(inputs), or more
  int64_t sums_at;  // where a row's sums begin: behind its integers

  int16_t *row(int64_t index) const { return reinterpret_cast<int16_t *>(data + index * stride); }

  RotatedInteger *rotated_row(int64_t index) const {
    return reinterpret_cast<RotatedInteger *>(data + index * stride);
  }

  // The sums of the row's integers in each group of inputs, for int4.
  float *sums(int64_t index) const { return reinterpret_cast<float *>(data + index * stride + sums_at); }

  // The sum of all integers of a rotated row.
  int32_t &rotated_sum(int64_t index) const {
    return *reinterpret_cast<int32_t *>(data + index * stride + sums_at);
  }

  // Two numbers of a row as one word.
  int32_t pair(int64_t index, int64_t pair) const {
    int32_t word;
    std::memcpy(&word, row(index) + pair * kPair, sizeof word);
    return word;
  }
};

inline int64_t integer_bytes(int64_t inputs) { return rotated_size(inputs) * sizeof(int16_t); }

// Bytes of a quantised row of that many inputs, with its sums.
inline int64_t row_bytes(int64_t inputs) {
  return integer_bytes(inputs) + round_up(std::max<int64_t>(inputs / kGroup, 1) * sizeof(float), 64);
}

// Memory for rows of up to that many inputs.
inline QuantizedRows lay_out_rows(int64_t inputs, char *data, float *scales) {
  return {data, scales, row_bytes(inputs), integer_bytes(inputs)};
}

// The largest integer that a number of a row that is not rotated becomes. All products of an int8 weight are summed in 32 bits, so with
// more inputs it is smaller; those of a group always fit.
inline float row_levels(const SwWeight &weight) {
  constexpr int64_t kLevels = 2047;
  if (weight.kind == SW_INT4) return kLevels;
  return static_cast<float>(std::min(kLevels, INT32_MAX / (kWeightLevels * std::max<int64_t>(weight.inputs, 1))));
}

template <typename Integer>
inline void store_narrow(Integer *to, IntVec v) {
  typedef Integer Narrow __attribute__((vector_size(kWidth * sizeof(Integer))));
  const Narrow narrow = __builtin_convertvector(v, Narrow);
  std::memcpy(to, &narrow, sizeof narrow);
}

inline void sum_groups(const int16_t *q, int64_t groups, float *sums) {
  for (int64_t group = 0; group < groups; ++group) {
    int32_t sum = 0;
    for (int i = 0; i < kGroup; ++i) sum += q[group * kGroup + i];
    sums[group] = static_cast<float>(sum);
  }
}

inline void quantize_plain_row(const float *x, const SwWeight &weight, const QuantizedRows &rows, int64_t row) {
  const int64_t n = weight.inputs;
  int16_t *q = rows.row(row);
  const Rounding rounding = rounding_of(x, n, row_levels(weight));
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
  std::memset(q + n, 0, integer_bytes(n) - n * sizeof(int16_t));
  if (weight.kind == SW_INT4) sum_groups(q, n / kGroup, rows.sums(row));
}

inline void quantize_rotated_row(const float *x, const SwWeight &weight, const QuantizedRows &rows, int64_t row) {
  alignas(64) float rotated[kWidestRotated];
  const int64_t n = rotated_size(weight.inputs);
  rotate_inputs(x, weight.inputs, rotated);
  const Rounding rounding = rounding_of(rotated, n, kRotatedLevels);
  rows.scales[row] = rounding.scale;
  RotatedInteger *q = rows.rotated_row(row);
  if (rounding.factor == 0) {
    std::memset(q, 0, rows.stride);
    return;
  }
  const Vec factor = broadcast(rounding.factor);
  IntVec sums{};
  for (int64_t i = 0; i < n; i += kWidth) {
    const IntVec v = rounded(load(rotated + i), factor);
    sums += v;
    store_narrow(q + i, v);
  }
  int32_t sum = 0;
  for (int lane = 0; lane < kWidth; ++lane) sum += sums[lane];
  rows.rotated_sum(row) = sum;
}

// Quantises x[inputs] for a product with the weight.
inline void quantize_row(const float *x, const SwWeight &weight, const QuantizedRows &rows, int64_t row) {
  if (weight.kind == SW_INT8_ROTATED)
    quantize_rotated_row(x, weight, rows, row);
  else
    quantize_plain_row(x, weight, rows, row);
}

}  // namespace SW_ISA
