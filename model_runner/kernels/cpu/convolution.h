// Causal depthwise convolutions by rows and pages: y_p = bias + sum over i of w_i x_(p - kernel + 1 + i), per channel.
//
// The earlier inputs of a token are rows on its path, or in the page of its choice's anchor (recurrence/plan.py).
#pragma once
#include <algorithm>

#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kSlice = 256;      // channels of a unit
constexpr int kMostInputs = 33;  // of an output

// Some channels of a convolution, for all tokens of a step.
class ConvolutionSlice {
 public:
  ConvolutionSlice(const SwConvolution &layer, const SwStatePlan &plan, int64_t first)
      : layer_(layer), plan_(plan), first_(first), count_(std::min<int64_t>(kSlice, layer.channels - first)) {
    for (int64_t channel = 0; channel < count_; ++channel)
      for (int64_t tap = 0; tap < layer.kernel; ++tap)
        weights_[tap][channel] = layer.weight[(first + channel) * layer.kernel + tap];
  }

  void run(const float *x, float *output) const {
    for (int64_t token = 0; token < plan_.num_tokens; ++token)
      std::memcpy(row(plan_.slots[token]), x + token * layer_.channels + first_, count_ * sizeof(float));
    for (int64_t token = 0; token < plan_.num_tokens; ++token) convolve(token, x, output);
    const int64_t reach = layer_.kernel - 1;
    for (int64_t i = 0; i < plan_.num_written; ++i)
      for (int64_t tap = 0; tap < reach; ++tap)
        std::memcpy(last(plan_.written_pages[i] * reach + tap),
                    row(plan_.written_blocks[i] * kRowsOfBlock + kRowsOfBlock - reach + tap), count_ * sizeof(float));
  }

 private:
  static constexpr int kRowsOfBlock = 32;

  float *row(int64_t slot) const {
    return layer_.inputs + slot / kRowsOfBlock * layer_.rows_stride + slot % kRowsOfBlock * layer_.channels + first_;
  }

  float *last(int64_t index) const {
    const int64_t reach = layer_.kernel - 1;
    return layer_.last + index / reach * layer_.page_stride + index % reach * layer_.channels + first_;
  }

  void convolve(int64_t token, const float *x, float *output) const {
    const float *inputs[kMostInputs];
    const int64_t reach = layer_.kernel - 1;
    for (int64_t tap = 0; tap < reach; ++tap) {
      const int32_t source = layer_.sources[token * reach + tap];
      inputs[tap] = source >= 0 ? row(source) : source == -1 ? nullptr : last(-2 - int64_t{source});
    }
    inputs[reach] = x + token * layer_.channels + first_;
    float *to = output + token * layer_.channels + first_;
    for (int64_t channel = 0; channel < count_; channel += kWidth) {
      const int64_t lanes = std::min<int64_t>(kWidth, count_ - channel);
      Vec sum = layer_.bias ? some(layer_.bias + first_ + channel, lanes) : Vec{};
      for (int64_t tap = 0; tap <= reach; ++tap)
        if (inputs[tap]) sum = fma(load(weights_[tap] + channel), some(inputs[tap] + channel, lanes), sum);
      if (layer_.silu) sum = sum / (exp(-sum) + 1.0f);
      std::memcpy(to + channel, &sum, lanes * sizeof(float));
    }
  }

  static Vec some(const float *from, int64_t lanes) {
    if (lanes == kWidth) return load(from);
    Vec v{};
    std::memcpy(&v, from, lanes * sizeof(float));
    return v;
  }

  const SwConvolution &layer_;
  const SwStatePlan &plan_;
  const int64_t first_, count_;
  float weights_[kMostInputs][kSlice] = {};
};

// Writes rows, computes outputs, and writes pages: x and output are [T, channels].
inline void convolve(samewise::ThreadPool &pool, const SwConvolution &layer, const SwStatePlan &plan, const float *x,
                     float *output) {
  pool.for_each((layer.channels + kSlice - 1) / kSlice,
                [&](int64_t slice) { ConvolutionSlice(layer, plan, slice * kSlice).run(x, output); });
}

}  // namespace SW_ISA
