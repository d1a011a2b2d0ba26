// Linear layers: y = x W^T, with W in int8 or int4 and x rounded to integers with one scale per row (quantized_rows.h).
//
// A row's result does not depend on other rows: its products are summed in integers, which is exact in any order, or in
// a fixed order.
//
// A packed weight is a sequence of panels of 16 outputs (int8_panels.h, int4_panels.h, block_panels.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "block_panels.h"
#include "int4_panels.h"
#include "int8_panels.h"
#include "quantized_rows.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int64_t kFewRows = 20;  // memory is the limit, and long stretches are read faster

inline int64_t num_panels(const SwWeight &part) { return round_up(part.outputs, kPanel) / kPanel; }

// Panels of a linear with all its parts.
inline int64_t panels_of_all(const SwWeight &weight) {
  int64_t panels = 0;
  for (const SwWeight *part = &weight; part; part = part->next) panels += num_panels(*part);
  return panels;
}

inline int64_t outputs_of_all(const SwWeight &weight) {
  int64_t outputs = 0;
  for (const SwWeight *part = &weight; part; part = part->next) outputs += part->outputs;
  return outputs;
}

// Calls work with an object of the class that packs and multiplies weights of this kind.
template <typename Work>
inline void with_panels(int32_t kind, const Work &work) {
  switch (kind) {
    case SW_INT8: return work(Int8Panels());
    case SW_INT4: return work(Int4Panels());
    case SW_INT8_ROTATED: return work(RotatedPanels());
    case SW_AS_Q4_0: return work(Q4_0Panels());
    case SW_AS_Q4_ZERO: return work(Q4ZeroPanels());
    case SW_AS_Q4_K: return work(Q4KPanels());
    case SW_AS_IQ4_NL: return work(Iq4NlPanels());
    case SW_AS_IQ4_XS: return work(Iq4XsPanels());
    case SW_AS_MXFP4: return work(Mxfp4Panels());
    case SW_AS_NVFP4: return work(Nvfp4Panels());
    case SW_AS_Q8_0: return work(Q8_0Panels());
    case SW_AS_Q5_1: return work(Q5_1Panels());
    case SW_AS_Q6_K: return work(Q6KPanels());
    case SW_AS_Q5_K: return work(Q5KPanels());
  }
}

// Results of neighbouring rows and outputs.
struct Results {
  int64_t row, rows;      // the first row, and the number of rows
  int64_t first, count;   // the first output, and the number of outputs
  const float *values;    // [rows, stride]
  int64_t stride;
};

// The receiver of a product's results: a function object whose type is forgotten, so that products are compiled
// once, not for each use. It must outlive this.
class Emit {
 public:
  // work(row, first, count, results) receives `count` results of a row, from output `first` on.
  template <typename Work>
  Emit(const Work &work) : work_(&work), call_(call<Work>) {}

  // The same for a part of a linear whose outputs are preceded by others.
  Emit behind(int64_t outputs) const {
    Emit emit = *this;
    emit.before_ += outputs;
    return emit;
  }

  void operator()(Results results) const {
    results.first += before_;
    call_(work_, results);
  }

 private:
  template <typename Work>
  static void call(const void *work, const Results &results) {
    for (int64_t row = 0; row < results.rows; ++row)
      (*static_cast<const Work *>(work))(results.row + row, results.first, results.count,
                                         results.values + row * results.stride);
  }

  const void *work_;
  void (*call_)(const void *, const Results &);
  int64_t before_ = 0;
};

// Receives results into y[rows, stride].
struct Store {
  float *y;
  int64_t stride;

  void operator()(int64_t row, int64_t first, int64_t count, const float *results) const {
    copy(results, count, y + row * stride + first);
  }
};

constexpr int64_t kTileRowsOfAll = 24;             // a multiple of every tile's rows
constexpr int64_t kUnitRows = 5 * kTileRowsOfAll;  // at most: a unit's rows stay in the L2 cache

// As multiply_unit for one part of a linear. Defined in products.h.
void multiply_part(const SwWeight &weight, const QuantizedRows &rows, int64_t first_row, int64_t end_row,
                   int64_t first_panel, int64_t end_panel, const Emit &emit);

// Multiplies rows first_row to end_row, at most kUnitRows, with panels first_panel to end_panel of a linear, on the
// calling thread. Its parts' panels are counted one after another.
inline void multiply_unit(const SwWeight &weight, const QuantizedRows &rows, int64_t first_row, int64_t end_row,
                          int64_t first_panel, int64_t end_panel, const Emit &emit) {
  int64_t outputs = 0;
  for (const SwWeight *part = &weight; part && end_panel > 0; part = part->next) {
    const int64_t panels = num_panels(*part), end = std::min(panels, end_panel);
    if (first_panel < end)
      multiply_part(*part, rows, first_row, end_row, std::max<int64_t>(first_panel, 0), end, emit.behind(outputs));
    first_panel -= panels;
    end_panel -= panels;
    outputs += part->outputs;
  }
}

