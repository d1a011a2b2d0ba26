// The C interface between Python and the CPU kernels. Pointers are borrowed for the call, except packed weights and
// caches in a layer, which must outlive it. Python parses this file and functions.h (kernels/interface.py), so they are
// plain C.
#pragma once
#include <stdint.h>

#define SW_PUBLIC __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SwContext SwContext;  // threads, scratch memory and the instruction set in use

enum SwKvType { SW_KV_FLOAT32 = 0, SW_KV_BFLOAT16 = 1, SW_KV_INT8 = 2 };
// The last ones are named after the block formats whose weights they hold as they are (sw_repacked_kind).
enum SwWeightKind {
  SW_INT8 = 0,
  SW_INT4 = 1,
  SW_INT8_ROTATED = 2,
  SW_AS_Q4_0 = 3,
  SW_AS_Q4_ZERO = 4,
  SW_AS_Q4_K = 5,
  SW_AS_IQ4_NL = 6,
  SW_AS_IQ4_XS = 7,
  SW_AS_MXFP4 = 8,
  SW_AS_NVFP4 = 9,
  SW_AS_Q8_0 = 10,
  SW_AS_Q5_1 = 11,
  SW_AS_Q6_K = 12,
  SW_AS_Q5_K = 13
};
// How a checkpoint stores weights, with GGUF's type numbers. Q, IQ, TQ and FP4 formats have blocks of 32 to 256 weights.
enum SwBlockFormat {
  SW_F32 = 0,
  SW_F16 = 1,
  SW_Q4_0 = 2,
  SW_Q4_1 = 3,
  SW_Q5_0 = 6,
  SW_Q5_1 = 7,
  SW_Q8_0 = 8,
  SW_Q2_K = 10,
  SW_Q3_K = 11,
  SW_Q4_K = 12,
  SW_Q5_K = 13,
  SW_Q6_K = 14,
  SW_IQ2_XXS = 16,
  SW_IQ2_XS = 17,
  SW_IQ3_XXS = 18,
  SW_IQ1_S = 19,
  SW_IQ4_NL = 20,
  SW_IQ3_S = 21,
  SW_IQ2_S = 22,
  SW_IQ4_XS = 23,
  SW_IQ1_M = 29,
  SW_BF16 = 30,
  SW_TQ1_0 = 34,
  SW_TQ2_0 = 35,
  SW_MXFP4 = 39,
  SW_NVFP4 = 40,
  // 32 weights scale * (level - zero) of other files: scale in half precision, zero in one byte, nibbles as in Q4_0.
  SW_Q4_ZERO = 1000
};
// SW_CLAMPED_SILU is for experts alone, SW_RELU_SQUARED for an MLP without a gate.
enum SwActivation { SW_SILU = 0, SW_GELU_TANH = 1, SW_CLAMPED_SILU = 2, SW_RELU_SQUARED = 3 };
// A block's score: the highest of its positions' scores, or its last position's score. With the latter, a row also sees
// the block that is not full yet.
enum SwPooling { SW_HIGHEST = 0, SW_LAST = 1 };
enum SwScoring { SW_SOFTMAX = 0, SW_SIGMOID = 1 };

// The paged cache of one layer. In int8 every key and value vector has one scale per token and head. In bfloat16, two
// dimensions of a key and two places of a value are interleaved.
typedef struct SwKvCache {
  void *keys;           // [num_blocks, kv_heads, key_dim, block_size]; bfloat16: [.., (key_dim + 1) / 2, block_size, 2]
  void *values;         // [num_blocks, kv_heads, block_size, value_dim]; bfloat16: [.., block_size / 2, value_dim, 2]
  float *key_scales;    // [num_blocks, kv_heads, block_size]; null unless int8
  float *value_scales;  // as key_scales
  int32_t type;         // SwKvType
  int32_t block_size;   // a multiple of 16
  int32_t kv_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t group;  // whose blocks these are: 0 for the step's own, otherwise those of its groups[group - 1]
} SwKvCache;

// How a step divides for recurrent layers (recurrence/plan.py): T tokens of C choices, in segments of at most 32 tokens.
// A row's slot is its rows block * 32 + its place in the block.
typedef struct SwSegment {
  int32_t first;       // the first token is order[first]
  int32_t num_tokens;
  int32_t paths;       // for drafts, the first one's row in `paths`; -1 for known tokens
  int32_t block;       // for known tokens, their rows block
  int32_t offset;      // for known tokens, how many of its rows come before them
  int32_t is_folded;   // for known tokens, whether the choice's state folds after them
  int32_t page;        // page that this fold is written to; -1 for none
  int32_t first_fold;  // for drafts, the first of the rows in `paths` that are folded into a copy of the state
  int32_t num_folds;
} SwSegment;

