// Rows times panels for each kind of weight, which linear.h declares. Only kernels.cpp includes this file: it takes long
// to compile.
#pragma once
#include <algorithm>
#include <cstring>

#include "linear.h"
#include "quantized_rows.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int64_t kIdleRows = 4;  // with more rows, products take so long that memory is idle without prefetching

inline Vec load_sums(const float *from) { return load(from); }

inline Vec load_sums(const int32_t *from) { return __builtin_convertvector(load_as<IntVec>(from), Vec); }

// Results from the sums of an integer row and outputs from `output` on.
template <typename Sum>
inline Vec scaled(const Sum *sums, float row_scale, const SwWeight &weight, int64_t output) {
  const Vec y = load_sums(sums) * load(weight.scales + output) * broadcast(row_scale);
  return weight.bias ? y + load(weight.bias + output) : y;
}

// Multiplies `Rows` rows with `Count` panels.
template <typename Panels, int Rows, int Count>
inline void tile(const SwWeight &weight, const QuantizedRows &rows, int64_t row, int64_t panel, bool prefetch_ahead,
                 const Emit &emit) {
  alignas(64) typename Panels::Sum sums[Count * Rows * kPanel];
  const int64_t bytes = Panels::panel_bytes(weight.inputs);
  const int8_t *packed = weight.packed + panel * bytes;
  const int8_t *ahead = prefetch_ahead ? packed + Count * bytes : nullptr;
  Panels::template multiply<Rows, Count>(rows, row, packed, weight.inputs, ahead, sums);
  alignas(64) float results[Rows * Count * kPanel];
  const int64_t first = panel * kPanel;
  for (int p = 0; p < Count; ++p)
    for (int r = 0; r < Rows; ++r)
      for (int i = 0; i < kPanel; i += kWidth)
        store(results + (r * Count + p) * kPanel + i,
              scaled(sums + (p * Rows + r) * kPanel + i, rows.scales[row + r], weight, first + p * kPanel + i));
  emit({row, Rows, first, std::min<int64_t>(Count * kPanel, weight.outputs - first), results, Count * kPanel});
}

// Multiplies a tile of `count` rows, at most Rows, with `Count` panels.
template <typename Panels, int Rows, int Count = 1>
inline void tile_of_rows(int64_t count, const SwWeight &weight, const QuantizedRows &rows, int64_t row, int64_t panel,
                         bool prefetch_ahead, const Emit &emit) {
  if (count == Rows) return tile<Panels, Rows, Count>(weight, rows, row, panel, prefetch_ahead, emit);
  if constexpr (Rows > 1) tile_of_rows<Panels, Rows - 1, Count>(count, weight, rows, row, panel, prefetch_ahead, emit);
}

// Multiplies rows first_row to end_row with panels first_panel to end_panel, `Count` panels at a time.
template <typename Panels, int Count>
inline void multiply_block(const SwWeight &weight, const QuantizedRows &rows, int64_t first_row, int64_t end_row,
                           int64_t first_panel, int64_t end_panel, const Emit &emit) {
  constexpr int kTileRows = Panels::kTileRows;
  int64_t panel = first_panel;
  for (; panel + Count <= end_panel; panel += Count)
    for (int64_t row = first_row; row < end_row; row += kTileRows) {
      // The first tile of rows reads the panels from memory, which would be idle during its products and later tiles.
      const bool prefetch_ahead = row == first_row && end_row - row > kIdleRows && panel + 2 * Count <= end_panel;
      const int64_t count = std::min<int64_t>(kTileRows, end_row - row);
      tile_of_rows<Panels, kTileRows, Count>(count, weight, rows, row, panel, prefetch_ahead, emit);
    }
  if constexpr (Count > 1)
    multiply_block<Panels, Count - 1>(weight, rows, first_row, end_row, panel, end_panel, emit);
}

// Like multiply_block for weights from block formats. There are at most kUnitRows rows.
template <typename Panels>
inline void multiply_blocks(const SwWeight &weight, const QuantizedRows &rows, int64_t first_row, int64_t end_row,
                            int64_t first_panel, int64_t end_panel, const Emit &emit) {
  alignas(64) float totals[kUnitRows * kPanel];
  const int64_t bytes = Panels::panel_bytes(weight.inputs), count = end_row - first_row;
  for (int64_t panel = first_panel; panel < end_panel; ++panel) {
    std::fill(totals, totals + count * kPanel, 0.0f);
    Panels::multiply(rows, first_row, end_row, weight.packed + panel * bytes, weight.inputs, totals);
    const int64_t first = panel * kPanel;
    for (int64_t r = 0; r < count; ++r)
      for (int i = 0; i < kPanel; i += kWidth) {
        float *sums = totals + r * kPanel + i;
        store(sums, scaled(sums, rows.scales[first_row + r], weight, first + i));
      }
    emit({first_row, count, first, std::min<int64_t>(kPanel, weight.outputs - first), totals, kPanel});
  }
}

void multiply_part(const SwWeight &weight, const QuantizedRows &rows, int64_t first_row, int64_t end_row,
                   int64_t first_panel, int64_t end_panel, const Emit &emit) {
  with_panels(weight.kind, [&](auto panels) {
    using Panels = decltype(panels);
    if constexpr (!Panels::kHasTiles)
      multiply_blocks<Panels>(weight, rows, first_row, end_row, first_panel, end_panel, emit);
    else if (end_row - first_row <= kFewRows)
      multiply_block<Panels, 1>(weight, rows, first_row, end_row, first_panel, end_panel, emit);
    else
      multiply_block<Panels, Panels::kTilePanels>(weight, rows, first_row, end_row, first_panel, end_panel, emit);
  });
}

}  // namespace SW_ISA
