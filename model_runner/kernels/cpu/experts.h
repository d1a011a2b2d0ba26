// A mixture of experts on all rows of a step, as SwExperts describes.
//
// Rows are sorted by expert, so that an expert's weights are read once for all its rows. The products of all experts
// are divided into units that the threads share. A row's products do not depend on other rows, and its experts' outputs
// are added in the order of its ranks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "quantized_rows.h"
#include "rounding.h"
#include "rows.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

// ---------------------------------------------------------------------------------------------------------------------
// Routing: which experts a row goes to, and with which weights.
//
// Scores are computed in float32. Each is a sum over the row's inputs in four chains, input i in chain i mod 4, so it
// depends neither on other rows nor on the instruction set.

constexpr int kRouterPanel = 16;  // outputs that are interleaved in the router's weight
constexpr int kRouterRows = kWidth == 16 ? 4 : 1;

inline int64_t router_inputs(const SwExperts &experts) {
  return experts.latent_input.outputs ? experts.latent_input.inputs : experts.gate_up[0].inputs;
}

inline int64_t router_outputs(const SwExperts &experts) {
  return round_up(experts.num_experts + (experts.gates_mlp ? 1 : 0), kRouterPanel);
}

// scores[Rows, scores_stride] = 16 outputs of the router for x[Rows, stride].
template <int Rows>
inline void route(const float *x, int64_t stride, int64_t hidden, const float *panel, float *scores,
                  int64_t scores_stride) {
  constexpr int kChains = 4, kParts = kRouterPanel / kWidth;
  Vec sums[Rows][kChains][kParts] = {};
  const auto add = [&](int chain, int64_t input) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const Vec weights = load(panel + input * kRouterPanel + part * kWidth);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r)
        sums[r][chain][part] = fma(broadcast(x[r * stride + input]), weights, sums[r][chain][part]);
    }
  };
  int64_t input = 0;
  for (; input + kChains <= hidden; input += kChains)
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) add(chain, input + chain);
  if (input < hidden) add(0, input);
  if (input + 1 < hidden) add(1, input + 1);
  if (input + 2 < hidden) add(2, input + 2);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const Vec *chains[] = {&sums[r][0][part], &sums[r][1][part], &sums[r][2][part], &sums[r][3][part]};
      store(scores + r * scores_stride + part * kWidth, (*chains[0] + *chains[1]) + (*chains[2] + *chains[3]));
    }
}

inline Vec sigmoid(Vec x) { return 1.0f / (exp(-x) + 1.0f); }

inline bool contains(const int32_t *list, int count, int32_t x) {
  for (int i = 0; i < count; ++i)
    if (list[i] == x) return true;
  return false;
}

// The expert with the highest score that is not among the first `rank` chosen ones, the lowest index among equals. NaN
// is the highest, as in torch.topk.
inline int32_t next_choice(const SwExperts &experts, const float *scores, const int32_t *chosen, int rank) {
  int32_t best = -1;
  float highest = 0;
  for (int32_t expert = 0; expert < experts.num_experts; ++expert) {
    const float score = experts.choice_bias ? scores[expert] + experts.choice_bias[expert] : scores[expert];
    if (best >= 0 && (highest != highest || score <= highest)) continue;
    if (contains(chosen, rank, expert)) continue;
    best = expert;
    highest = score;
  }
  return best;
}