typedef struct SwStatePlan {
  int32_t num_tokens;
  int32_t num_choices;
  int32_t num_written;
  const int32_t *slots;           // [T] slot of the token's row
  const int32_t *num_rows;        // [T] rows of the token's block on its path, its own included
  const int32_t *order;           // [T] tokens in the order of the segments
  const SwSegment *segments;
  const int32_t *first_segment;   // [C + 1] first segment of each choice
  const int32_t *anchors;         // [C] page of each choice's first state; -1 for zero
  const int32_t *paths;           // [., 32] slots of a draft's rows, or of a whole block on a draft's path
  const int32_t *written_pages;   // [num_written] pages to write
  const int32_t *written_blocks;  // [num_written] the rows block that each one follows
  // [34] by a convolution's kernel, null for those that no layer has: [T, kernel - 1] where each token's earlier inputs
  // are. 2 t + 1 for token t; 2 s for slot s; -1 for zero; -2 - i for number i of the last inputs of all pages.
  const int32_t *const *sources;
} SwStatePlan;

// One kind of a layer's rows, in float32. A block from num_blocks on is scratch, whose memory layers share: all rows of
// such a block are tokens of the step. Strides between blocks, and below between pages, count floats.
typedef struct SwRows {
  float *blocks;   // the first block
  float *scratch;  // the first scratch block
  int64_t stride;
  int64_t scratch_stride;
  int32_t num_blocks;
} SwRows;

// Rows and pages of a recurrence.
typedef struct SwRecurrence {
  int32_t heads;
  int32_t key_heads;    // consecutive heads share a key
  int32_t key_dim;      // a multiple of 16
  int32_t value_dim;    // a multiple of 16
  int32_t per_channel;  // whether each channel of a key has a decay
  int64_t page_stride;
  SwRows keys;          // [key_heads, 32, key_dim]
  SwRows decays;        // [heads, 32], per channel [heads, 32, key_dim]
  SwRows updates;       // [heads, 32, value_dim]
  float *states;        // of the first page: [heads, key_dim, value_dim]
} SwRecurrence;

// Rows and pages of a selective scan, and its A.
typedef struct SwScan {
  int32_t channels;     // a multiple of 16
  int32_t num_states;   // of a channel
  int64_t page_stride;
  SwRows steps;         // [32, channels]
  SwRows values;        // [32, channels] inputs times their steps
  SwRows inputs;        // [32, num_states]
  float *states;        // of the first page: [num_states, channels]
  const float *decays;  // [num_states, channels], not positive
} SwScan;

// Rows and pages of a causal depthwise convolution, and its weights.
typedef struct SwConvolution {
  int32_t channels;
  int32_t kernel;        // at most 33
  int32_t silu;          // whether the outputs x become x / (1 + e^-x)
  int64_t page_stride;
  SwRows inputs;         // [32, channels]
  float *last;           // of the first page: [kernel - 1, channels]
  const float *weight;   // [kernel, channels], for the newest input last
  const float *bias;     // [channels]; null for none
} SwConvolution;

// A gated delta net between its projections. Query, key and value are convolved side by side, with SiLU.
typedef struct SwGatedDeltaNet {
  SwRecurrence recurrence;
  SwConvolution convolution;  // channels: heads of queries, of keys, of values
  float gain;                 // factor on sigmoid(b): beta
  float norm_eps;
  const float *decay_factor;  // [heads] factor on softplus(a + decay_bias): the logarithm of the decay
  const float *decay_bias;    // [heads]
  const float *norm;          // [value_dim] of each head's output, which is then multiplied by SiLU(z)
} SwGatedDeltaNet;

// A Mamba 2 layer between its projections. Heads x, and B and C of groups of heads, are convolved side by side, with
// SiLU. The recurrence's keys are B, its queries C, and its values x times the head's step.
typedef struct SwMamba2 {
  SwRecurrence recurrence;
  SwConvolution convolution;  // channels: heads of x, groups of B, groups of C
  float least_step;
  float most_step;
  float norm_eps;
  int32_t norm_groups;        // parts of the output that have a norm each
  const float *decay_factor;  // [heads] factor on the step: the logarithm of the decay
  const float *step_bias;     // [heads]
  const float *skip;          // [heads] factor on x, which is added to the output
  const float *norm;          // [heads * value_dim] of the output times SiLU of the gate; null for none
} SwMamba2;

