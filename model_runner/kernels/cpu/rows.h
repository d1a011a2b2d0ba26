// Arithmetic on rows of floats: RMS norms and scaled sums; how rows are shared between threads; where recurrent layers
// have theirs.
//
// A sum over a row has kLanes partial sums, whatever the instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

inline void add_squares(const float *x, Lanes &squares) {  // of 16 numbers
  for (Vec &part : squares.parts) {
    const Vec v = load(x);
    part = fma(v, v, part);
    x += kWidth;
  }
}

inline float sum_of_squares(const float *x, int64_t n) {
  Lanes squares{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add_squares(x + i, squares);
  if (i < n) {
    float last[kLanes] = {};
    copy(x + i, n - i, last);
    add_squares(last, squares);
  }
  return sum(squares);
}

// x / rms(x) * weight (Zhang and Sennrich, arXiv:1910.07467). In place if y is x.
inline void rms_norm(const float *x, const float *weight, float eps, int64_t n, float *y) {
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
  transform(y, n, [=](Vec v, Vec w) { return v * factor * w; }, x, weight);
}

// y = x + scale * added.
inline void add_scaled(const float *x, const float *added, float scale, int64_t n, float *y) {
  transform(y, n, [=](Vec v, Vec a) { return fma(a, broadcast(scale), v); }, x, added);
}

inline float *rows_of_block(const SwRows &rows, int64_t block) {
  return block < rows.num_blocks ? rows.blocks + block * rows.stride
                                 : rows.scratch + (block - rows.num_blocks) * rows.scratch_stride;
}

// Calls work(row) for each row, shared between the threads, of which none gets fewer than `least` at once.
template <typename Work>
inline void for_rows(samewise::ThreadPool &pool, int64_t rows, const Work &work, int64_t least = 1) {
  const int64_t at_once = std::max(least, rows / (8 * pool.size()) + 1);
  pool.for_each((rows + at_once - 1) / at_once, [&](int64_t unit) {
    for (int64_t row = unit * at_once; row < std::min(rows, (unit + 1) * at_once); ++row) work(row);
  });
}

}  // namespace SW_ISA
