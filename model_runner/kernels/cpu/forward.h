// A whole forward pass: see SwModel and SwPass.
//
// A row's numbers depend on nothing but what the decoder layers let it see: not on which logits and hidden states are
// wanted beside its own.
#pragma once
#include <algorithm>
#include <cstring>

#include "decoder_layer.h"
#include "linear.h"
#include "samewise.h"
#include "simd.h"
#include "threads.h"

namespace SW_ISA {

// y = scale * x, or softcap * tanh(scale * x / softcap). Where a number stands does not matter.
inline void scale_logits(const float *x, float scale, float softcap, int64_t n, float *y) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t count = std::min<int64_t>(kWidth, n - i);
    float lanes[kWidth] = {};
    std::memcpy(lanes, x + i, count * sizeof(float));
    Vec scaled = load(lanes) * scale;
    if (softcap > 0) scaled = tanh(scaled / softcap) * softcap;
    store(lanes, scaled);
    std::memcpy(y + i, lanes, count * sizeof(float));
  }
}

// The scratch memory of a pass; the head's shares its place with the layers'.
struct PassScratch {
  float *hidden;         // [T, hidden] the residual stream
  char *of_layer;        // see Scratch
  float *normed;         // [num_logits, hidden]
  QuantizedRows wanted;  // the same, as the head takes them

  static int64_t lay_out(const SwModel &model, const SwStep &step, const SwPass &pass, char *memory,
                         PassScratch *scratch) {
    const auto padded = [](int64_t bytes) { return round_up(bytes, 64); };
    const int64_t inputs = model.head.inputs, rows = pass.num_logits;
    const int64_t hidden_bytes = padded(int64_t{step.num_tokens} * model.hidden * sizeof(float));
    const int64_t normed_bytes = padded(rows * model.hidden * sizeof(float));
    int64_t rest = normed_bytes + rows * row_bytes(inputs) + rows * sizeof(float);
    for (int32_t layer = 0; layer < model.num_layers; ++layer)
      rest = std::max(rest, Scratch::lay_out(*model.layers[layer], step.num_tokens, nullptr, nullptr));
    if (scratch) {
      char *behind = memory + hidden_bytes, *quantized = behind + normed_bytes;
      float *scales = reinterpret_cast<float *>(quantized + rows * row_bytes(inputs));
      *scratch = {reinterpret_cast<float *>(memory), behind, reinterpret_cast<float *>(behind),
                  lay_out_rows(inputs, quantized, scales)};
    }
    return hidden_bytes + rest;
  }
};

// Runs one pass of a model.
class ForwardRun {
 public:
  ForwardRun(samewise::ThreadPool &pool, const SwModel &model, const SwStep &step, const SwPass &pass,
             PassScratch scratch)
      : pool_(pool), model_(model), step_(step), pass_(pass), scratch_(scratch) {}

  void run() {
    float *stream = entering(0);
    embed(stream);
    for (int32_t index = 0; index < model_.num_layers; ++index) {
      float *next = entering(index + 1);
      run_layer(index, stream, next);
      stream = next;
    }
    if (pass_.last) norm_all(stream);
    if (pass_.num_logits) multiply_head(stream);
  }

 private:
  // Where what enters a layer, or leaves the last one, is kept. Layers run in place.
  float *entering(int32_t layer) const {
    const bool is_wanted = layer < model_.num_layers && pass_.entering && pass_.entering[layer];
    return is_wanted ? pass_.entering[layer] : scratch_.hidden;
  }

  void embed(float *stream) const {
    const int64_t hidden = model_.hidden;
    for_rows(pool_, step_.num_tokens, [&](int64_t row) {
      const float *from = model_.embedding + pass_.tokens[row] * hidden;
      for (int64_t i = 0; i < hidden; ++i) stream[row * hidden + i] = from[i] * model_.embedding_scale;
    });
  }

  void run_layer(int32_t index, const float *input, float *output) const {
    const SwDecoderLayer &layer = *model_.layers[index];
    Scratch scratch;
    Scratch::lay_out(layer, step_.num_tokens, scratch_.of_layer, &scratch);
    Rotation rotation{};
    if (const SwRotary *rotary = model_.rotaries[index]) rotation = {rotary->cos, rotary->sin, step_.positions};
    LayerRun(pool_, layer, step_, scratch).run(rotation, input, output);
  }

  void norm(const float *from, float *to) const { rms_norm(from, model_.norm, model_.norm_eps, model_.hidden, to); }

  void norm_all(const float *stream) const {
    for_rows(pool_, step_.num_tokens,
             [&](int64_t row) { norm(stream + row * model_.hidden, pass_.last + row * model_.hidden); });
  }

  void multiply_head(const float *stream) const {
    const SwWeight &head = model_.head;
    for_rows(pool_, pass_.num_logits, [&](int64_t row) {
      float *normed = scratch_.normed + row * model_.hidden;
      norm(stream + pass_.logits_index[row] * int64_t{model_.hidden}, normed);
      quantize_row(normed, head, scratch_.wanted, row);
    });
    multiply_rows(pool_, head, scratch_.wanted, pass_.num_logits,
                  [&](int64_t row, int64_t first, int64_t count, const float *results) {
                    float *to = pass_.logits + row * head.outputs + first;
                    scale_logits(results, model_.logits_scale, model_.logits_softcap, count, to);
                  });
  }

  samewise::ThreadPool &pool_;
  const SwModel &model_;
  const SwStep &step_;
  const SwPass &pass_;
  const PassScratch scratch_;
};

}  // namespace SW_ISA