// The T tokens of a step, of C choices. The tokens of a choice are consecutive.
typedef struct SwStep {
  int32_t num_tokens;
  int32_t num_choices;
  int32_t table_width;
  const int32_t *first_token;  // [C + 1] first token of each choice, then T
  const int32_t *positions;    // [T] absolute position
  const int32_t *block_of;     // [T] block of the token's key and value
  const int32_t *offset_of;    // [T] place in that block
  const int32_t *block_table;  // [C, table_width]
  // Draft trees. A token sees positions below path_start[t] at their own places. From there to its own position, it
  // sees the places named by path_places from path_first[t] to path_first[t + 1] - 1: one for each ancestor and the
  // last for the token itself, counted in tokens from the start of the block table. All null without trees.
  const int32_t *path_start;   // [T]
  const int32_t *path_first;   // [T + 1]
  const int32_t *path_places;  // [path_first[T]]
  const struct SwStep *groups;  // the same tokens with the blocks of further cache groups; null for none
  const SwStatePlan *states;    // the same tokens for recurrent layers; null if the model has none
  // Spans of positions, such as the rows of an image, that see each other in layers with sees_spans.
  const int32_t *span_last;  // [T] last position of the token's span, its own outside of any; null without spans
} SwStep;

typedef struct SwAttention {
  int32_t heads;
  int32_t window;  // number of last positions a query sees, including its own; 0 for all
  int32_t chunk;   // a query at position p sees no position before p / chunk * chunk; 0 for no such limit
  float scale;
  float softcap;       // scores s become softcap * tanh(s / softcap); 0 for none
  const float *sinks;  // [heads] a logit of each head that takes part in its softmax and has no value; null for none
  const uint16_t *selected;  // [T, selections, selected_width] bit p % 16 of number p / 16: position p is seen; null: all
  int32_t selections;        // each for as many key-value heads
  int32_t selected_width;
  float *sums;  // [T, heads, 2] receives the highest score, and the sum of weights relative to it; null for no need
  int32_t sees_spans;  // whether a query sees its span to the end; a window bounds only what is before it
} SwAttention;

// Selects the positions that attention sees, by scores of index keys. A score is the product of a query's head and a
// key, or the weighted sum of these over the heads, without the negative ones. Of the positions up to a query's own, it
// selects blocks: the `top` highest by score, the first among equals.
typedef struct SwIndexer {
  int32_t heads;     // of the queries; there is one head of keys
  int32_t top;       // blocks that a row selects
  int32_t block;     // positions in a block
  int32_t pools;     // SwPooling: what a block's score is
  int32_t local;     // the last blocks of a row, its own included, have the highest scores
  int32_t entries;   // with SW_LAST: of selected blocks only the last position is seen, and no block that is not full
} SwIndexer;

// A linear layer's weight. int8 has one scale per output, either plain or rotated; rotated weights have at most 32,768
// inputs. int4 has a scale and a minimum per output and group of 32 inputs; the inputs are a multiple of 32. Weights from
// block formats have small groups, too; their inputs are whole blocks. Rotated weights are multiplied by rows that are
// rotated and rounded to 8 bits, other weights by rows of 12 bits.
//
// A linear whose outputs have several kinds is a chain of weights with the same inputs, in the order that the first
// names. Either all or none are rotated. Weights take the same rows if that, their inputs and the order of these are
// equal, and either all or none have a part in int8 where there are more than 8,259 inputs.
typedef struct SwWeight {
  int32_t kind;          // SwWeightKind
  int32_t outputs;
  int32_t inputs;
  const int8_t *packed;  // sw_packed_size bytes
  const float *scales;   // [outputs], padded to a multiple of 16
  const float *bias;     // [outputs], padded as scales; null for none
  const struct SwWeight *next;  // further outputs of the same linear; null for none
  const int32_t *input_order;   // [inputs] which input each column has, at most 32,768; null if in order
} SwWeight;

