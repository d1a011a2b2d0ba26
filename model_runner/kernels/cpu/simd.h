// Vectors of floats, as wide as the instruction set that a file is compiled for, and functions on them.
//
// Nothing here may depend on a number's place in a row, on the number of rows or on the instruction set. Products and
// sums are fused only where `fma` says so, and there everywhere; the compiler must not contract. Sums have one fixed
// order, in the same number of lanes on every instruction set.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace SW_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));

// A value at an address of any alignment.
template <typename T>
inline T load_as(const void *from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Vec load(const float *from) { return load_as<Vec>(from); }

inline void store(float *to, Vec v) { std::memcpy(to, &v, sizeof v); }

// `count` numbers, fewer than a vector, then zeros.
inline Vec load_some(const float *from, int64_t count) {
  float numbers[kWidth] = {};
  std::memcpy(numbers, from, count * sizeof(float));
  return load(numbers);
}

// y[i] = work(x[i], ...) for i below n, a vector at a time. In place if y is an x.
template <typename Work, typename... X>
inline void transform(float *y, int64_t n, const Work &work, const X *...x) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(y + i, work(load(x + i)...));
  if (i == n) return;
  const Vec last = work(load_some(x + i, n - i)...);
  std::memcpy(y + i, &last, (n - i) * sizeof(float));
}

// y = x. For a few dozen numbers, where a call of memcpy would take longer.
inline void copy(const float *x, int64_t n, float *y) {
  transform(y, n, [](Vec v) { return v; }, x);
}

inline Vec broadcast(float x) { return x - Vec{}; }  // changes no number, not even -0

inline IntVec bits(Vec v) { return (IntVec)v; }

inline Vec from_bits(IntVec b) { return (Vec)b; }

// kWidth integers of 8 bits. GCC would convert them one by one.
inline IntVec load_integers(const int8_t *from) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  return __builtin_convertvector(load_as<Bytes>(from), IntVec);
#endif
}

inline Vec load(const int8_t *from) { return __builtin_convertvector(load_integers(from), Vec); }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  Vec result;
  for (int lane = 0; lane < kWidth; ++lane) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return result;
#endif
}

// Scalar `fma` with the same rounding, for the remainder at the end of a row.
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// A sum over many numbers, in 16 lanes on every instruction set: number i is added to lane i mod 16.
constexpr int kLanes = 16;

struct Lanes {
  Vec parts[kLanes / kWidth];
};

inline Lanes load_lanes(const float *from) { return load_as<Lanes>(from); }

inline float sum(const Lanes &lanes) {  // pairwise, the upper half added to the lower
  float x[kLanes];
  std::memcpy(x, &lanes, sizeof x);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

inline float max(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float x[kWidth];
  store(x, v);
  for (int half = kWidth / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = x[i + half] > x[i] ? x[i + half] : x[i];
  return x[0];
#endif
}

// Whether any lane of a is above the same lane of b.
inline bool any_above(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ));
#else
  int32_t above = 0;
  for (int lane = 0; lane < kWidth; ++lane) above |= (a > b)[lane];
  return above;
#endif
}

// The parts of e^x: x = n ln 2 + r, and e^r as a polynomial after Cephes' expf.
struct ExpParts {
  IntVec n;
  Vec power_of_r;
};

inline ExpParts exp_parts(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = fma(x, broadcast(1.44269504f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  return {bits(shifted) - bits(magic), fma(p, r * r, r) + 1.0f};
}

inline Vec power_of_two(IntVec n) { return from_bits((n + 127) << 23); }

constexpr float kLowestExponent = -87.33654f;  // e^x is 0 below

// e^x to about one unit in the last place; infinite above 88.7, NaN for NaN.
inline Vec exp(Vec x) {
  const Vec low = broadcast(kLowestExponent), high = broadcast(88.72284f);
  const ExpParts parts = exp_parts(x < low ? low : (x > high ? high : x));
  const IntVec half = parts.n >> 1;  // 2^n as two factors, because n reaches 128
  Vec result = parts.power_of_r * power_of_two(half) * power_of_two(parts.n - half);
  result = x < low ? Vec{} : result;
  return x > high ? broadcast(__builtin_inff()) : result;
}

// A faster e^x for x <= 0 or NaN.
inline Vec exp_not_positive(Vec x) {
  const Vec low = broadcast(kLowestExponent);
  const ExpParts parts = exp_parts(x < low ? low : x);
  return x < low ? Vec{} : parts.power_of_r * power_of_two(parts.n);
}

constexpr float kLowestPower = -55.0f;  // 2^x is 0 below

// 2^x for x <= 0 or NaN, with a relative error of 3e-6; exactly 1 for 0. The coefficients minimise the relative error
// on [-1/2, 1/2].
inline Vec exp2_not_positive(Vec x) {
  const Vec magic = broadcast(12582912.0f + 127);  // as above; the last bits of the sum are the power's exponent
  const Vec shifted = x + magic;
  const Vec r = x - (shifted - magic);
  Vec p = broadcast(9.582853e-3f);
  p = fma(p, r, broadcast(5.5906426e-2f));
  p = fma(p, r, broadcast(2.4024099e-1f));
  p = fma(p, r, broadcast(6.931242e-1f));
  p = fma(p, r, broadcast(1.0f));
  return x < kLowestPower ? Vec{} : p * from_bits(bits(shifted) << 23);
}

inline Vec tanh(Vec x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace SW_ISA
