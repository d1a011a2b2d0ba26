// Logarithm and exponential in double precision, with the same bits on every processor and with every C library.
//
// The C library's own choose their algorithm by the processor. These use additions, products and quotients only, which
// IEEE 754 rounds alike everywhere; the compiler must not contract them. sampling/noise.py computes the same bits.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace SW_ISA {

constexpr double kLn2 = 0.69314718055994531;
constexpr double kLn2High = 0.693147180369123816490;  // 33 bits, so that products with exponents are exact
constexpr double kLn2Low = 1.90821492927058770002e-10;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLeastExponent = -708;  // exp_not_positive is 0 below

// The natural logarithm, with an error below one unit in the last place.
//
// x = 2^n m with m between sqrt(1/2) and sqrt(2). With f = m - 1 and s = f / (2 + f), log m = 2 artanh s
// = 2 s + s (2/3 s^2 + 2/5 s^4 + ...), and 2 s = f - f^2/2 + s f^2/2, whose first term is exact.
inline double log(double x) {
  constexpr uint64_t least = 0x3FE6A09E667F3BCD;  // sqrt(1/2)
  const bool is_subnormal = x < 0x1p-1022;
  const uint64_t above = std::bit_cast<uint64_t>(is_subnormal ? x * 0x1p54 : x) - least;
  const int64_t exponent = static_cast<int64_t>(above) >> 52;
  const double n = static_cast<double>(exponent - (is_subnormal ? 54 : 0));
  const double f = std::bit_cast<double>(above - (static_cast<uint64_t>(exponent) << 52) + least) - 1;
  const double s = f / (2 + f), z = s * s, half = 0.5 * f * f;
  double p = z * (2.0 / 21) + 2.0 / 19;
  p = p * z + 2.0 / 17;
  p = p * z + 2.0 / 15;
  p = p * z + 2.0 / 13;
  p = p * z + 2.0 / 11;
  p = p * z + 2.0 / 9;
  p = p * z + 2.0 / 7;
  p = p * z + 2.0 / 5;
  p = p * z + 2.0 / 3;
  const double result = n * kLn2High - ((half - (s * (half + p * z) + n * kLn2Low)) - f);
  if (x == 0) return -kInfinity;
  if (!(x > 0)) return std::numeric_limits<double>::quiet_NaN();
  return x == kInfinity ? x : result;
}

// e^x for x that is NaN or not positive, except by rounding, with an error below one unit in the last place; 0 below
// -708.
inline double exp_not_positive(double from) {
  constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double x = from < kLeastExponent ? kLeastExponent : from;
  const double shifted = x * (1 / kLn2) + magic;
  const double n = shifted - magic;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double p = r * (1.0 / 6227020800) + 1.0 / 479001600;  // the Taylor series: |r| <= 0.35
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * (r * r) + r;
  const uint64_t power = (std::bit_cast<uint64_t>(shifted) + 1023) << 52;  // the integer is in the lowest bits
  const double factor = std::bit_cast<double>(power);
  const double result = p * factor + factor;
  return from < kLeastExponent ? 0 : result;
}

// log(1 + e^x).
inline float softplus(float x) {
  const double rest = log(1.0 + exp_not_positive(-std::abs(static_cast<double>(x))));
  return static_cast<float>((x > 0 ? static_cast<double>(x) : 0.0) + (x == x ? rest : static_cast<double>(x)));
}

}  // namespace SW_ISA
