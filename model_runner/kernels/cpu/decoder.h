// One decoder layer on all rows of a step, as SwDecoderLayer describes.
//
// The work is divided into phases, and each phase into rows or units of outputs; threads meet after each phase. A row's
// arithmetic does not depend on the thread or on other rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "block_formats.h"
#include "experts.h"
#include "linear.h"
#include "mixers.h"
#include "rows.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

// Rotary position embedding on the leading `dim` numbers of a head, the first half paired with the second (Su et al.,
// arXiv:2104.09864).
inline void rotate(float *head, const float *cos, const float *sin, int64_t dim) {
  const int64_t half = dim / 2;
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const Vec a = load(head + i), b = load(head + half + i);
    store(head + i, fma(a, load(cos + i), -b * load(sin + i)));
    store(head + half + i, fma(b, load(cos + half + i), a * load(sin + half + i)));
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = fma(a, cos[i], -b * sin[i]);
    head[half + i] = fma(b, cos[half + i], a * sin[half + i]);
  }
}

// to[hidden] = scale * the embedding of a token.
inline void look_up(const SwEmbedding &embedding, int32_t token, float scale, int64_t hidden, float *to) {
  unpack_row(embedding.format, embedding.rows + token * embedding.row_bytes, hidden, to);
  transform(to, hidden, [=](Vec v) { return v * scale; }, to);
}

// A layer's scratch memory. Buffers that are not alive at the same time share memory.
struct Scratch {
  float *wide;      // [rows, wide_stride] outputs of mixer_input; later gate and up
  float *narrow;    // [rows, narrow_stride] normed rows; output of the mixer; input of a post-norm
  float *of_mixer;  // a recurrent mixer's own
  QuantizedRows rows;  // the input of each linear
  ExpertsScratch experts;  // if the layer has experts
  float *latent;           // [rows, latent_stride] the inputs of experts that take latents; later their sums
  int64_t wide_stride;
  int64_t narrow_stride;
  int64_t latent_stride;

  static Scratch lay_out(const SwDecoderLayer &layer, int64_t num_rows, ScratchAllocator &take) {
    const int64_t mixed = std::max(attention_width(layer), recurrent_width(layer));
    const int64_t latent = layer.experts ? outputs_of_all(layer.experts->latent_input) : 0;
    Scratch s{};
    s.wide_stride = round_up(std::max(outputs_of_all(layer.mixer_input), outputs_of_all(layer.gate_up)), 16);
    s.narrow_stride = round_up(std::max<int64_t>(layer.hidden, mixed), 16);
    s.latent_stride = round_up(latent, 16);
    take(s.wide, num_rows * s.wide_stride);
    take(s.narrow, num_rows * s.narrow_stride);
    s.rows = take_rows(take, std::max<int64_t>({layer.hidden, mixed, layer.intermediate, latent}), num_rows);
    take(s.of_mixer, MixerRun::scratch_size(layer, num_rows));
    if (layer.experts) s.experts = ExpertsScratch::lay_out(*layer.experts, num_rows, take);
    take(s.latent, num_rows * s.latent_stride);
    return s;
  }
};

// Cos and sin of all rotary positions, and each row's index in them.
struct Rotation {
  const float *cos;
  const float *sin;
  const int32_t *rows;  // [rows]
};

// Runs one layer on a step's rows. The output may be the input.
class LayerRun {
 public:
  LayerRun(samewise::ThreadPool &pool, const SwDecoderLayer &layer, const SwStep &step, Scratch scratch)
      : pool_(pool), layer_(layer), step_(step_of(layer.cache, step)), scratch_(scratch) {}

