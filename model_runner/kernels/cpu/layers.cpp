// Attention, recurrences and whole forward passes for the instruction set SW_ISA, which the compiler options define. They
// are a file of their own so that two compilers share the work.
#include "convolution.h"
#include "decoder.h"
#include "indexer.h"
#include "kv_cache.h"
#include "recurrence.h"
#include "runtime.h"
#include "selective_scan.h"

namespace SW_ISA {

int32_t sw_linears(SwContext *context, const SwWeight *weights, int32_t count, const float *x, int32_t num_rows,
                   float *y) {
  const int64_t inputs = weights->inputs, outputs = outputs_of_all(*weights), panels = panels_of_all(*weights);
  const int64_t units = (num_rows + kUnitRows - 1) / kUnitRows;
  context->pool.for_each(count * units, [&](int64_t unit) {
    thread_local samewise::Memory memory;
    const int64_t index = unit / units, first_row = unit % units * kUnitRows;
    const int64_t rows = std::min<int64_t>(kUnitRows, num_rows - first_row);
    const QuantizedRows quantized = laid_out_in(memory, [&](ScratchAllocator &take) {
      return take_rows(take, inputs, rows);
    });
    for (int64_t row = 0; row < rows; ++row)
      quantize_row(x + ((first_row + row) * count + index) * inputs, weights[index], quantized, row);
    const Store store{y + (first_row * count + index) * outputs, count * outputs};
    multiply_unit(weights[index], quantized, 0, rows, 0, panels, store);
  });
  return 0;
}

int32_t sw_attention(SwContext *context, const SwKvCache *cache, const SwStep *step, const SwAttention *options,
                     const float *query, const float *key, const float *value, float *output) {
  const SwStep &own = step_of(*cache, *step);
  const int64_t kv_heads = cache->kv_heads, key_dim = cache->key_dim, value_dim = cache->value_dim;
  context->pool.for_each(key ? step->num_tokens : 0, [&](int64_t token) {
    write_kv(*cache, own, token, key + token * kv_heads * key_dim, value + token * kv_heads * value_dim);
  });
  attend(context->pool, *cache, own, *options, query, options->heads * key_dim, output, options->heads * value_dim);
  return 0;
}

int32_t sw_select(SwContext *context, const SwKvCache *cache, const SwStep *step, const SwIndexer *indexer,
                  const float *query, const float *key, const float *weights, uint16_t *selected, int32_t width) {
  if (step->num_tokens == 0) return 0;
  const SwStep &own = step_of(*cache, *step);
  context->pool.for_each(step->num_tokens,
                         [&](int64_t token) { write_kv(*cache, own, token, key + token * cache->key_dim, key); });
  const Scoring scoring{*cache, own, *indexer, weights ? 1 : indexer->heads};
  float *scores = reinterpret_cast<float *>(context->memory.reserve(scoring.scratch_bytes()));
  select_rows(context->pool, scoring, query, weights, selected, width, scores);
  return 0;
}

int32_t sw_forward(SwContext *context, const SwModel *model, const SwStep *step, const SwPass *pass) {
  if (step->num_tokens == 0) return 0;
  const PassScratch scratch = laid_out_in(context->memory, [&](ScratchAllocator &take) {
    return PassScratch::lay_out(*model, *step, *pass, take);
  });
  ForwardRun(context->pool, *model, *step, *pass, scratch).run();
  return 0;
}

int32_t sw_recur(SwContext *context, const SwRecurrence *recurrence, const SwStatePlan *plan, const float *query,
                 const float *key, const float *value, const float *log_decay, const float *beta, float *output) {
  const int64_t key_stride = int64_t{recurrence->key_heads} * recurrence->key_dim;
  const int64_t value_stride = int64_t{recurrence->heads} * recurrence->value_dim;
  recur(context->pool, *recurrence, *plan, {query, key, value, key_stride, value_stride, beta, output, value_stride},
                log_decay);
  return 0;
}

int32_t sw_scan(SwContext *context, const SwScan *layer, const SwStatePlan *plan, const float *steps, const float *values,
                const float *b, const float *c, float *output) {
  scan(context->pool, *layer, *plan, {steps, values, b, c, output});
  return 0;
}

int32_t sw_convolve(SwContext *context, const SwConvolution *convolution, const SwStatePlan *plan, const float *x,
                    float *output) {
  convolve(context->pool, *convolution, *plan, x, convolution->channels, output);
  return 0;
}

}  // namespace SW_ISA
