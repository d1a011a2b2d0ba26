// Causal depthwise convolutions by rows and pages: y_p = bias + sum over i of w_i x_(p - kernel + 1 + i), per channel.
//
// The earlier inputs of a token are rows on its path, or in the page of its choice's anchor (recurrence/plan.py).
#pragma once
#include <algorithm>

#include "rows.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kSlice = 2048;     // channels of a unit
constexpr int kMostInputs = 33;  // of an output
constexpr int kRowsOfBlock = 32;

// A causal convolution on a step's tokens.
class ConvolutionRun {
 public:
  ConvolutionRun(samewise::ThreadPool &pool, const SwConvolution &layer, const SwStatePlan &plan)
      : pool_(pool), layer_(layer), plan_(plan), channels_(layer.channels), reach_(layer.kernel - 1),
        sources_(plan.sources[layer.kernel]) {}

  // x is [T, channels] with `stride` numbers from token to token, output is [T, channels].
  void run(const float *x, int64_t stride, float *output) const {
    const int64_t slices = (channels_ + kSlice - 1) / kSlice;
    pool_.for_each(plan_.num_tokens * slices, [&](int64_t unit) {
      const int64_t token = unit / slices, first = unit % slices * kSlice;
      const int64_t count = std::min<int64_t>(kSlice, channels_ - first);
      std::memcpy(row(plan_.slots[token]) + first, x + token * stride + first, count * sizeof(float));
      convolve(token, first, count, x, stride, output + token * channels_ + first);
    });
    for (int64_t i = 0; i < plan_.num_written * reach_; ++i)
      std::memcpy(last(plan_.written_pages[i / reach_] * reach_ + i % reach_),
                  row(plan_.written_blocks[i / reach_] * kRowsOfBlock + kRowsOfBlock - reach_ + i % reach_),
                  channels_ * sizeof(float));
  }

 private:
  float *row(int64_t slot) const {
    return rows_of_block(layer_.inputs, slot / kRowsOfBlock) + slot % kRowsOfBlock * channels_;
  }

  float *last(int64_t index) const {
    return layer_.last + index / reach_ * layer_.page_stride + index % reach_ * channels_;
  }

  // Inputs that are tokens of the step are read from x, for other threads may be writing their rows.
  void convolve(int64_t token, int64_t first, int64_t count, const float *x, int64_t stride, float *output) const {
    const float *inputs[kMostInputs], *weights[kMostInputs];
    int taps = 0;
    for (int64_t tap = 0; tap <= reach_; ++tap) {
      const int64_t source = tap < reach_ ? sources_[token * reach_ + tap] : 2 * token + 1;
      if (source == -1) continue;
      const float *from = source < 0 ? last(-2 - source) : source % 2 ? x + source / 2 * stride : row(source / 2);
      inputs[taps] = from + first;
      weights[taps++] = layer_.weight + tap * channels_ + first;
    }
    const float *bias = layer_.bias ? layer_.bias + first : nullptr;
    int64_t channel = 0;
    for (; channel + kWidth <= count; channel += kWidth) {
      Vec sum = bias ? load(bias + channel) : Vec{};
      for (int tap = 0; tap < taps; ++tap) sum = fma(load(weights[tap] + channel), load(inputs[tap] + channel), sum);
      store(output + channel, activated(sum));
    }
    for (; channel < count; ++channel) {
      float sum = bias ? bias[channel] : 0.0f;
      for (int tap = 0; tap < taps; ++tap) sum = fma(weights[tap][channel], inputs[tap][channel], sum);
      output[channel] = activated(broadcast(sum))[0];
    }
  }

  Vec activated(Vec x) const { return layer_.silu ? x / (exp(-x) + 1.0f) : x; }

  samewise::ThreadPool &pool_;
  const SwConvolution &layer_;
  const SwStatePlan &plan_;
  const int64_t channels_, reach_;
  const int32_t *sources_;
};

// Writes rows, computes outputs, and writes pages: x is [T, channels] with `stride` numbers from token to token, output
// [T, channels].
inline void convolve(samewise::ThreadPool &pool, const SwConvolution &layer, const SwStatePlan &plan, const float *x,
                     int64_t stride, float *output) {
  ConvolutionRun(pool, layer, plan).run(x, stride, output);
}

}  // namespace SW_ISA
