// Which experts a row goes to, and with what weights: see SwExperts.
//
// Scores are computed in float32. Each is a sum over the row's inputs in four chains, input i in chain i mod 4, so it
// depends neither on other rows nor on the instruction set.
#pragma once
#include <algorithm>
#include <cstdint>

#include "rounding.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kRouterPanel = 16;  // outputs that the router's weight has side by side
constexpr int kRouterRows = kWidth == 16 ? 4 : 1;

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

// The expert with the highest score of those that are not among the first `rank` chosen ones, the lowest among equals;
// NaN is the highest, as for torch.topk.
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

// chosen[top_k] and weights[top_k, padded to 16] of a row, and the factor on its MLP, from its scores, which are used
// up.
inline void choose(const SwExperts &experts, float *scores, int32_t *chosen, float *weights, float *mlp_factor) {
  const int64_t outputs = router_outputs(experts);
  const int32_t count = experts.num_experts, top_k = experts.top_k;
  if (experts.gates_mlp) {
    float gate[kWidth];
    store(gate, sigmoid(broadcast(scores[count])));
    *mlp_factor = gate[0];
  }
  const bool is_softmax = experts.scoring == SW_SOFTMAX;
  if (!is_softmax)
    for (int64_t i = 0; i < outputs; i += kWidth) store(scores + i, sigmoid(load(scores + i)));
  for (int rank = 0; rank < top_k; ++rank) chosen[rank] = next_choice(experts, scores, chosen, rank);
  const int64_t padded = round_up(top_k, kRouterPanel);
  for (int64_t rank = 0; rank < padded; ++rank) weights[rank] = scores[chosen[std::min<int64_t>(rank, top_k - 1)]];
  float total = is_softmax ? 0.0f : 1e-20f;  // all sigmoids may be 0
  if (is_softmax) {
    const Vec highest = broadcast(scores[chosen[0]]);
    for (int64_t i = 0; i < padded; i += kWidth) store(weights + i, exp_not_positive(load(weights + i) - highest));
    if (!experts.normalised) {
      std::fill(scores + count, scores + outputs, scores[chosen[0]]);
      for (int64_t i = 0; i < outputs; i += kWidth) store(scores + i, exp_not_positive(load(scores + i) - highest));
      for (int32_t i = 0; i < count; ++i) total += scores[i];
    }
  }
  if (experts.normalised)
    for (int32_t rank = 0; rank < top_k; ++rank) total += weights[rank];
  else if (!is_softmax)
    total = 1;
  for (int32_t rank = 0; rank < top_k; ++rank) weights[rank] = weights[rank] / total * experts.scale;
}

}  // namespace SW_ISA
