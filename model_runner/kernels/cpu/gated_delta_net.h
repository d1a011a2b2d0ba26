// A gated delta net between its projections, as Qwen3.5 and Qwen3-Next have it: convolution with SiLU, L2 norms of
// queries and keys, gates, recurrence, and a norm that is gated by SiLU.
#pragma once
#include <cmath>

#include "convolution.h"
#include "double_math.h"
#include "linear.h"
#include "recurrence.h"
#include "rows.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr float kL2Eps = 1e-6f;

// x = factor x / sqrt(sum of squares + eps).
inline void l2_norm(float *x, float factor, int64_t n) {
  const float scale = factor / std::sqrt(sum_of_squares(x, n) + kL2Eps);
  transform(x, n, [=](Vec v) { return v * scale; }, x);
}

// Runs the layer on a step's rows.
class GatedDeltaNetRun {
 public:
  GatedDeltaNetRun(samewise::ThreadPool &pool, const SwGatedDeltaNet &layer, const SwStatePlan &plan)
      : pool_(pool), layer_(layer), plan_(plan), channels_(layer.convolution.channels),
        heads_(layer.recurrence.heads) {}

  // Numbers of scratch memory for the run.
  static int64_t scratch_size(const SwGatedDeltaNet &layer, int64_t tokens) {
    return tokens * (layer.convolution.channels + 2 * layer.recurrence.heads);
  }

  // input is [T, qkv, z, b, a], output [T, heads, value_dim], with strides from token to token.
  void run(const float *input, int64_t input_stride, float *output, int64_t stride, float *scratch) {
    const SwRecurrence &shape = layer_.recurrence;
    const int64_t tokens = plan_.num_tokens, keys = int64_t{shape.key_heads} * shape.key_dim;
    float *rows = scratch, *gains = rows + tokens * channels_, *decays = gains + tokens * heads_;
    convolve(pool_, layer_.convolution, plan_, input, input_stride, rows);
    for_rows(pool_, tokens, [&](int64_t token) {
      float *row = rows + token * channels_;
      for (int64_t head = 0; head < shape.key_heads; ++head) {
        l2_norm(row + head * shape.key_dim, 1.0f / std::sqrt(static_cast<float>(shape.key_dim)), shape.key_dim);
        l2_norm(row + keys + head * shape.key_dim, 1.0f, shape.key_dim);
      }
      const float *beta = input + token * input_stride + channels_ + heads_ * shape.value_dim;
      set_gates(beta, beta + heads_, gains + token * heads_, decays + token * heads_);
    });
    recur(pool_, shape, plan_, {rows, rows + keys, rows + 2 * keys, channels_, channels_, gains, output, stride},
          decays);
    for_rows(pool_, tokens * heads_, [&](int64_t row) {
      const int64_t token = row / heads_, start = row % heads_ * shape.value_dim;
      const float *z = input + token * input_stride + channels_;
      norm_and_gate(output + token * stride + start, z + start, shape.value_dim);
    });
  }

 private:
  void set_gates(const float *beta, const float *decay, float *gains, float *log_decays) const {
    for (int64_t head = 0; head < heads_; ++head) {
      gains[head] = (layer_.gain / (exp(broadcast(-beta[head])) + 1.0f))[0];
      log_decays[head] = layer_.decay_factor[head] * softplus(decay[head] + layer_.decay_bias[head]);
    }
  }

  void norm_and_gate(float *x, const float *gate, int64_t n) const {
    rms_norm(x, layer_.norm, layer_.norm_eps, n, x);
    transform(x, n, [](Vec x, Vec gate) { return x * silu(gate); }, x, gate);
  }

  samewise::ThreadPool &pool_;
  const SwGatedDeltaNet &layer_;
  const SwStatePlan &plan_;
  const int64_t channels_, heads_;
};

}  // namespace SW_ISA
