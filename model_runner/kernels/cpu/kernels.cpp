// The kernels for the instruction set SW_ISA, which the compiler's options name and allow.
#include <algorithm>

#include "decoder_layer.h"
#include "forward.h"
#include "gumbel_max.h"
#include "hydra.h"
#include "isa.h"
#include "kv_move.h"
#include "memory.h"
#include "truncate.h"

namespace SW_ISA {
namespace {

using samewise::ThreadPool;

void pack(ThreadPool &pool, int32_t kind, const float *weight, int32_t outputs, int32_t inputs, int8_t *packed,
          float *scales) {
  with_panels(kind, [&](auto panels) {
    pool.for_each(num_panels(outputs),
                  [&](int64_t panel) { panels.pack(weight, outputs, inputs, panel, packed, scales); });
  });
}

int64_t linear_scratch(const SwWeight &weight, int32_t rows) {
  return rows * (row_bytes(weight.inputs) + sizeof(float));
}

void linear(ThreadPool &pool, const SwWeight &weight, const float *x, int32_t num_rows, float *y, char *scratch) {
  float *scales = reinterpret_cast<float *>(scratch + num_rows * row_bytes(weight.inputs));
  const QuantizedRows rows = lay_out_rows(weight.inputs, scratch, scales);
  pool.for_each(num_rows, [&](int64_t row) { quantize_row(x + row * weight.inputs, weight, rows, row); });
  multiply_rows(pool, weight, rows, num_rows, [&](int64_t row, int64_t first, int64_t count, const float *results) {
    std::memcpy(y + row * weight.outputs + first, results, count * sizeof(float));
  });
}

void attention(ThreadPool &pool, const SwKvCache &cache, const SwStep &step, const SwAttention &options, const float *query,
               const float *key, const float *value, float *output) {
  const int64_t kv_heads = cache.kv_heads, key_dim = cache.key_dim, value_dim = cache.value_dim;
  pool.for_each(step.num_tokens, [&](int64_t token) {
    write_kv(cache, step, token, key + token * kv_heads * key_dim, value + token * kv_heads * value_dim);
  });
  attend(pool, cache, step, options, query, options.heads * key_dim, output, options.heads * value_dim);
}

int64_t layer_scratch(const SwDecoderLayer &layer, int32_t rows) {
  return Scratch::lay_out(layer, rows, nullptr, nullptr);
}

void layer(ThreadPool &pool, const SwDecoderLayer &layer, const SwStep &step, const float *cos, const float *sin,
           const float *input, float *output, char *memory) {
  Scratch scratch;
  Scratch::lay_out(layer, step.num_tokens, memory, &scratch);
  LayerRun(pool, layer, step, scratch).run({cos, sin, nullptr}, input, output);
}

int64_t forward_scratch(const SwModel &model, const SwStep &step, const SwPass &pass) {
  return PassScratch::lay_out(model, step, pass, nullptr, nullptr);
}

void forward(ThreadPool &pool, const SwModel &model, const SwStep &step, const SwPass &pass, char *memory) {
  PassScratch scratch;
  PassScratch::lay_out(model, step, pass, memory, &scratch);
  ForwardRun(pool, model, step, pass, scratch).run();
}

// What the experts need beside their own scratch memory: the rows that all of them share.
QuantizedRows lay_out_experts(const SwExperts &experts, int32_t num_rows, Memory &memory, ExpertsScratch *scratch) {
  const int64_t hidden = experts.gate_up[0].inputs;
  char *data = memory(num_rows * row_bytes(hidden));
  float *scales = reinterpret_cast<float *>(memory(num_rows * sizeof(float)));
  *scratch = ExpertsScratch::lay_out(experts, num_rows, memory);
  return lay_out_rows(hidden, data, scales);
}

int64_t experts_scratch(const SwExperts &experts, int32_t rows) {
  Memory memory{};
  ExpertsScratch scratch;
  lay_out_experts(experts, rows, memory, &scratch);
  return memory.used;
}

void experts(ThreadPool &pool, const SwExperts &experts, const float *x, const int32_t *chosen, const float *weights,
             int32_t num_rows, float *output, char *place) {
  Memory memory{place, 0};
  ExpertsScratch scratch;
  const QuantizedRows rows = lay_out_experts(experts, num_rows, memory, &scratch);
  const int64_t hidden = experts.gate_up[0].inputs;
  pool.for_each(num_rows, [&](int64_t row) { quantize_row(x + row * hidden, experts.gate_up[0], rows, row); });
  ExpertsRun run(pool, experts, num_rows, scratch);
  run.set_choices(chosen, weights);
  run.multiply(rows);
  pool.for_each(num_rows, [&](int64_t row) { run.add(row, nullptr, output + row * hidden); });
}

void pick_tokens(ThreadPool &pool, const float *logits, int64_t width, const SwPick *picks, int32_t count,
                 int64_t *tokens) {
  pool.for_each(count, [&](int64_t i) {
    const LogitsRow row{logits + picks[i].row * width, width, picks[i].mask};
    tokens[i] = pick(row, picks[i].temperature, picks[i].key);
  });
}

int64_t draft_scratch(const SwHydra &hydra, const SwDraft &draft) {
  return DraftScratch::lay_out(hydra, draft, nullptr, nullptr);
}

void draft(ThreadPool &pool, const SwHydra &hydra, const SwDraft &draft, char *memory) {
  DraftScratch scratch;
  DraftScratch::lay_out(hydra, draft, memory, &scratch);
  DraftRun(pool, hydra, draft, scratch).run();
}

}  // namespace
}  // namespace SW_ISA

#define SW_TEXT_OF(name) #name
#define SW_TEXT(name) SW_TEXT_OF(name)
#define SW_JOIN_OF(a, b) a##b
#define SW_JOIN(a, b) SW_JOIN_OF(a, b)

namespace samewise {

extern const Kernels SW_JOIN(SW_ISA, _kernels) = {
    SW_TEXT(SW_ISA),       SW_ISA::pack,          SW_ISA::linear_scratch, SW_ISA::linear,
    SW_ISA::attention,       SW_ISA::layer_scratch, SW_ISA::layer,            SW_ISA::forward_scratch,
    SW_ISA::forward,         SW_ISA::experts_scratch, SW_ISA::experts,        SW_ISA::pick_tokens,
    SW_ISA::draft_scratch,   SW_ISA::draft,
    SW_ISA::truncate_scratch, SW_ISA::truncate,      SW_ISA::move_kv};

}  // namespace samewise