// A mixture of experts, each a gated MLP, or one without a gate for SW_RELU_SQUARED. A row goes to the experts with the
// highest scores, the lowest index among equals. Their outputs are weighted by these scores and added in the order of the
// scores. Experts may take a projection of the row, the latent, and their sum is then projected, too.
typedef struct SwExperts {
  int32_t num_experts;
  int32_t top_k;       // experts per row, at most num_experts
  int32_t activation;  // SwActivation
  int32_t scoring;     // SwScoring: softmax over all experts, or sigmoid of each
  int32_t normalised;  // whether a row's weights are divided by their sum
  int32_t gates_mlp;   // whether the sigmoid of one more router output scales the MLP's output
  float scale;         // factor on the weights
  float sum_eps;       // added to the sum that divides the weights
  float gate_alpha;    // SW_CLAMPED_SILU: (up + 1) * gate * sigmoid(gate_alpha * gate), with gate at most gate_limit
  float gate_limit;    // and up from -gate_limit to gate_limit
  const float *router;       // [outputs / 16, hidden, 16], outputs padded to a multiple of 16
  const float *router_bias;  // [outputs] added to the router's outputs, padded as these; null for none
  const float *choice_bias;  // [num_experts] added to the scores for choosing experts, not for weights; null for none
  const SwWeight *gate_up;   // [num_experts] outputs: gate, then up; up alone without a gate. All of the same shape, for
                             // the same rows
  const SwWeight *down;      // [num_experts] all of the same shape, for the same rows
  SwWeight latent_input;     // from rows to latents; 0 outputs for none
  SwWeight latent_output;
} SwExperts;

// A decoder layer: RMSNorm, attention with rotary positions, RMSNorm, gated MLP, each with its residual connection.
// With experts, their sum is added to the MLP's output on the same rows. Then gate_up takes the rows of the experts, or
// of latent_input, and has 0 outputs if the layer has no MLP.
//
// A layer may have one of three recurrent mixers in the place of the attention, or next to it on the same rows. Then
// the outputs of both are added. With a short convolution, the mixer is c times the convolution of b times x. If mixer_input
// has 0 outputs, the layer is an MLP with its norm; without an MLP and experts it is a mixer with its norm.
typedef struct SwDecoderLayer {
  int32_t hidden;
  int32_t intermediate;
  int32_t rotary_dim;  // leading dimensions of a head that are rotated; 0 for none
  int32_t activation;  // SwActivation
  float norm_eps;
  float residual_scale;  // factor on the outputs of attention and MLP
  int32_t gates_attention;  // whether the attention's output is multiplied by the sigmoid of gates
  int32_t norms_together;   // whether query_norm and key_norm are over all heads at once
  SwAttention attention;    // 0 heads for none
  SwKvCache cache;
  const SwGatedDeltaNet *delta_net;        // the recurrent mixers; null for attention
  const SwMamba2 *mamba2;
  const SwConvolution *short_convolution;
  // Outputs for attention: heads of queries, keys, values and gates; delta net: qkv, z, b, a; Mamba 2: gate, x, B, C, step;
  // short convolution: b, c, x. A mixer next to the attention follows it.
  SwWeight mixer_input;
  SwWeight mixer_output;
  SwWeight parallel_output;  // of the recurrent mixer next to the attention
  SwWeight gate_up;       // outputs: gate, then up; up alone for SW_RELU_SQUARED
  SwWeight down;
  const float *attention_norm;       // [hidden] before the attention; null for none
  const float *attention_post_norm;  // [hidden] on the attention's output; null for none
  const float *mlp_norm;
  const float *mlp_post_norm;
  const float *query_norm;           // [key_dim] for each head, or [heads, key_dim] together; null for none
  const float *key_norm;
  const SwExperts *experts;          // null for none
} SwDecoderLayer;

// Cos and sin of all rotary positions, each [positions, dim].
typedef struct SwRotary {
  const float *cos;
  const float *sin;
} SwRotary;

// The rows of an embedding as a checkpoint stores them.
typedef struct SwEmbedding {
  int32_t format;       // SwBlockFormat
  int64_t row_bytes;
  const uint8_t *rows;  // [vocabulary, row_bytes], of any alignment
} SwEmbedding;

// A model: embedding, decoder layers, RMSNorm, head. All that it points at must outlive it.
typedef struct SwModel {
  int32_t hidden;
  int32_t num_layers;
  float embedding_scale;
  float norm_eps;
  float logits_scale;    // factor on the logits
  float logits_softcap;  // logits x become softcap * tanh(x / softcap); 0 for none
  SwEmbedding embedding;                // [vocabulary, hidden]
  const SwDecoderLayer *const *layers;  // [num_layers]
  const SwRotary *const *rotaries;      // [num_layers] each as wide as the layer's rotary_dim; null where that is 0
  const float *norm;                    // [hidden]
  SwWeight head;
} SwModel;

