// The C interface between Python and the CPU kernels. Pointers are borrowed for the call, but for packed weights and
// caches inside a layer, which must outlive it. Every function returns 0, or 1 when memory ran out. Python reads this
// file (kernels/interface.py), so it is plain C.
#pragma once
#include <stdint.h>

#define SW_PUBLIC __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SwContext SwContext;  // threads, scratch memory and the instruction set in use

enum SwKvType { SW_KV_FLOAT32 = 0, SW_KV_BFLOAT16 = 1, SW_KV_INT8 = 2 };
enum SwWeightKind { SW_INT8 = 0, SW_INT4 = 1, SW_INT8_ROTATED = 2 };
enum SwActivation { SW_SILU = 0, SW_GELU_TANH = 1 };
enum SwScoring { SW_SOFTMAX = 0, SW_SIGMOID = 1 };

// The paged cache of one layer. With int8 every key and value has one scale for each token and head. In bfloat16 two
// dimensions of a key and two places of a value stand together.
typedef struct SwKvCache {
  void *keys;           // [num_blocks, kv_heads, key_dim, block_size]; bfloat16: [.., (key_dim + 1) / 2, block_size, 2]
  void *values;         // [num_blocks, kv_heads, block_size, value_dim]; bfloat16: [.., block_size / 2, value_dim, 2]
  float *key_scales;    // [num_blocks, kv_heads, block_size]; null unless int8
  float *value_scales;  // likewise
  int32_t type;         // SwKvType
  int32_t block_size;   // a multiple of 16
  int32_t kv_heads;
  int32_t key_dim;
  int32_t value_dim;
} SwKvCache;

// The tokens of one step: T tokens of C choices, those of a choice one after the other.
typedef struct SwStep {
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
} SwStep;

typedef struct SwAttention {
  int32_t heads;
  int32_t window;  // last positions that a query sees, its own included; 0 for all
  float scale;
  float softcap;  // scores s become softcap * tanh(s / softcap); 0 for none
} SwAttention;

// A linear layer's weight: int8 with one scale for each output, as it is or rotated, with at most 32,768 inputs, or int4
// with a scale and a minimum for each output and group of 32 inputs, which the inputs are a multiple of. Rotated weights
// are multiplied with rows that are rotated, too, and rounded to integers of 8 bits, others with rows of 12 bits.
typedef struct SwWeight {
  int32_t kind;          // SwWeightKind
  int32_t outputs;
  int32_t inputs;
  const int8_t *packed;  // see sw_packed_size
  const float *scales;   // [outputs], padded to a multiple of 16
  const float *bias;     // likewise; null for none
} SwWeight;

// A mixture of experts, each a gated MLP. A row goes to those with the highest scores, the lowest index among equals; the
// weights of what they make of it are these scores, and it is added up in the order of the scores.
typedef struct SwExperts {
  int32_t num_experts;
  int32_t top_k;       // experts of each row, the number of experts at most
  int32_t activation;  // SwActivation
  int32_t scoring;     // SwScoring: over all experts, or of each one
  int32_t normalised;  // the weights of a row are divided by their sum
  int32_t gates_mlp;   // the router has one more output; its sigmoid is a factor on what the layer's MLP adds
  float scale;         // factor on the weights
  const float *router;       // [outputs / 16, hidden, 16], outputs padded to a multiple of 16
  const float *choice_bias;  // [num_experts] added to the scores for the choice, not for the weights; null for none
  const SwWeight *gate_up;   // [num_experts] outputs: gate, then up. All of one shape and kind
  const SwWeight *down;      // [num_experts] likewise
} SwExperts;

// A decoder layer: RMSNorm, attention with rotary positions, RMSNorm, gated MLP, each with its residual connection. With
// experts, their sum is added to what the MLP makes of the same rows; gate_up, of 0 outputs where there is no MLP beside
// them, is of the kind of theirs.
typedef struct SwDecoderLayer {
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
  const SwExperts *experts;          // null for none
} SwDecoderLayer;

// Cos and sin of all rotary positions, [positions, dim] each.
typedef struct SwRotary {
  const float *cos;
  const float *sin;
} SwRotary;

// A model: embedding, decoder layers, RMSNorm, head. All that it points at must outlive it.
typedef struct SwModel {
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
} SwModel;

// What a pass of a model takes beside the step, and what is wanted of it.
typedef struct SwPass {
  int32_t num_logits;
  const int32_t *tokens;        // [T] below the size of the vocabulary
  const int32_t *logits_index;  // [num_logits] tokens whose logits are wanted
  float *logits;                // [num_logits, outputs of the head]
  float *const *entering;       // [num_layers] takes what enters each layer, [T, hidden], where not null; null for none
  float *last;                  // [T, hidden] takes what leaves the last norm; null if not wanted
} SwPass;

// How the token of a row of logits is found.
typedef struct SwPick {
  int64_t row;
  uint64_t key;          // of the noise
  double temperature;    // what the logits are still to be divided by; 0 takes the highest
  const uint32_t *mask;  // bit t % 32 of word t / 32 tells whether token t may be taken; null where all may
} SwPick;

// A Hydra head: u = R z + r + silu(W z + b), then u + silu(V u + c) for each further layer, then the logits of u.
typedef struct SwHydraHead {
  SwWeight linear;          // W and b: [hidden, inputs], see SwHydra
  SwWeight res_connection;  // R and r: likewise, and of the same kind
  const SwWeight *layers;   // [num_layers - 1] V and c: [hidden, hidden] each
  SwWeight logits;          // [draft vocabulary, hidden]
} SwHydraHead;