constexpr int64_t kTogether = 3;        // panels that stay in one unit: the most that are multiplied at once
constexpr int64_t kUnitBytes = 524288;  // of weights: each unit waits for memory as it begins

// Shares rows times panels, which have `bytes` in all, between the threads: work(first_row, end_row, first_panel,
// end_panel).
template <typename Work>
inline void share_product(samewise::ThreadPool &pool, int64_t panels, int64_t bytes, int64_t num_rows,
                          const Work &work) {
  const int64_t together = num_rows <= kFewRows ? 1 : kTogether;
  const int64_t groups = (panels + together - 1) / together;
  const int64_t wanted = round_up(bytes / kUnitBytes + 1, pool.size());
  const int64_t panel_units = std::min(wanted, groups);
  const int64_t row_units = (num_rows + kUnitRows - 1) / kUnitRows;
  const int64_t unit_rows = round_up((num_rows + row_units - 1) / row_units, kTileRowsOfAll);
  pool.for_each(panel_units * row_units, [&](int64_t unit) {
    const int64_t first_row = unit / panel_units * unit_rows, panel_unit = unit % panel_units;
    const int64_t end_row = std::min(first_row + unit_rows, num_rows);
    const int64_t first_panel = panel_unit * groups / panel_units * together;
    const int64_t end_panel = std::min((panel_unit + 1) * groups / panel_units * together, panels);
    work(first_row, end_row, first_panel, end_panel);
  });
}

// Size of a linear's packed weights.
inline int64_t packed_bytes(const SwWeight &weight) {
  int64_t bytes = 0;
  for (const SwWeight *part = &weight; part; part = part->next)
    with_panels(part->kind, [&](auto panels) { bytes += num_panels(*part) * panels.panel_bytes(part->inputs); });
  return bytes;
}

// Multiplies all rows with all parts of a linear, shared between the threads.
inline void multiply_rows(samewise::ThreadPool &pool, const SwWeight &weight, const QuantizedRows &rows,
                          int64_t num_rows, const Emit &emit) {
  share_product(pool, panels_of_all(weight), packed_bytes(weight), num_rows,
                [&](int64_t first_row, int64_t end_row, int64_t first_panel, int64_t end_panel) {
                  multiply_unit(weight, rows, first_row, end_row, first_panel, end_panel, emit);
                });
}

// ---------------------------------------------------------------------------------------------------------------------
// The activation of a gated MLP.

inline Vec silu(Vec x) { return x / (exp(-x) + 1.0f); }

inline Vec gelu_tanh(Vec x) {
  const Vec inner = 0.7978845608f * fma(x * x * x, broadcast(0.044715f), x);
  return 0.5f * x * (tanh(inner) + 1.0f);
}

// x[i] *= sigmoid(gate[i]).
inline void multiply_by_sigmoid(float *x, const float *gate, int64_t n) {
  transform(x, n, [](Vec x, Vec gate) { return x / (exp(-gate) + 1.0f); }, x, gate);
}

// Activates the row of an MLP: x[i] = max(x[i], 0)^2 for SW_RELU_SQUARED, where NaN stays NaN; otherwise a row [2 * n],
// gate first: gate[i] = activation(gate[i]) * up[i].
inline void activate_row(int32_t activation, float *row, int64_t n) {
  const auto squared = [](Vec x) {
    const Vec positive = x < Vec{} ? Vec{} : x;
    return positive * positive;
  };
  if (activation == SW_RELU_SQUARED)
    transform(row, n, squared, row);
  else if (activation == SW_SILU)
    transform(row, n, [](Vec gate, Vec up) { return silu(gate) * up; }, row, row + n);
  else
    transform(row, n, [](Vec gate, Vec up) { return gelu_tanh(gate) * up; }, row, row + n);
}

// Activates a row [2 * n] as SW_CLAMPED_SILU does. NaN stays NaN.
inline void gate_clamped_row(float alpha, float limit, float *row, int64_t n) {
  const auto clamped = [=](Vec gate, Vec up) {
    const Vec high = broadcast(limit), low = broadcast(-limit);
    gate = gate > high ? high : gate;
    up = up > high ? high : up < low ? low : up;
    return (up + 1.0f) * gate / (exp(gate * -alpha) + 1.0f);
  };
  transform(row, n, clamped, row, row + n);
}

}  // namespace SW_ISA