// Inputs of a model pass in addition to the step, and buffers for its outputs.
typedef struct SwPass {
  int32_t num_logits;
  const int32_t *tokens;        // [T] below the size of the vocabulary
  const int32_t *angles;        // [T] each token's row of the rotary tables; null: its position
  const int32_t *logits_index;  // [num_logits] tokens whose logits are wanted
  float *logits;                // [num_logits, outputs of the head]
  float *const *layer_inputs;   // [num_layers] each [T, hidden], receives the layer's input; null if not wanted
  float *last;                  // [T, hidden] receives the output of the last norm; null if not wanted
} SwPass;

// How to choose the token of a row of logits.
typedef struct SwPick {
  int64_t row;
  uint64_t key;          // noise key
  double temperature;    // divisor of the logits; 0 takes the highest
  const uint32_t *mask;  // bit t % 32 of word t / 32: whether token t is allowed; null if all are
} SwPick;

// A Hydra head: u = R z + r + silu(W z + b), then u + silu(V u + c) for each further layer, then the logits of u.
typedef struct SwHydraHead {
  SwWeight linear;          // W and b: [hidden, inputs], inputs as in SwHydra
  SwWeight res_connection;  // R and r: [hidden, inputs], of the same kind
  const SwWeight *layers;   // [num_layers - 1] V and c: [hidden, hidden] each
  SwWeight logits;          // [draft vocabulary, hidden]
} SwHydraHead;

// Draft heads. Head i (1, 2, ...) takes the target's features at a token, joined with the embeddings of the i tokens
// after it, and predicts the next token.
typedef struct SwHydra {
  int32_t hidden;
  int32_t num_features;
  int32_t depth;
  int32_t num_layers;
  const SwHydraHead *heads;  // [depth]
  const int32_t *draft_ids;  // [draft vocabulary] the target's ids; null if they are the same
  const float *feature_scale;  // [num_features, hidden] factors of the features
} SwHydra;

// A choice to draft for.
typedef struct SwDraftChoice {
  int64_t row;         // row of the features: the last token that was computed
  int32_t token;       // the newest token, which follows it
  int32_t max_nodes;   // size limit of its tree
  double temperature;  // 0 takes the most probable tokens; above 0, children are drawn from the draft with noise
  uint64_t seed;       // seed of the target's noise for the next token
  int64_t choice;      // number of the choice, for the noise
  int64_t position;    // output position of the next token, for the noise (noise_key in sampling/noise.py)
} SwDraftChoice;

// Inputs and outputs of a draft. The limits are those in GrowthLimits of speculative/growing.py.
typedef struct SwDraft {
  int32_t num_choices;
  int32_t width;  // at least every choice's max_nodes
  int32_t max_depth;
  int32_t branches;
  int32_t front;
  int32_t candidates;
  double least;
  double followed;
  float embedding_scale;
  SwEmbedding embedding;         // [vocabulary, hidden]
  const float *const *features;  // [num_features] [., hidden] each
  const SwDraftChoice *choices;  // [num_choices]
  int32_t *num_nodes;            // [num_choices] receives the size of each tree
  int32_t *tokens;               // [num_choices, width] receives the tokens of each tree, most probable nodes first
  int32_t *parents;              // [num_choices, width] receives parents: an earlier node, or -1 for the newest token
  double *confidence;            // [num_choices, width] receives each node's confidence
} SwDraft;

// The truncation steps of sampling/truncations.py.
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

// Moves a token's key and value to another place.
typedef struct SwMove {
  int32_t from_block;
  int32_t from_offset;
  int32_t to_block;
  int32_t to_offset;
} SwMove;

// The functions for an instruction set, of which a library may have several.
typedef struct SwKernels {
  const char *isa;
#define SW_FUNCTION(result, name, arguments) result(*name) arguments;
#include "functions.h"
} SwKernels;

// isa is "avx512bf16", "avx512vnni", "avx2", "portable", or "auto" for the best that this machine supports. Returns
// null if the machine does not support it. There may be fewer threads if the system refuses: sw_threads returns their
// number.
SW_PUBLIC SwContext *sw_create(int32_t threads, const char *isa);
SW_PUBLIC void sw_destroy(SwContext *context);
SW_PUBLIC int32_t sw_threads(const SwContext *context);

// The functions for the context's instruction set.
SW_PUBLIC const SwKernels *sw_kernels(const SwContext *context);

// The size of a struct by name, or -1. Python compares it with the size it computed from this file.
SW_PUBLIC int64_t sw_size_of(const char *name);

#ifdef __cplusplus
}
#endif