// Draft heads: number i (1, 2, ...) takes what the target's features are at a token and the embeddings of the i tokens
// after it, joined, and guesses the next token.
typedef struct SwHydra {
  int32_t hidden;
  int32_t num_features;
  int32_t depth;
  int32_t num_layers;
  const SwHydraHead *heads;  // [depth]
  const int32_t *draft_ids;  // [draft vocabulary] the target's ids; null where they are the same
  const float *feature_scale;  // [num_features, hidden] factors of the features
} SwHydra;

// A choice that wants a draft.
typedef struct SwDraftChoice {
  int64_t row;         // of the features: the last token that was computed
  int32_t token;       // the newest one, after that
  int32_t max_nodes;   // of its tree
  double temperature;  // 0 takes the most probable tokens; above, children are what the noise makes of the draft
  uint64_t seed;       // of the target's noise for the next token, as are ...
  int64_t choice;      // ... the number of the choice ...
  int64_t position;    // ... and of the token in the output; see noise_key in sampling/noise.py
} SwDraftChoice;

// What heads are to draft, and where it goes. The limits are those of GrowthLimits in speculative/growing.py.
typedef struct SwDraft {
  int32_t num_choices;
  int32_t width;  // max_nodes of any choice at most
  int32_t max_depth;
  int32_t branches;
  int32_t front;
  int32_t candidates;
  double least;
  double followed;
  float embedding_scale;
  const float *embedding;        // [vocabulary, hidden]
  const float *const *features;  // [num_features] [., hidden] each
  const SwDraftChoice *choices;  // [num_choices]
  int32_t *num_nodes;            // [num_choices] takes the size of each tree
  int32_t *tokens;               // [num_choices, width] takes its tokens, the most probable nodes first
  int32_t *parents;              // likewise: a node before it, or -1 for the newest token
  double *confidence;            // likewise
} SwDraft;

// The steps of sampling/truncations.py.
enum SwTruncationKind {
  SW_TEMPERATURE,
  SW_TOP_N_SIGMA,
  SW_TYPICAL_P,
  SW_EPSILON_CUTOFF,
  SW_ETA_CUTOFF,
  SW_TOP_K,
  SW_TOP_P,
  SW_MIN_P,
  SW_XTC,
  SW_MIROSTAT
};

typedef struct SwTruncation {
  int32_t kind;  // SwTruncationKind
  double value;
} SwTruncation;

// A token's key and value that go to another place.
typedef struct SwMove {
  int32_t from_block;
  int32_t from_offset;
  int32_t to_block;
  int32_t to_offset;
} SwMove;

// isa: "avx512bf16", "avx512vnni", "avx2", "portable", or "auto" for the best that this machine has; null is returned if it has not.
// Where the system refuses to make so many threads, there are fewer: see sw_threads.
SW_PUBLIC SwContext *sw_create(int32_t threads, const char *isa);
SW_PUBLIC void sw_destroy(SwContext *context);
SW_PUBLIC const char *sw_isa(const SwContext *context);
SW_PUBLIC int32_t sw_threads(const SwContext *context);

// Bytes of a packed weight.
SW_PUBLIC int64_t sw_packed_size(int32_t kind, int32_t outputs, int32_t inputs);
SW_PUBLIC int32_t sw_pack(SwContext *context, int32_t kind, const float *weight, int32_t outputs, int32_t inputs,
                     int8_t *packed, float *scales);

// y[rows, outputs] = x[rows, inputs] times the weight, x rounded to integers with one scale for each row.
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

// output[rows, hidden] = the weighted sum of what the experts chosen[rows, top_k] make of x[rows, hidden], added up in the
// order in which they stand there. The router is not used.
SW_PUBLIC int32_t sw_experts(SwContext *context, const SwExperts *experts, const float *x, const int32_t *chosen,
                         const float *weights, int32_t rows, float *output);

// tokens[count] = what is found in rows of logits[., width], the lowest token among equals; -1 where a logit that may be
// taken is NaN or +inf, or none of them is finite.
SW_PUBLIC int32_t sw_pick(SwContext *context, const float *logits, int64_t width, const SwPick *picks, int32_t count,
                int64_t *tokens);

// Drafts a tree for each choice.
SW_PUBLIC int32_t sw_draft(SwContext *context, const SwHydra *hydra, const SwDraft *draft);

// output[rows, width] = logits[rows, width] after the steps first_step[row] to first_step[row + 1] - 1 of each row; -inf
// where a token was taken out. Each row has at least one finite entry, none above or NaN.
SW_PUBLIC int32_t sw_truncate(SwContext *context, const float *logits, int32_t rows, int64_t width,
                    const SwTruncation *steps, const int32_t *first_step, float *output);

// Makes the moves in the caches of all layers. No move reads a place that one before it has written.
SW_PUBLIC int32_t sw_move_kv(SwContext *context, const SwKvCache *layers, int32_t num_layers, const SwMove *moves,
                   int32_t count);

// The size of a struct by its name, or -1: Python compares it with what it reads here.
SW_PUBLIC int64_t sw_size_of(const char *name);

#ifdef __cplusplus
}
#endif