  void run(const Rotation &rotation, const float *input, float *output) {
    if (layer_.mixer_input.outputs) {
      mix(rotation, input, output);
      input = output;
    }
    if (layer_.experts) return add_experts(*layer_.experts, input, output);
    if (!layer_.gate_up.outputs) return;
    quantize_normed(input, layer_.mlp_norm, layer_.gate_up);
    multiply(layer_.gate_up, scratch_.wide, scratch_.wide_stride);
    each_row([&](int64_t row) { quantize_gated(row); });
    add_linear(layer_.down, layer_.mlp_post_norm, input, output);
  }

 private:
  // output = input + the outputs of the layer's mixers.
  void mix(const Rotation &rotation, const float *input, float *output) {
    quantize_normed(input, layer_.attention_norm, layer_.mixer_input);
    multiply(layer_.mixer_input, scratch_.wide, scratch_.wide_stride);
    const bool attends = layer_.attention.heads > 0;
    if (attends) {
      run_attention(rotation);
      add_mixed(layer_.mixer_output, input, output);
      input = output;
    }
    if (!recurrent_width(layer_)) return;
    MixerRun(pool_, layer_, *step_.states)
        .run({scratch_.wide + recurrent_start(layer_), scratch_.wide_stride},
             {scratch_.narrow, scratch_.narrow_stride}, scratch_.of_mixer);
    add_mixed(attends ? layer_.parallel_output : layer_.mixer_output, input, output);
  }

  // output = input + the projection of a mixer's output, which is in `narrow`.
  void add_mixed(const SwWeight &weight, const float *input, float *output) {
    each_row([&](int64_t row) { quantize(narrow(row), weight, row); });
    add_linear(weight, layer_.attention_post_norm, input, output);
  }

  float *wide(int64_t row) const { return scratch_.wide + row * scratch_.wide_stride; }
  float *narrow(int64_t row) const { return scratch_.narrow + row * scratch_.narrow_stride; }

  void quantize(const float *x, const SwWeight &weight, int64_t row) const {
    quantize_row(x, weight, scratch_.rows, row);
  }

  template <typename Work>
  void each_row(const Work &work) {
    for_rows(pool_, step_.num_tokens, work);
  }

  void quantize_normed(const float *x, const float *norm, const SwWeight &weight) {
    each_row([&](int64_t row) {
      const float *from = x + row * layer_.hidden;
      if (norm) {
        rms_norm(from, norm, layer_.norm_eps, layer_.hidden, narrow(row));
        from = narrow(row);
      }
      quantize(from, weight, row);
    });
  }

  void multiply(const SwWeight &weight, float *to, int64_t stride) {
    multiply_rows(pool_, weight, scratch_.rows, step_.num_tokens, Store{to, stride});
  }

  // narrow = the attention on wide.
  void run_attention(const Rotation &rotation) {
    place_keys(rotation);
    attend(pool_, layer_.cache, step_, layer_.attention, scratch_.wide, scratch_.wide_stride, scratch_.narrow,
           scratch_.narrow_stride);
    if (!layer_.gates_attention) return;
    const int64_t gates = qkv_width(layer_);
    each_row([&](int64_t row) { multiply_by_sigmoid(narrow(row), wide(row) + gates, attention_width(layer_)); });
  }

  // to = from + residual_scale * post_norm(linear). In place if `to` is from.
  void add_linear(const SwWeight &weight, const float *post_norm, const float *from, float *to) {
    const int64_t hidden = layer_.hidden;
    const float scale = layer_.residual_scale;
    if (!post_norm) {
      multiply_rows(pool_, weight, scratch_.rows, step_.num_tokens,
                    [=](int64_t row, int64_t first, int64_t count, const float *results) {
                      add_scaled(from + row * hidden + first, results, scale, count, to + row * hidden + first);
                    });
      return;
    }
    multiply(weight, scratch_.narrow, scratch_.narrow_stride);
    each_row([&](int64_t row) { add_narrow(row, post_norm, from, to); });
  }

