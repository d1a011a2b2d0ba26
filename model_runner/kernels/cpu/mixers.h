// The recurrent mixers of decoder layers, in the place of their attention.
#pragma once
#include <cstdint>

#include "convolution.h"
#include "gated_delta_net.h"
#include "mamba2.h"
#include "rows.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

// Width of a recurrent mixer's output; 0 without one.
inline int64_t recurrent_width(const SwDecoderLayer &layer) {
  const auto width = [](const SwRecurrence &shape) { return int64_t{shape.heads} * shape.value_dim; };
  if (layer.delta_net) return width(layer.delta_net->recurrence);
  if (layer.mamba2) return width(layer.mamba2->recurrence);
  return layer.short_convolution ? layer.short_convolution->channels : 0;
}

// Width of the attention's output; 0 without attention.
inline int64_t attention_width(const SwDecoderLayer &layer) {
  return int64_t{layer.attention.heads} * layer.cache.value_dim;
}

// Outputs of mixer_input for queries, keys and values; 0 without attention.
inline int64_t qkv_width(const SwDecoderLayer &layer) {
  const SwKvCache &cache = layer.cache;
  const int64_t heads = layer.attention.heads, kv_heads = cache.kv_heads;
  return heads ? (heads + kv_heads) * cache.key_dim + kv_heads * cache.value_dim : 0;
}

// The first output of mixer_input for a recurrent mixer.
inline int64_t recurrent_start(const SwDecoderLayer &layer) {
  return qkv_width(layer) + (layer.gates_attention ? attention_width(layer) : 0);
}

// Rows whose numbers are `stride` apart from token to token.
struct Rows {
  float *numbers;
  int64_t stride;
};

// output = the recurrent mixer of input, whose rows have the outputs of mixer_input.
class MixerRun {
 public:
  MixerRun(samewise::ThreadPool &pool, const SwDecoderLayer &layer, const SwStatePlan &plan)
      : pool_(pool), layer_(layer), plan_(plan) {}

  static int64_t scratch_size(const SwDecoderLayer &layer, int64_t tokens) {
    if (layer.delta_net) return GatedDeltaNetRun::scratch_size(*layer.delta_net, tokens);
    if (layer.mamba2) return Mamba2Run::scratch_size(*layer.mamba2, tokens);
    return layer.short_convolution ? 2 * tokens * layer.short_convolution->channels : 0;
  }

  void run(const Rows &input, const Rows &output, float *scratch) const {
    if (layer_.delta_net)
      GatedDeltaNetRun(pool_, *layer_.delta_net, plan_)
          .run(input.numbers, input.stride, output.numbers, output.stride, scratch);
    else if (layer_.mamba2)
      Mamba2Run(pool_, *layer_.mamba2, plan_)
          .run(input.numbers, input.stride, output.numbers, output.stride, scratch);
    else
      run_convolution(*layer_.short_convolution, input, output, scratch);
  }

 private:
  void run_convolution(const SwConvolution &layer, const Rows &input, const Rows &output, float *scratch) const {
    const int64_t channels = layer.channels;
    float *convolved = scratch + plan_.num_tokens * channels;
    for_rows(pool_, plan_.num_tokens, [&](int64_t token) {
      const float *b = input.numbers + token * input.stride;
      multiply_numbers(b, b + 2 * channels, channels, scratch + token * channels);
    });
    convolve(pool_, layer, plan_, scratch, channels, convolved);
    for_rows(pool_, plan_.num_tokens, [&](int64_t token) {
      const float *c = input.numbers + token * input.stride + channels;
      multiply_numbers(c, convolved + token * channels, channels, output.numbers + token * output.stride);
    });
  }

  static void multiply_numbers(const float *x, const float *y, int64_t n, float *product) {
    transform(product, n, [](Vec a, Vec b) { return a * b; }, x, y);
  }

  samewise::ThreadPool &pool_;
  const SwDecoderLayer &layer_;
  const SwStatePlan &plan_;
};

}  // namespace SW_ISA
