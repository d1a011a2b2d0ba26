// A mixture of experts on all rows of a step: see SwExperts.
//
// Rows are sorted by expert, so that an expert's weights are read once for all rows that go to it, and the products of
// all experts are cut into units that the threads share. A row's products know no other row, and what its experts made
// of it is added up in the order of its ranks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gated.h"
#include "linear.h"
#include "memory.h"
#include "quantized_rows.h"
#include "router.h"
#include "samewise.h"
#include "simd.h"
#include "threads.h"

namespace SW_ISA {

// Scratch memory for the experts of a layer; an assignment is a row and one of its ranks.
struct ExpertsScratch {
  float *scores;        // [rows, router_outputs]
  float *weights;       // [rows, weights_stride]
  float *mlp_factors;   // [rows]
  int32_t *chosen;      // [rows, top_k] experts
  int32_t *places;      // [rows, top_k] where each assignment stands when they are sorted by expert
  int32_t *row_of;      // [assignments] sorted by expert
  int32_t *starts;      // [experts + 1] where the assignments of each expert begin
  int32_t *next;        // [experts] where the next assignment goes
  int64_t *unit_starts; // [experts + 1] where the units of each expert begin
  QuantizedRows rows;   // [assignments] inputs of the experts' linears
  float *results;       // [assignments, results_stride] gate and up; later what the experts make of the rows
  int64_t weights_stride;
  int64_t results_stride;

  static ExpertsScratch lay_out(const SwExperts &experts, int64_t num_rows, Memory &take) {
    const auto floats = [&](int64_t count) { return reinterpret_cast<float *>(take(count * sizeof(float))); };
    const auto integers = [&](int64_t count) { return reinterpret_cast<int32_t *>(take(count * sizeof(int32_t))); };
    const int64_t hidden = experts.gate_up[0].inputs, intermediate = experts.down[0].inputs;
    const int64_t assignments = num_rows * experts.top_k, widest = std::max(hidden, intermediate);
    ExpertsScratch s{};
    s.weights_stride = round_up(experts.top_k, kRouterPanel);
    s.results_stride = round_up(std::max(2 * intermediate, hidden), 16);
    s.scores = floats(num_rows * router_outputs(experts));
    s.weights = floats(num_rows * s.weights_stride);
    s.mlp_factors = floats(num_rows);
    s.chosen = integers(assignments);
    s.places = integers(assignments);
    s.row_of = integers(assignments);
    s.starts = integers(experts.num_experts + 1);
    s.next = integers(experts.num_experts);
    s.unit_starts = reinterpret_cast<int64_t *>(take((experts.num_experts + 1) * sizeof(int64_t)));
    char *data = take(assignments * row_bytes(widest));
    s.rows = lay_out_rows(widest, data, floats(assignments));
    s.results = floats(assignments * s.results_stride);
    return s;
  }
};

// Runs the experts on rows: route, or set_choices; multiply; then add for each row.
class ExpertsRun {
 public:
  ExpertsRun(samewise::ThreadPool &pool, const SwExperts &experts, int64_t num_rows, const ExpertsScratch &scratch)
      : pool_(pool), experts_(experts), num_rows_(num_rows), scratch_(scratch) {}

  // Chooses the experts of rows x[rows, stride].
  void route_rows(const float *x, int64_t stride) {
    constexpr int64_t kUnitRows = 16;
    const int64_t panels = router_outputs(experts_) / kRouterPanel;
    pool_.for_each(panels * ((num_rows_ + kUnitRows - 1) / kUnitRows), [&](int64_t unit) {
      const int64_t first = unit / panels * kUnitRows;
      route_panel(x, stride, unit % panels, first, std::min(first + kUnitRows, num_rows_));
    });
    each(num_rows_, [&](int64_t row) {
      choose(experts_, scratch_.scores + row * router_outputs(experts_), scratch_.chosen + row * experts_.top_k,
             weights(row), scratch_.mlp_factors + row);
    });
  }

  // Takes chosen[rows, top_k] and weights[rows, top_k] from elsewhere.
  void set_choices(const int32_t *chosen, const float *weights) {
    std::memcpy(scratch_.chosen, chosen, num_rows_ * experts_.top_k * sizeof(int32_t));
    for (int64_t row = 0; row < num_rows_; ++row)
      std::memcpy(this->weights(row), weights + row * experts_.top_k, experts_.top_k * sizeof(float));
  }

  // Applies the chosen experts to the rows, which are quantised for a gate_up of them.
  void multiply(const QuantizedRows &rows) {
    sort();
    const int64_t assignments = num_rows_ * experts_.top_k, intermediate = experts_.down[0].inputs;
    each(assignments, [&](int64_t place) { copy_row(rows, scratch_.row_of[place], place); });
    multiply_all(experts_.gate_up);
    each(assignments, [&](int64_t place) {
      gate_row(experts_.activation, result(place), intermediate);
      quantize_row(result(place), experts_.down[0], scratch_.rows, place);
    });
    multiply_all(experts_.down);
  }

  // to[hidden] = the weighted sum of what the row's experts made of it, plus, unless mlp is null, that times its factor.
  // In place if `to` is mlp.
  void add(int64_t row, const float *mlp, float *to) const {
    const int64_t hidden = experts_.gate_up[0].inputs;
    const int32_t *places = scratch_.places + row * experts_.top_k;
    const float factor = experts_.gates_mlp ? scratch_.mlp_factors[row] : 1.0f;
    int64_t i = 0;
    for (; i + kWidth <= hidden; i += kWidth) {
      Vec sum{};
      for (int rank = 0; rank < experts_.top_k; ++rank) sum += load(result(places[rank]) + i) * weights(row)[rank];
      if (mlp) sum += load(mlp + i) * factor;
      store(to + i, sum);
    }
    for (; i < hidden; ++i) {
      float sum = 0;
      for (int rank = 0; rank < experts_.top_k; ++rank) sum += result(places[rank])[i] * weights(row)[rank];
      if (mlp) sum += mlp[i] * factor;
      to[i] = sum;
    }
  }