  // Like add_linear, with the contents of `narrow` instead of the linear's results.
  void add_narrow(int64_t row, const float *post_norm, const float *from, float *to) const {
    const int64_t hidden = layer_.hidden;
    if (post_norm) rms_norm(narrow(row), post_norm, layer_.norm_eps, hidden, narrow(row));
    add_scaled(from + row * hidden, narrow(row), layer_.residual_scale, hidden, to + row * hidden);
  }

  // to = x + residual_scale * post_norm(sum of the experts' outputs, plus the MLP's output if there is an MLP).
  void add_experts(const SwExperts &experts, const float *x, float *to) {
    ExpertsRun run(pool_, experts, step_.num_tokens, scratch_.experts);
    const bool is_latent = experts.latent_input.outputs > 0;
    quantize_normed(x, layer_.mlp_norm, is_latent ? experts.latent_input : experts.gate_up[0]);
    if (layer_.mlp_norm)
      run.route_rows(scratch_.narrow, scratch_.narrow_stride);
    else
      run.route_rows(x, layer_.hidden);
    if (is_latent)
      multiply(experts.latent_input, scratch_.latent, scratch_.latent_stride);
    else
      run.multiply(scratch_.rows);
    const bool has_mlp = layer_.gate_up.outputs > 0;
    if (has_mlp) {
      multiply(layer_.gate_up, scratch_.wide, scratch_.wide_stride);
      each_row([&](int64_t row) { quantize_gated(row); });
      multiply(layer_.down, scratch_.narrow, scratch_.narrow_stride);
    }
    if (is_latent) add_latents(run, experts, has_mlp);
    each_row([&](int64_t row) {
      if (!is_latent) run.add(row, has_mlp ? narrow(row) : nullptr, narrow(row));
      add_narrow(row, layer_.mlp_post_norm, x, to);
    });
  }

  // narrow = the projected sum of the experts' outputs for latents, plus `narrow` if that has the MLP's output.
  void add_latents(ExpertsRun &run, const SwExperts &experts, bool has_mlp) {
    const auto latent = [&](int64_t row) { return scratch_.latent + row * scratch_.latent_stride; };
    each_row([&](int64_t row) { quantize(latent(row), experts.gate_up[0], row); });
    run.multiply(scratch_.rows);
    each_row([&](int64_t row) {
      run.add(row, nullptr, latent(row));
      quantize(latent(row), experts.latent_output, row);
    });
    multiply_rows(pool_, experts.latent_output, scratch_.rows, step_.num_tokens,
                  [&](int64_t row, int64_t first, int64_t count, const float *results) {
                    float *sum = narrow(row) + first;
                    if (has_mlp)
                      add_scaled(sum, results, 1.0f, count, sum);
                    else
                      copy(results, count, sum);
                  });
  }

  void place_keys(const Rotation &rotation) {
    const SwKvCache &cache = layer_.cache;
    const int64_t heads = layer_.attention.heads, dim = cache.key_dim;
    each_row([&](int64_t row) {
      prefetch_kv(cache, step_, row);
      float *qkv = wide(row);
      if (layer_.norms_together) {
        rms_norm(qkv, layer_.query_norm, layer_.norm_eps, heads * dim, qkv);
        rms_norm(qkv + heads * dim, layer_.key_norm, layer_.norm_eps, cache.kv_heads * dim, qkv + heads * dim);
      }
      const int64_t angle = layer_.rotary_dim ? int64_t{rotation.rows[row]} * layer_.rotary_dim : 0;
      for (int64_t head = 0; head < heads + cache.kv_heads; ++head) {
        float *x = qkv + head * dim;
        const float *norm = head < heads ? layer_.query_norm : layer_.key_norm;
        if (norm && !layer_.norms_together) rms_norm(x, norm, layer_.norm_eps, dim, x);
        rotate(x, rotation.cos + angle, rotation.sin + angle, layer_.rotary_dim);
      }
      write_kv(cache, step_, row, qkv + heads * dim, qkv + (heads + cache.kv_heads) * dim);
    });
  }

