// Rows as integers with one scale each, for products with packed weights: either 12 bits, or rotated and then 8 bits.
//
// With 8 bits alone, a row's largest number leaves too few steps for the others: SmolLM2-135M then prefers another
// token than in float32 at one position in nine, with 12 bits at one in 23, and rotated at one in 25.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "rounding.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

// ---------------------------------------------------------------------------------------------------------------------
// Rotation of rows and weights before they are rounded to 8 bits. It spreads a row's outlier, which would leave few
// steps for its other numbers, over all of them. A product of two vectors is unchanged when both are multiplied by the
// same orthogonal matrix (Ashkboos et al., QuaRot, arXiv:2404.00456).
//
// The matrix has Hadamard blocks on its diagonal. Their sizes are the largest powers of two that add up to the number
// of inputs, which is padded with zeros to a multiple of the smallest block. Every number goes through the same
// additions in the same order, whatever the vector width.

constexpr int kSmallestBlock = 64;
constexpr int64_t kWidestRotated = 32768;  // inputs, so that a rotated or reordered row fits on the stack

inline int64_t rotated_size(int64_t inputs) { return round_up(inputs, kSmallestBlock); }

inline int64_t largest_block(int64_t inputs) { return std::bit_floor(static_cast<uint64_t>(rotated_size(inputs))); }

// The factor on a product of two rotated vectors: each was shortened by the square root of this.
inline float rotated_product_scale(int64_t inputs) { return static_cast<float>(largest_block(inputs)); }

// Lane i receives lane i ^ Stride.
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

// Sums and differences of lanes that are Stride apart. A product with 1 or -1 is exact, so nothing is rounded twice.
template <int Stride>
inline Vec butterfly_of_lanes(Vec v) {
  Vec sign;
  for (int lane = 0; lane < kWidth; ++lane) sign[lane] = lane & Stride ? -1.0f : 1.0f;
  return fma(v, sign, swapped<Stride>(v));
}

// The first stages: factor * x[64] times a Hadamard matrix of size 64, in registers.
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

// The stages between numbers that are 64 or more apart, two at a time to halve the cache traffic.
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

// rotated[rotated_size(n)] = x[n] times the matrix, divided by the square root of the largest block. So no number
// becomes larger than the largest in x, and finite numbers stay finite. A non-finite number makes some results
// non-finite.
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

// ---------------------------------------------------------------------------------------------------------------------

constexpr int kPanel = 16;          // outputs of a weight's panel
constexpr int kPair = 2;            // inputs that one integer instruction sums
constexpr int kGroup = 32;          // inputs that share a scale in int4
constexpr int64_t kRowLevels = 2047;  // the largest integer of a row that is not rotated
constexpr int kWeightLevels = 127;  // the largest integer of an int8 weight
constexpr int kRotatedLevels = 127;  // the largest integer of a rotated row

#if defined(__AVX512VNNI__)
typedef int8_t RotatedInteger;
#else
typedef int16_t RotatedInteger;  // needs no widening
#endif

// 16-bit integers of kWidth outputs, two of each, for a pair of inputs.
typedef int16_t Shorts __attribute__((vector_size(kWidth * kPair * sizeof(int16_t))));
typedef uint16_t UnsignedShorts __attribute__((vector_size(sizeof(Shorts))));

inline Shorts load_shorts(const int8_t *from) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi8_epi16(load_as<__m256i>(from));
#elif defined(__AVX2__)
  return (Shorts)_mm256_cvtepi8_epi16(load_as<__m128i>(from));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth * kPair)));
  return __builtin_convertvector(load_as<Bytes>(from), Shorts);
#endif
}

// sums + products of two integers of each output with the two of a row in x.
inline IntVec add_pairs(IntVec sums, Shorts weights, int32_t x) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  sums += (IntVec)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(x));
  asm("" : "+x"(sums));
  return sums;
#else
  const IntVec words = (IntVec)weights;
  return sums + (words << 16 >> 16) * static_cast<int16_t>(x) + (words >> 16) * (x >> 16);
#endif
}

// Sums of a row's integers in a group of inputs.
struct GroupSums {
  float sum;
  int16_t halves[kPair];  // of the first and of the last 16 inputs

