// Weights in int8 with one scale for each output, rotated as their rows are: see rotation.h. Products of integers of 8
// bits are summed in 32 bits, which is exact in any order: every instruction set finds the same sums.
//
// With AVX-512 VNNI a panel of 16 outputs holds, for each four inputs, the 16 outputs' four weights each, to which 128 is
// added: the instruction wants one side without signs. As much is taken off again by the sum of the row's integers.
// Elsewhere a panel is one of Int8Panels.
#pragma once
#include <cmath>
#include <cstring>

#include "int8_panels.h"
#include "quantized_rows.h"
#include "rotation.h"

namespace SW_ISA {

struct RotatedPanels {
  using Sum = int32_t;

#if defined(__AVX512VNNI__)
  static constexpr int kTileRows = 8;
  static constexpr int kTilePanels = 3;  // so that eight rows take 11 loads for 24 products
#else
  static constexpr int kTileRows = Int8Panels::kTileRows;
  static constexpr int kTilePanels = 1;
#endif

  static int64_t panel_bytes(int64_t inputs) { return rotated_size(inputs) * kPanel; }

  // See Int8Panels::pack.
  static void pack(const float *weight, int64_t outputs, int64_t inputs, int64_t panel, int8_t *packed, float *scales) {
    alignas(64) float rotated[kWidestRotated];
    const int64_t size = rotated_size(inputs);
    int8_t *to = packed + panel * panel_bytes(inputs);
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t output = panel * kPanel + lane;
      const bool exists = output < outputs;
      if (exists) rotate_inputs(weight + output * inputs, inputs, rotated);
      const Rounding rounding = rounding_of(rotated, exists ? size : 0, kWeightLevels);
      scales[output] = rounding.scale * rotated_product_scale(inputs);
      for (int64_t input = 0; input < size; ++input) {
        const float scaled = rounding.factor != 0 ? rotated[input] * rounding.factor : 0.0f;
        place(to, lane, input, static_cast<int8_t>(std::nearbyintf(scaled)));
      }
    }
  }

  // See Int8Panels::multiply.
  template <int Rows, int Count>
  static void multiply(const QuantizedRows &rows, int64_t row, const int8_t *panels, int64_t inputs, const int8_t *ahead,
                       Sum *sums) {
#if defined(__AVX512VNNI__)
    constexpr int kChains = Rows * Count > 8 ? 1 : Rows > 1 ? 2 : 4;  // for each sum, since a product takes several cycles
    const int64_t bytes = panel_bytes(inputs);
    const int8_t *x[Rows];
    __m512i acc[Count][Rows][kChains];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      x[r] = rows.rotated_row(row + r);
#pragma GCC unroll 4
      for (int p = 0; p < Count; ++p) {
        acc[p][r][0] = _mm512_set1_epi32(-kBias * rows.rotated_sum(row + r));
#pragma GCC unroll 4
        for (int c = 1; c < kChains; ++c) acc[p][r][c] = _mm512_setzero_si512();
      }
    }
    for (int64_t first = 0; first < bytes / kPanel; first += kQuad * kChains) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        const int64_t input = first + c * kQuad;
        __m512i w[Count];
#pragma GCC unroll 4
        for (int p = 0; p < Count; ++p) {
          w[p] = _mm512_loadu_si512(panels + p * bytes + input * kPanel);
          if (ahead) __builtin_prefetch(ahead + p * bytes + input * kPanel, 0, 2);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const __m512i xs = _mm512_set1_epi32(quad(x[r] + input));
#pragma GCC unroll 4
          for (int p = 0; p < Count; ++p) acc[p][r][c] = _mm512_dpbusd_epi32(acc[p][r][c], w[p], xs);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < Count; ++p)
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int c = 1; c < kChains; ++c) acc[p][r][0] = _mm512_add_epi32(acc[p][r][0], acc[p][r][c]);
        _mm512_storeu_si512(sums + (p * Rows + r) * kPanel, acc[p][r][0]);
      }
#else
    Int8Panels::multiply<Rows, Count>(rows, row, panels, rotated_size(inputs), ahead, sums);
#endif
  }

 private:
#if defined(__AVX512VNNI__)
  static constexpr int kQuad = 4;  // inputs that one instruction sums
  static constexpr int kBias = 128;

  static int32_t quad(const int8_t *x) {
    int32_t word;
    std::memcpy(&word, x, sizeof word);
    return word;
  }

  static void place(int8_t *panel, int lane, int64_t input, int8_t weight) {
    panel[(input / kQuad * kPanel + lane) * kQuad + input % kQuad] = static_cast<int8_t>(weight ^ kBias);
  }
#else
  static void place(int8_t *panel, int lane, int64_t input, int8_t weight) {
    panel[(input / kPair * kPanel + lane) * kPair + input % kPair] = weight;
  }
#endif
};

}  // namespace SW_ISA
