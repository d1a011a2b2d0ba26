// Attention, recurrent layers, decoder layers and whole forward passes for the instruction set SW_ISA, which the compiler options define.
// They are a file of their own so that two compilers share the work.
#include "convolution.h"
#include "decoder.h"
#include "indexer.h"
#include "kv_cache.h"
#include "recurrence.h"
#include "runtime.h"
#include "selective_scan.h"

namespace SW_ISA::entry {

int32_t linears(SwContext *context, const SwWeight *weights, int32_t count, const float *x, int32_t num_rows,
                float *y) {
  const int64_t inputs = weights->inputs, outputs = outputs_of_all(*weights), panels = panels_of_all(*weights);
  const int64_t units = (num_rows + kUnitRows - 1) / kUnitRows;
  context->pool.for_each(count * units, [&](int64_t unit) {
    thread_local ThreadMemory memory;
    const int64_t index = unit / units, first_row = unit % units * kUnitRows;
    const int64_t rows = std::min<int64_t>(kUnitRows, num_rows - first_row);
    char *data = memory.reserve(rows * (row_bytes(inputs) + sizeof(float)));
    const QuantizedRows quantized = lay_out_rows(inputs, data, reinterpret_cast<float *>(data + rows * row_bytes(inputs)));
    for (int64_t row = 0; row < rows; ++row)
      quantize_row(x + ((first_row + row) * count + index) * inputs, weights[index], quantized, row);
    multiply_unit(weights[index], quantized, 0, rows, 0, panels,
                  [&](int64_t row, int64_t first, int64_t number, const float *results) {
                    copy(results, number, y + ((first_row + row) * count + index) * outputs + first);
                  });
  });
  return 0;
}

int32_t attention(SwContext *context, const SwKvCache *cache, const SwStep *step, const SwAttention *options,
                  const float *query, const float *key, const float *value, float *output) {
  const SwStep &own = step_of(*cache, *step);
  const int64_t kv_heads = cache->kv_heads, key_dim = cache->key_dim, value_dim = cache->value_dim;
  context->pool.for_each(key ? step->num_tokens : 0, [&](int64_t token) {
    write_kv(*cache, own, token, key + token * kv_heads * key_dim, value + token * kv_heads * value_dim);
  });
  attend(context->pool, *cache, own, *options, query, options->heads * key_dim, output, options->heads * value_dim);
  return 0;
}

int32_t select(SwContext *context, const SwKvCache *cache, const SwStep *step, const SwIndexer *indexer,
               const float *query, const float *key, const float *weights, uint16_t *selected, int32_t width) {
  const SwStep &own = step_of(*cache, *step);
  context->pool.for_each(step->num_tokens,
                         [&](int64_t token) { write_kv(*cache, own, token, key + token * cache->key_dim, key); });
  const Scoring scoring{*cache, own, *indexer, weights ? 1 : indexer->heads};
  char *scores = context->reserve(scoring.scratch_bytes());
  if (!scores) return 1;
  select_rows(context->pool, scoring, query, weights, selected, width, reinterpret_cast<float *>(scores));
  return 0;
}

int32_t forward(SwContext *context, const SwModel *model, const SwStep *step, const SwPass *pass) {
  char *memory = context->reserve(PassScratch::lay_out(*model, *step, *pass, nullptr, nullptr));
  if (!memory) return 1;
  PassScratch scratch;
  PassScratch::lay_out(*model, *step, *pass, memory, &scratch);
  ForwardRun(context->pool, *model, *step, *pass, scratch).run();
  return 0;
}

int32_t recur(SwContext *context, const SwRecurrence *recurrence, const SwStatePlan *plan, const float *query,
              const float *key, const float *value, const float *log_decay, const float *beta, float *output) {
  const int64_t key_stride = int64_t{recurrence->key_heads} * recurrence->key_dim;
  const int64_t value_stride = int64_t{recurrence->heads} * recurrence->value_dim;
  SW_ISA::recur(context->pool, *recurrence, *plan, {query, key, value, key_stride, value_stride, beta, output, value_stride},
                log_decay);
  return 0;
}

int32_t scan(SwContext *context, const SwScan *scan, const SwStatePlan *plan, const float *steps, const float *values,
             const float *b, const float *c, float *output) {
  SW_ISA::scan(context->pool, *scan, *plan, {steps, values, b, c, output});
  return 0;
}

int32_t convolve(SwContext *context, const SwConvolution *convolution, const SwStatePlan *plan, const float *x,
                 float *output) {
  SW_ISA::convolve(context->pool, *convolution, *plan, x, convolution->channels, output);
  return 0;
}

}  // namespace SW_ISA::entry