  int32_t pair() const { return load_as<int32_t>(halves); }
};

// Quantised rows. A row with a non-finite number gets the scale NaN, so that all its results are NaN.
struct QuantizedRows {
  char *data;       // [rows, stride]
  float *scales;    // [rows]
  int64_t stride;   // row_bytes(inputs), or more
  int64_t sums_at;  // offset of a row's sums, after its integers

  int16_t *row(int64_t index) const { return reinterpret_cast<int16_t *>(data + index * stride); }

  RotatedInteger *rotated_row(int64_t index) const {
    return reinterpret_cast<RotatedInteger *>(data + index * stride);
  }

  // The sums of each group of inputs, for weights in groups.
  GroupSums *sums(int64_t index) const { return reinterpret_cast<GroupSums *>(data + index * stride + sums_at); }

  // The sum of all integers of a rotated row.
  int32_t &rotated_sum(int64_t index) const {
    return *reinterpret_cast<int32_t *>(data + index * stride + sums_at);
  }

  // Two numbers of a row as one word.
  int32_t pair(int64_t index, int64_t pair) const { return load_as<int32_t>(row(index) + pair * kPair); }
};

inline int64_t integer_bytes(int64_t inputs) { return rotated_size(inputs) * sizeof(int16_t); }

// Bytes of a quantised row with this many inputs, including its sums.
inline int64_t row_bytes(int64_t inputs) {
  return integer_bytes(inputs) + round_up(std::max<int64_t>(inputs / kGroup, 1) * sizeof(GroupSums), 64);
}

// Takes memory for rows of up to this many inputs.
inline QuantizedRows take_rows(ScratchAllocator &take, int64_t inputs, int64_t num_rows) {
  QuantizedRows rows{nullptr, nullptr, row_bytes(inputs), integer_bytes(inputs)};
  take(rows.data, num_rows * rows.stride);
  take(rows.scales, num_rows);
  return rows;
}

// The largest integer of a row that is not rotated. All products of an int8 weight are summed in 32 bits, so it is
// smaller with more inputs if some part of the linear is int8; the sums of groups always fit.
inline float row_levels(const SwWeight &weight) {
  int64_t levels = kRowLevels;
  for (const SwWeight *part = &weight; part; part = part->next)
    if (part->kind == SW_INT8)
      levels = std::min(levels, INT32_MAX / (kWeightLevels * std::max<int64_t>(part->inputs, 1)));
  return static_cast<float>(levels);
}

template <typename Integer>
inline void store_narrow(Integer *to, IntVec v) {
  typedef Integer Narrow __attribute__((vector_size(kWidth * sizeof(Integer))));
  const Narrow narrow = __builtin_convertvector(v, Narrow);
  std::memcpy(to, &narrow, sizeof narrow);
}

inline void sum_groups(const int16_t *q, int64_t groups, GroupSums *sums) {
  for (int64_t group = 0; group < groups; ++group) {
    int32_t halves[kPair] = {};
    for (int32_t &half : halves)
      for (int i = 0; i < kGroup / kPair; ++i) half += *q++;
    sums[group] = {static_cast<float>(halves[0] + halves[1]),
                   {static_cast<int16_t>(halves[0]), static_cast<int16_t>(halves[1])}};
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
    const IntVec v = rounded(load_some(x + i, n - i), factor);
    for (int lane = 0; i < n; ++i, ++lane) q[i] = static_cast<int16_t>(v[lane]);
  }
  std::memset(q + n, 0, integer_bytes(n) - n * sizeof(int16_t));
  sum_groups(q, n / kGroup, rows.sums(row));
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

// Quantises x[inputs] for a product with all parts of a linear.
inline void quantize_row(const float *x, const SwWeight &weight, const QuantizedRows &rows, int64_t row) {
  float ordered[kWidestRotated];
  if (weight.input_order) {
    for (int32_t i = 0; i < weight.inputs; ++i) ordered[i] = x[weight.input_order[i]];
    x = ordered;
  }
  if (weight.kind == SW_INT8_ROTATED)
    quantize_rotated_row(x, weight, rows, row);
  else
    quantize_plain_row(x, weight, rows, row);
}

}  // namespace SW_ISA