// Computes a row's chosen[top_k], weights[top_k, padded to 16] and the factor on its MLP. Overwrites the scores.
inline void choose(const SwExperts &experts, float *scores, int32_t *chosen, float *weights, float *mlp_factor) {
  const int64_t outputs = router_outputs(experts);
  const int32_t count = experts.num_experts, top_k = experts.top_k;
  if (experts.router_bias)
    transform(scores, outputs, [](Vec score, Vec bias) { return score + bias; }, scores, experts.router_bias);
  if (experts.gates_mlp) {
    *mlp_factor = sigmoid(broadcast(scores[count]))[0];
  }
  const bool is_softmax = experts.scoring == SW_SOFTMAX;
  if (!is_softmax) transform(scores, outputs, sigmoid, scores);
  for (int rank = 0; rank < top_k; ++rank) chosen[rank] = next_choice(experts, scores, chosen, rank);
  const int64_t padded = round_up(top_k, kRouterPanel);
  for (int64_t rank = 0; rank < padded; ++rank) weights[rank] = scores[chosen[std::min<int64_t>(rank, top_k - 1)]];
  float total = experts.sum_eps;
  if (is_softmax) {
    const auto relative = [highest = scores[chosen[0]]](Vec score) { return exp_not_positive(score - highest); };
    transform(weights, padded, relative, weights);
    if (!experts.normalised) {
      std::fill(scores + count, scores + outputs, scores[chosen[0]]);
      transform(scores, outputs, relative, scores);
      for (int32_t i = 0; i < count; ++i) total += scores[i];
    }
  }
  if (experts.normalised)
    for (int32_t rank = 0; rank < top_k; ++rank) total += weights[rank];
  else if (!is_softmax)
    total = 1;
  for (int32_t rank = 0; rank < top_k; ++rank) weights[rank] = weights[rank] / total * experts.scale;
}

// ---------------------------------------------------------------------------------------------------------------------

// Scratch memory for a layer's experts. An assignment is a row and one of its ranks.
struct ExpertsScratch {
  float *scores;        // [rows, router_outputs]
  float *weights;       // [rows, weights_stride]
  float *mlp_factors;   // [rows]
  int32_t *chosen;      // [rows, top_k] experts
  int32_t *places;      // [rows, top_k] index of each assignment in the order sorted by expert
  int32_t *row_of;      // [assignments] sorted by expert
  int32_t *starts;      // [experts + 1] first assignment of each expert
  int32_t *next;        // [experts] index for the next assignment of each expert
  int64_t *unit_starts; // [experts + 1] first unit of each expert
  QuantizedRows rows;   // [assignments] inputs of the experts' linears
  float *results;       // [assignments, results_stride] gate and up; later the experts' outputs
  int64_t weights_stride;
  int64_t results_stride;

  static ExpertsScratch lay_out(const SwExperts &experts, int64_t num_rows, ScratchAllocator &take) {
    const int64_t hidden = experts.gate_up[0].inputs, intermediate = experts.down[0].inputs;
    const int64_t assignments = num_rows * experts.top_k;
    ExpertsScratch s{};
    s.weights_stride = round_up(experts.top_k, kRouterPanel);
    s.results_stride = round_up(std::max(outputs_of_all(experts.gate_up[0]), hidden), 16);
    take(s.scores, num_rows * router_outputs(experts));
    take(s.weights, num_rows * s.weights_stride);
    take(s.mlp_factors, num_rows);
    take(s.chosen, assignments);
    take(s.places, assignments);
    take(s.row_of, assignments);
    take(s.starts, experts.num_experts + 1);
    take(s.next, experts.num_experts);
    take(s.unit_starts, experts.num_experts + 1);
    s.rows = take_rows(take, std::max(hidden, intermediate), assignments);
    take(s.results, assignments * s.results_stride);
    return s;
  }
};