  void quantize_gated(int64_t row) const {
    activate_row(layer_.activation, wide(row), layer_.intermediate);
    quantize(wide(row), layer_.down, row);
  }

  samewise::ThreadPool &pool_;
  const SwDecoderLayer &layer_;
  const SwStep &step_;
  const Scratch scratch_;
};

// ---------------------------------------------------------------------------------------------------------------------
// A complete forward pass, as SwModel and SwPass describe.
//
// A row's numbers depend only on what the decoder layers let it see, and not on which logits and hidden states are
// requested in addition.

// y = scale * x, or softcap * tanh(scale * x / softcap). A number's place does not affect its result.
inline void scale_logits(const float *x, float scale, float softcap, int64_t n, float *y) {
  const auto scaled = [=](Vec v) {
    v *= scale;
    return softcap > 0 ? tanh(v / softcap) * softcap : v;
  };
  transform(y, n, scaled, x);
}

// Scratch memory of a pass. The head shares memory with the layers.
struct PassScratch {
  float *hidden;         // [T, hidden] the residual stream
  char *of_layer;        // a layer's Scratch
  float *normed;         // [num_logits, hidden]
  QuantizedRows wanted;  // the same rows, quantised for the head

  static PassScratch lay_out(const SwModel &model, const SwStep &step, const SwPass &pass, ScratchAllocator &take) {
    PassScratch s{};
    take(s.hidden, int64_t{step.num_tokens} * model.hidden);
    const ScratchAllocator shared = take;
    s.of_layer = shared.place + shared.used;
    take(s.normed, int64_t{pass.num_logits} * model.hidden);
    s.wanted = take_rows(take, model.head.inputs, pass.num_logits);
    for (int32_t layer = 0; layer < model.num_layers; ++layer) {
      ScratchAllocator of_layer = shared;
      Scratch::lay_out(*model.layers[layer], step.num_tokens, of_layer);
      take.used = std::max(take.used, of_layer.used);
    }
    return s;
  }
};

// Runs one pass of a model.
class ForwardRun {
 public:
  ForwardRun(samewise::ThreadPool &pool, const SwModel &model, const SwStep &step, const SwPass &pass,
             PassScratch scratch)
      : pool_(pool), model_(model), step_(step), pass_(pass), scratch_(scratch) {}

  void run() {
    float *stream = layer_input(0);
    embed(stream);
    for (int32_t index = 0; index < model_.num_layers; ++index) {
      float *next = layer_input(index + 1);
      run_layer(index, stream, next);
      stream = next;
    }
    if (pass_.last) norm_all(stream);
    if (pass_.num_logits) multiply_head(stream);
  }

 private:
  // Where to store a layer's input, or the last layer's output. Layers run in place.
  float *layer_input(int32_t layer) const {
    const bool is_wanted = layer < model_.num_layers && pass_.layer_inputs && pass_.layer_inputs[layer];
    return is_wanted ? pass_.layer_inputs[layer] : scratch_.hidden;
  }

  void embed(float *stream) const {
    const int64_t hidden = model_.hidden;
    for_rows(pool_, step_.num_tokens, [&](int64_t row) {
      look_up(model_.embedding, pass_.tokens[row], model_.embedding_scale, hidden, stream + row * hidden);
    });
  }

  void run_layer(int32_t index, const float *input, float *output) const {
    const SwDecoderLayer &layer = *model_.layers[index];
    ScratchAllocator take{scratch_.of_layer, 0};
    const Scratch scratch = Scratch::lay_out(layer, step_.num_tokens, take);
    Rotation rotation{};
    if (const SwRotary *rotary = model_.rotaries[index])
      rotation = {rotary->cos, rotary->sin, pass_.angles ? pass_.angles : step_.positions};
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
                  [&, width = outputs_of_all(head)](int64_t row, int64_t first, int64_t count, const float *results) {
                    float *to = pass_.logits + row * width + first;
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
