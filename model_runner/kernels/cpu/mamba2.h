// A Mamba 2 layer between its projections (Dao and Gu, arXiv:2405.21060): convolution with SiLU, steps, recurrence, a gate
// with SiLU and, if there is one, a norm by groups of what that lets through.
#pragma once
#include <algorithm>

#include "convolution.h"
#include "double_math.h"
#include "linear.h"
#include "recurrence.h"
#include "rows.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

// Runs the layer on a step's rows.
class Mamba2Run {
 public:
  Mamba2Run(samewise::ThreadPool &pool, const SwMamba2 &layer, const SwStatePlan &plan)
      : pool_(pool), layer_(layer), plan_(plan), channels_(layer.convolution.channels),
        heads_(layer.recurrence.heads), dim_(layer.recurrence.value_dim) {}

  // Numbers of scratch memory for the run.
  static int64_t scratch_size(const SwMamba2 &layer, int64_t tokens) {
    const SwRecurrence &shape = layer.recurrence;
    return tokens * (layer.convolution.channels + int64_t{shape.heads} * (shape.value_dim + 1));
  }

  // input is [T, gate, x, B, C, step], output [T, heads, value_dim], with strides from token to token.
  void run(const float *input, int64_t input_stride, float *output, int64_t stride, float *scratch) {
    const SwRecurrence &shape = layer_.recurrence;
    const int64_t tokens = plan_.num_tokens, width = heads_ * dim_;
    float *rows = scratch, *values = rows + tokens * channels_, *decays = values + tokens * width;
    convolve(pool_, layer_.convolution, plan_, input + width, input_stride, rows);
    for_rows(pool_, tokens, [&](int64_t token) {
      const float *step = input + token * input_stride + width + channels_;
      set_values(step, rows + token * channels_, values + token * width, decays + token * heads_);
    });
    const float *keys = rows + width, *queries = keys + int64_t{shape.key_heads} * shape.key_dim;
    recur(pool_, shape, plan_, {queries, keys, values, channels_, width, nullptr, output, stride}, decays);
    for_rows(pool_, tokens, [&](int64_t token) {
      finish(rows + token * channels_, input + token * input_stride, output + token * stride);
    });
  }

 private:
  // Values and logarithms of decays from a token's x [heads, value_dim] and steps [heads].
  void set_values(const float *steps, const float *x, float *values, float *log_decays) const {
    for (int64_t head = 0; head < heads_; ++head) {
      const float step = std::clamp(softplus(steps[head] + layer_.step_bias[head]), layer_.least_step, layer_.most_step);
      log_decays[head] = step * layer_.decay_factor[head];
      transform(values + head * dim_, dim_, [=](Vec v) { return v * step; }, x + head * dim_);
    }
  }

  // Adds x to a token's output y, gates it and norms it.
  void finish(const float *x, const float *gate, float *y) const {
    for (int64_t head = 0; head < heads_; ++head) {
      const auto gated = [skip = broadcast(layer_.skip[head])](Vec y, Vec x, Vec gate) {
        return fma(x, skip, y) * silu(gate);
      };
      const int64_t first = head * dim_;
      transform(y + first, dim_, gated, y + first, x + first, gate + first);
    }
    if (!layer_.norm) return;
    const int64_t size = heads_ * dim_ / layer_.norm_groups;
    for (int64_t start = 0; start < heads_ * dim_; start += size)
      rms_norm(y + start, layer_.norm + start, layer_.norm_eps, size, y + start);
  }

  samewise::ThreadPool &pool_;
  const SwMamba2 &layer_;
  const SwStatePlan &plan_;
  const int64_t channels_, heads_, dim_;
};

}  // namespace SW_ISA