// Runs the experts on rows. Call route_rows or set_choices, then multiply, then add for each row.
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

  // Sets chosen[rows, top_k] and weights[rows, top_k] directly.
  void set_choices(const int32_t *chosen, const float *weights) {
    std::memcpy(scratch_.chosen, chosen, num_rows_ * experts_.top_k * sizeof(int32_t));
    for (int64_t row = 0; row < num_rows_; ++row)
      std::memcpy(this->weights(row), weights + row * experts_.top_k, experts_.top_k * sizeof(float));
  }

  // Applies the chosen experts to the rows or their latents, which are quantised for the experts' gate_up.
  void multiply(const QuantizedRows &rows) {
    sort();
    const int64_t assignments = num_rows_ * experts_.top_k, intermediate = experts_.down[0].inputs;
    each(assignments, [&](int64_t place) { copy_row(rows, scratch_.row_of[place], place); });
    multiply_all(experts_.gate_up);
    each(assignments, [&](int64_t place) {
      if (experts_.activation == SW_CLAMPED_SILU)
        gate_clamped_row(experts_.gate_alpha, experts_.gate_limit, result(place), intermediate);
      else
        activate_row(experts_.activation, result(place), intermediate);
      quantize_row(result(place), experts_.down[0], scratch_.rows, place);
    });
    multiply_all(experts_.down);
  }

  // to[hidden] = weighted sum of the experts' outputs for the row, plus mlp times its factor unless mlp is null. In
  // place if `to` is mlp.
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

  template <typename Work>
  void each(int64_t count, const Work &work) {
    for_rows(pool_, count, work, 4);
  }

  void route_panel(const float *x, int64_t stride, int64_t panel, int64_t first_row, int64_t end_row) const {
    const int64_t hidden = router_inputs(experts_), outputs = router_outputs(experts_);
    const float *weight = experts_.router + panel * kRouterPanel * hidden;
    float *scores = scratch_.scores + panel * kRouterPanel;
    int64_t row = first_row;
    for (; row + kRouterRows <= end_row; row += kRouterRows)
      route<kRouterRows>(x + row * stride, stride, hidden, weight, scores + row * outputs, outputs);
    for (; row < end_row; ++row) route<1>(x + row * stride, stride, hidden, weight, scores + row * outputs, outputs);
  }

  // Sorts the assignments by expert, and each expert's assignments by row.
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

  // results = each expert's rows times its weight. All weights have the same shape and kind.
  void multiply_all(const SwWeight *weights) {
    const int64_t panels = panels_of_all(weights[0]), groups = (panels + kTogether - 1) / kTogether;
    const auto row_units = [&](int64_t expert) {
      return (scratch_.starts[expert + 1] - scratch_.starts[expert] + kUnitRows - 1) / kUnitRows;
    };
    int64_t all_row_units = 0;
    for (int32_t expert = 0; expert < experts_.num_experts; ++expert) all_row_units += row_units(expert);
    const int64_t for_all_threads = (pool_.size() + all_row_units - 1) / all_row_units;
    const int64_t wanted = std::max(packed_bytes(weights[0]) / kUnitBytes, for_all_threads);
    const int64_t panel_units = std::clamp<int64_t>(wanted, 1, groups);
    int64_t *unit_starts = scratch_.unit_starts;
    unit_starts[0] = 0;
    for (int32_t expert = 0; expert < experts_.num_experts; ++expert)
      unit_starts[expert + 1] = unit_starts[expert] + row_units(expert) * panel_units;
    const Store store{scratch_.results, scratch_.results_stride};
    pool_.for_each(unit_starts[experts_.num_experts], [&](int64_t unit) {
      const int64_t *after = std::upper_bound(unit_starts, unit_starts + experts_.num_experts + 1, unit);
      const int64_t expert = after - unit_starts - 1;
      const int64_t row_unit = (unit - unit_starts[expert]) / panel_units;
      const int64_t panel_unit = (unit - unit_starts[expert]) % panel_units;
      const int64_t first_row = scratch_.starts[expert] + row_unit * kUnitRows;
      const int64_t end_row = std::min<int64_t>(first_row + kUnitRows, scratch_.starts[expert + 1]);
      const int64_t first_panel = panel_unit * groups / panel_units * kTogether;
      const int64_t end_panel = std::min((panel_unit + 1) * groups / panel_units * kTogether, panels);
      multiply_unit(weights[expert], scratch_.rows, first_row, end_row, first_panel, end_panel, store);
    });
  }

  samewise::ThreadPool &pool_;
  const SwExperts &experts_;
  const int64_t num_rows_;
  const ExpertsScratch &scratch_;
};

}  // namespace SW_ISA
