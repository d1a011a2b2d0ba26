// The C interface between Python and the CPU kernels. Pointers are borrowed for the call, but for packed weights and
// caches inside a layer, which must outlive it. Every function returns 0, or 1 when memory ran out.
#pragma once
#include <cstdint>

#define SW_PUBLIC __attribute__((visibility("default")))

extern "C" {

struct SwContext;  // threads, scratch memory and the instruction set in use

enum SwKvType : int32_t { SW_KV_FLOAT32 = 0, SW_KV_BFLOAT16 = 1, SW_KV_INT8 = 2 };
enum SwWeightKind : int32_t { SW_INT8 = 0, SW_INT4 = 1 };
enum SwActivation : int32_t { SW_SILU = 0, SW_GELU_TANH = 1 };

// The paged cache of one layer. With int8 every key and value has one scale for each token and head.
struct SwKvCache {
  void *keys;           // [num_blocks, kv_heads, key_dim, block_size]
  void *values;         // [num_blocks, kv_heads, block_size, value_dim]
  float *key_scales;    // [num_blocks, kv_heads, block_size]; null unless int8
  float *value_scales;  // likewise
  int32_t type;         // SwKvType
  int32_t block_size;   // a multiple of 16
  int32_t kv_heads;
  int32_t key_dim;
  int32_t value_dim;
};

// The tokens of one step: T tokens of C choices, those of a choice one after the other.
struct SwStep {
  int32_t num_tokens;
  int32_t num_choices;
  int32_t table_width;
  const int32_t *first_token;  // [C + 1] where the tokens of each choice begin, then T
  const int32_t *positions;    // [T] absolute position
  const int32_t *block_of;     // [T] block that takes the token's key and value
  const int32_t *offset_of;    // [T] place in that block
  const int32_t *block_table;  // [C, table_width]
  // Trees of draft tokens. A token sees the positions below path_start[t] at their own places, and those from there to
  // its own, which the path_first[t + 1] - path_first[t] entries of path_places name: the place of each ancestor and
  // at last of the token itself, counted in tokens from the start of the block table. All null when there is no tree.
  const int32_t *path_start;   // [T]
  const int32_t *path_first;   // [T + 1]
  const int32_t *path_places;  // [path_first[T]]
};

struct SwAttention {
  int32_t heads;
  int32_t window;  // last positions that a query sees, its own included; 0 for all
  float scale;
  float softcap;  // scores s become softcap * tanh(s / softcap); 0 for none
};

// A linear layer's weight: int8 with one scale for each output, or int4 with a scale and a minimum for each output and
// group of 32 inputs, which the inputs are a multiple of.
struct SwWeight {
  int32_t kind;          // SwWeightKind
  int32_t outputs;
  int32_t inputs;
  const int8_t *packed;  // see sw_packed_size
  const float *scales;   // [outputs], padded to a multiple of 16
  const float *bias;     // likewise; null for none
};

// A decoder layer: RMSNorm, attention with rotary positions, RMSNorm, gated MLP, each with its residual connection.
struct SwDecoderLayer {
  int32_t hidden;
  int32_t intermediate;
  int32_t rotary_dim;  // leading dimensions of a head that are rotated; 0 for none
  int32_t activation;  // SwActivation
  float norm_eps;
  float residual_scale;  // factor on what attention and MLP add
  SwAttention attention;
  SwKvCache cache;
  SwWeight qkv;                  // outputs: heads of queries, of keys, of values
  SwWeight attention_output;
  SwWeight gate_up;              // outputs: gate, then up
  SwWeight down;
  const float *attention_norm;       // [hidden] before the attention; null for none
  const float *attention_post_norm;  // [hidden] on the attention's output; null for none
  const float *mlp_norm;
  const float *mlp_post_norm;
  const float *query_norm;           // [key_dim] for each head; null for none
  const float *key_norm;
};

// Cos and sin of all rotary positions, [positions, dim] each.
struct SwRotary {
  const float *cos;
  const float *sin;
};

// A model: embedding, decoder layers, RMSNorm, head. All that it points at must outlive it.
struct SwModel {
  int32_t hidden;
  int32_t num_layers;
  float embedding_scale;
  float norm_eps;
  float logits_scale;    // factor on the logits
  float logits_softcap;  // logits x become softcap * tanh(x / softcap); 0 for none
  const float *embedding;               // [vocabulary, hidden]
  const SwDecoderLayer *const *layers;  // [num_layers]
  const SwRotary *const *rotaries;      // [num_layers] as wide as the layer's rotary_dim; null where that is 0
  const float *norm;                    // [hidden]
  SwWeight head;
};

// What a pass of a model takes beside the step, and what is wanted of it.
struct SwPass {
  int32_t num_logits;
  const int32_t *tokens;        // [T] below the size of the vocabulary
  const int32_t *logits_index;  // [num_logits] tokens whose logits are wanted
  float *logits;                // [num_logits, outputs of the head]
  float *const *entering;       // [num_layers] takes what enters each layer, [T, hidden], where not null; null for none
  float *last;                  // [T, hidden] takes what leaves the last norm; null if not wanted
};

// A token to be drawn.
struct SwDraw {
  int64_t row;  // of the logits
  uint64_t key;
  double temperature;  // what the logits are still to be divided by
};

// A token's key and value that go to another place.
struct SwMove {
  int32_t from_block;
  int32_t from_offset;
  int32_t to_block;
  int32_t to_offset;
};

// isa: "avx512vnni", "avx2", "portable", or "auto" for the best that this machine has; null is returned if it has not.
SW_PUBLIC SwContext *sw_create(int32_t threads, const char *isa);
SW_PUBLIC void sw_destroy(SwContext *context);
SW_PUBLIC const char *sw_isa(const SwContext *context);

// Bytes of a packed weight.
SW_PUBLIC int64_t sw_packed_size(int32_t kind, int32_t outputs, int32_t inputs);
SW_PUBLIC int32_t sw_pack(SwContext *context, int32_t kind, const float *weight, int32_t outputs, int32_t inputs,
                     int8_t *packed, float *scales);

// y[rows, outputs] = x[rows, inputs] times the weight, x rounded to integers of 12 bits with one scale for each row.
SW_PUBLIC int32_t sw_linear(SwContext *context, const SwWeight *weight, const float *x, int32_t rows, float *y);

// Writes key and value to the cache and attends: query [T, heads, key_dim], key [T, kv_heads, key_dim],
// value [T, kv_heads, value_dim], output [T, heads, value_dim].
SW_PUBLIC int32_t sw_attention(SwContext *context, const SwKvCache *cache, const SwStep *step, const SwAttention *attention,
                     const float *query, const float *key, const float *value, float *output);

// output[T, hidden] = the layer's answer to input[T, hidden]; cos and sin are [T, rotary_dim].
SW_PUBLIC int32_t sw_decoder_layer(SwContext *context, const SwDecoderLayer *layer, const SwStep *step, const float *cos,
                         const float *sin, const float *input, float *output);

// Runs the model on a step's tokens.
SW_PUBLIC int32_t sw_forward(SwContext *context, const SwModel *model, const SwStep *step, const SwPass *pass);

// tokens[count] = what is drawn from rows of logits[., width], each with at least one finite entry, none above or NaN.
SW_PUBLIC int32_t sw_gumbel_max(SwContext *context, const float *logits, int64_t width, const SwDraw *draws,
                      int32_t count, int64_t *tokens);

// Makes the moves in the caches of all layers. No move reads a place that one before it has written.
SW_PUBLIC int32_t sw_move_kv(SwContext *context, const SwKvCache *layers, int32_t num_layers, const SwMove *moves,
                   int32_t count);
}