 private:
  float *weights(int64_t row) const { return scratch_.weights + row * scratch_.weights_stride; }
  float *result(int64_t place) const { return scratch_.results + place * scratch_.results_stride; }

  // Calls work(i) for each i below count; what is too little to share is done here.
  template <typename Work>
  void each(int64_t count, const Work &work) {
    constexpr int64_t kLeast = 4;
    const int64_t at_once = std::max(kLeast, count / (8 * pool_.size()) + 1);
    pool_.for_each((count + at_once - 1) / at_once, [&](int64_t unit) {
      for (int64_t i = unit * at_once; i < std::min(count, (unit + 1) * at_once); ++i) work(i);
    });
  }

  void route_panel(const float *x, int64_t stride, int64_t panel, int64_t first_row, int64_t end_row) const {
    const int64_t hidden = experts_.gate_up[0].inputs, outputs = router_outputs(experts_);
    const float *weight = experts_.router + panel * kRouterPanel * hidden;
    float *scores = scratch_.scores + panel * kRouterPanel;
    int64_t row = first_row;
    for (; row + kRouterRows <= end_row; row += kRouterRows)
      route<kRouterRows>(x + row * stride, stride, hidden, weight, scores + row * outputs, outputs);
    for (; row < end_row; ++row) route<1>(x + row * stride, stride, hidden, weight, scores + row * outputs, outputs);
  }

  // Sorts the assignments by expert, those of an expert by row.
  void sort() {
    const int64_t assignments = num_rows_ * experts_.top_k;
    int32_t *starts = scratch_.starts, *next = scratch_.next;
    std::fill(starts, starts + experts_.num_experts + 1, 0);
    for (int64_t i = 0; i < assignments; ++i) ++starts[scratch_.chosen[i] + 1];
    for (int32_t expert = 0; expert < experts_.num_experts; ++expert) {
      starts[expert + 1] += starts[expert];
      next[expert] = starts[expert];
    }
    for (int64_t i = 0; i < assignments; ++i) {
      const int32_t place = next[scratch_.chosen[i]]++;
      scratch_.places[i] = place;
      scratch_.row_of[place] = static_cast<int32_t>(i / experts_.top_k);
    }
  }

  void copy_row(const QuantizedRows &from, int64_t row, int64_t place) const {
    const int64_t inputs = experts_.gate_up[0].inputs, sum_bytes = row_bytes(inputs) - integer_bytes(inputs);
    const QuantizedRows &to = scratch_.rows;
    const char *source = from.data + row * from.stride;
    char *target = to.data + place * to.stride;
    std::memcpy(target, source, integer_bytes(inputs));
    std::memcpy(target + to.sums_at, source + from.sums_at, sum_bytes);
    to.scales[place] = from.scales[row];
  }

  // results = each expert's rows times its weight. All weights are of one shape and kind.
  void multiply_all(const SwWeight *weights) {
    constexpr int64_t kUnitRows = 120, kUnitWeights = 131072;  // as in multiply_panels
    constexpr int64_t kTogether = 3;  // panels that a unit does not separate
    const int64_t panels = num_panels(weights[0].outputs), groups = (panels + kTogether - 1) / kTogether;
    const int64_t wanted = panels * kPanel * weights[0].inputs / kUnitWeights;
    const int64_t panel_units = std::clamp<int64_t>(wanted, 1, groups);
    int64_t *unit_starts = scratch_.unit_starts;
    unit_starts[0] = 0;
    for (int32_t expert = 0; expert < experts_.num_experts; ++expert) {
      const int64_t rows = scratch_.starts[expert + 1] - scratch_.starts[expert];
      unit_starts[expert + 1] = unit_starts[expert] + (rows + kUnitRows - 1) / kUnitRows * panel_units;
    }
    pool_.for_each(unit_starts[experts_.num_experts], [&](int64_t unit) {
      const int64_t *after = std::upper_bound(unit_starts, unit_starts + experts_.num_experts + 1, unit);
      const int64_t expert = after - unit_starts - 1;
      const int64_t row_unit = (unit - unit_starts[expert]) / panel_units;
      const int64_t panel_unit = (unit - unit_starts[expert]) % panel_units;
      const int64_t first_row = scratch_.starts[expert] + row_unit * kUnitRows;
      const int64_t end_row = std::min<int64_t>(first_row + kUnitRows, scratch_.starts[expert + 1]);
      const int64_t first_panel = panel_unit * groups / panel_units * kTogether;
      const int64_t end_panel = std::min((panel_unit + 1) * groups / panel_units * kTogether, panels);
      multiply_unit(weights[expert], scratch_.rows, first_row, end_row, first_panel, end_panel,
                    [&](int64_t place, int64_t first, int64_t count, const float *results) {
                      std::memcpy(result(place) + first, results, count * sizeof(float));
                    });
    });
  }

  samewise::ThreadPool &pool_;
  const SwExperts &experts_;
  const int64_t num_rows_;
  const ExpertsScratch &scratch_;
};

}  // namespace SW_ISA
