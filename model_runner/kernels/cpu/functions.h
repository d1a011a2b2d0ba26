// The functions of the kernels, each once: SW_FUNCTION(result, name, arguments). Files that include this one define
// SW_FUNCTION before: samewise.h makes SwKernels of it, and kernels.cpp a table of the functions for an instruction set.
//
// Functions return 0, or 1 if memory ran out, where they do not say otherwise.

// Size of a packed weight in bytes, without other weights of a chain.
SW_FUNCTION(int64_t, sw_packed_size, (int32_t kind, int32_t outputs, int32_t inputs))

// Quantises weight[outputs, inputs] to int8 or int4.
SW_FUNCTION(int32_t, sw_pack, (SwContext *context, int32_t kind, const float *weight, int32_t outputs, int32_t inputs,
                               int8_t *packed, float *scales))

// y[count, inputs] = rows of a matrix in `format` (SwBlockFormat), whose rows have row_bytes bytes: rows[0] to
// rows[count - 1], or its first ones if `rows` is null. Inputs are whole blocks. Blocks may have any alignment.
SW_FUNCTION(int32_t, sw_unpack, (SwContext *context, int32_t format, const uint8_t *blocks, int64_t row_bytes,
                                 const int32_t *rows, int32_t count, int32_t inputs, float *y))

// The kind of weight that a block format is repacked to, with every weight's value; -1 for none.
SW_FUNCTION(int32_t, sw_repacked_kind, (int32_t format))

// Packs rows of a matrix in a block format, as sw_unpack reads them: order[0] to order[outputs - 1], or in order if that
// is null. Scales of the result are 1. Returns 2 if a block's scale or minimum is not finite.
SW_FUNCTION(int32_t, sw_repack, (SwContext *context, int32_t format, const uint8_t *blocks, int64_t row_bytes,
                                 const int32_t *order, int32_t outputs, int32_t inputs, int8_t *packed))

// y[rows, outputs] = x[rows, inputs] times the weight and those that follow in its chain, with x rounded to integers with
// one scale per row.
SW_FUNCTION(int32_t, sw_linear, (SwContext *context, const SwWeight *weight, const float *x, int32_t rows, float *y))

// y[rows, count, outputs] = x[rows, count, inputs], each of `count` vectors times the weight of its own. All weights have
// the same shape and kind.
SW_FUNCTION(int32_t, sw_linears, (SwContext *context, const SwWeight *weights, int32_t count, const float *x,
                                  int32_t rows, float *y))

// Writes key and value to the cache, then attends: query [T, heads, key_dim], key [T, kv_heads, key_dim],
// value [T, kv_heads, value_dim], output [T, heads, value_dim]. Without a key, they are in the cache already.
SW_FUNCTION(int32_t, sw_attention, (SwContext *context, const SwKvCache *cache, const SwStep *step,
                                    const SwAttention *attention, const float *query, const float *key,
                                    const float *value, float *output))

// Writes index keys [T, key_dim] to the cache, whose values have no numbers, then selects for query [T, heads, key_dim]:
// selected[T, 1, width] with weights [T, heads], or selected[T, heads, width] without, as SwAttention takes them.
SW_FUNCTION(int32_t, sw_select, (SwContext *context, const SwKvCache *cache, const SwStep *step,
                                 const SwIndexer *indexer, const float *query, const float *key, const float *weights,
                                 uint16_t *selected, int32_t width))

// Runs the model on a step's tokens.
SW_FUNCTION(int32_t, sw_forward, (SwContext *context, const SwModel *model, const SwStep *step, const SwPass *pass))

// output[rows, hidden] = weighted sum of the outputs of experts chosen[rows, top_k] for x[rows, hidden], added in the
// order of `chosen`. Does not use the router.
SW_FUNCTION(int32_t, sw_experts, (SwContext *context, const SwExperts *experts, const float *x, const int32_t *chosen,
                                  const float *weights, int32_t rows, float *output))

// tokens[count] = the token chosen for each pick in logits[., width], the lowest among equals; -1 if an allowed logit
// is NaN or +inf, or no allowed logit is finite.
SW_FUNCTION(int32_t, sw_pick, (SwContext *context, const float *logits, int64_t width, const SwPick *picks,
                               int32_t count, int64_t *tokens))

// Drafts a tree for each choice.
SW_FUNCTION(int32_t, sw_draft, (SwContext *context, const SwHydra *hydra, const SwDraft *draft))

// output[rows, width] = logits[rows, width] after the steps first_step[row] to first_step[row + 1] - 1 of each row,
// with -inf for removed tokens. Each row must have at least one finite entry and no NaN or +inf.
SW_FUNCTION(int32_t, sw_truncate, (SwContext *context, const float *logits, int32_t rows, int64_t width,
                                   const SwTruncation *steps, const int32_t *first_step, float *output))

// Makes the moves in the caches of all layers. No move may read a place that an earlier one has written.
SW_FUNCTION(int32_t, sw_move_kv, (SwContext *context, const SwKvCache *layers, int32_t num_layers, const SwMove *moves,
                                  int32_t count))

// Writes the rows of T tokens, computes their outputs, and writes pages. query and key [T, key_heads, key_dim],
// value and output [T, heads, value_dim], log_decay [T, heads], or [T, heads, key_dim] per channel; beta [T, heads],
// or null if no update depends on what the state already answers.
SW_FUNCTION(int32_t, sw_recur, (SwContext *context, const SwRecurrence *recurrence, const SwStatePlan *plan,
                                const float *query, const float *key, const float *value, const float *log_decay,
                                const float *beta, float *output))

// Writes the rows of T tokens, computes their outputs, and writes pages. steps, values and output [T, channels], b and c
// [T, num_states].
SW_FUNCTION(int32_t, sw_scan, (SwContext *context, const SwScan *scan, const SwStatePlan *plan, const float *steps,
                               const float *values, const float *b, const float *c, float *output))

// Writes the rows x[T, channels], computes output[T, channels], and writes pages.
SW_FUNCTION(int32_t, sw_convolve, (SwContext *context, const SwConvolution *convolution, const SwStatePlan *plan,
                                   const float *x, float *output))

#undef SW_FUNCTION
