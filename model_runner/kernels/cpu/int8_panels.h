// int8 weights with one scale per output. Products are summed in 32-bit integers, which is exact in any order.
//
// A panel of 16 outputs holds, for each pair of inputs, the two weights of each output, which an integer instruction
// multiplies and sums after widening. Outputs and inputs are padded with zeros.
#pragma once
#include <cmath>
#include <cstring>

#include "quantized_rows.h"

namespace SW_ISA {

struct Int8Panels {
  using Sum = int32_t;

  static constexpr bool kHasTiles = true;  // whether a product has tiles of rows and panels
  static constexpr int kTilePanels = 1;    // panels multiplied at once

  // Rows multiplied with a panel at once, as many as the registers have sums for.
#if defined(__AVX512VNNI__)
  static constexpr int kTileRows = 4;
#else
  static constexpr int kTileRows = 6;
#endif

  static int64_t panel_bytes(int64_t inputs) { return round_up(inputs, kPair) * kPanel; }

  // Quantises and packs outputs from 16 * panel on; rows beyond the weight's outputs count as zero.
  static void pack(const float *weight, int64_t outputs, int64_t inputs, int64_t panel, int8_t *packed, float *scales) {
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

  // Sums of products of `Rows` rows, from `row` on, with `Count` panels: [Count, Rows, 16]. Reads the panels once, from
  // front to end, and meanwhile prefetches as much from `ahead` on, unless it is null. Loops are unrolled so that the
  // compiler keeps the sums in registers.
  template <int Rows, int Count>
  static void multiply(const QuantizedRows &rows, int64_t row, const int8_t *panel, int64_t inputs, const int8_t *ahead,
                       Sum *sums) {
    static_assert(Count == 1);
    constexpr int kParts = kPanel / kWidth;
    constexpr int kChains = kWidth == 16 ? 4 : 1;  // independent sums, because one product takes several cycles
    const int64_t pairs = round_up(inputs, kPair) / kPair;
    IntVec acc[Rows][kParts][kChains] = {};
    const auto add = [&](int chain, int64_t pair) {
      Shorts w[kParts];
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) w[part] = load_shorts(panel + (pair * kPanel + part * kWidth) * kPair);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part)
          acc[r][part][chain] = add_pairs(acc[r][part][chain], w[part], rows.pair(row + r, pair));
      if (ahead) __builtin_prefetch(ahead + pair * kPanel * kPair, 0, 2);
    };
    int64_t p = 0;
    for (; p + kChains <= pairs; p += kChains)
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) add(c, p + c);
    for (; p < pairs; ++p) add(0, p);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 4
        for (int c = 1; c < kChains; ++c) acc[r][part][0] += acc[r][part][c];
        std::memcpy(sums + r * kPanel + part * kWidth, &acc[r][part][0], sizeof(IntVec));
      }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// int8 weights with one scale per output, rotated like their rows (quantized_rows.h). Products of 8-bit integers are
// summed in 32 bits, which is exact in any order, so all instruction sets agree.
//
// With AVX-512 VNNI a panel of 16 outputs holds, for each four inputs, the four weights of each output plus 128: the
// instruction needs one unsigned operand. This offset times the sum of the row's integers is subtracted again.
// Elsewhere a panel is one of Int8Panels.

struct RotatedPanels {
  using Sum = int32_t;

  static constexpr bool kHasTiles = true;

#if defined(__AVX512VNNI__)
  static constexpr int kTileRows = 8;
  static constexpr int kTilePanels = 3;  // so that eight rows need 11 loads for 24 products
#else
  static constexpr int kTileRows = Int8Panels::kTileRows;
  static constexpr int kTilePanels = 1;
#endif

  static int64_t panel_bytes(int64_t inputs) { return rotated_size(inputs) * kPanel; }

  // Packs one panel, like Int8Panels::pack.
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

  // Multiplies rows with panels, like Int8Panels::multiply.
  template <int Rows, int Count>
  static void multiply(const QuantizedRows &rows, int64_t row, const int8_t *panels, int64_t inputs, const int8_t *ahead,
                       Sum *sums) {
#if defined(__AVX512VNNI__)
    constexpr int kChains = Rows * Count > 8 ? 1 : Rows > 1 ? 2 : 4;  // per sum, because a product takes several cycles
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
          const __m512i xs = _mm512_set1_epi32(load_as<int32_t>(x[r] + input));
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
