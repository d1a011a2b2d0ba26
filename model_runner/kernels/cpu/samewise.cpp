// The C interface: picks the instruction set, owns threads and scratch memory.
#include "samewise.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "isa.h"
#include "threads.h"

namespace {

using samewise::Kernels;

struct Free {
  void operator()(char *memory) const { std::free(memory); }
};

bool supports(const Kernels &kernels) {
#if defined(__x86_64__)
  if (&kernels == &samewise::avx512bf16_kernels)
    return supports(samewise::avx512vnni_kernels) && __builtin_cpu_supports("avx512bf16");
  if (&kernels == &samewise::avx512vnni_kernels)
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (&kernels == &samewise::avx2_kernels) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
#endif
  return &kernels == &samewise::portable_kernels;
}

const Kernels *find_kernels(const char *isa) {
  const Kernels *best_first[] = {
#if defined(__x86_64__)
      &samewise::avx512bf16_kernels, &samewise::avx512vnni_kernels, &samewise::avx2_kernels,
#endif
      &samewise::portable_kernels};
  for (const Kernels *kernels : best_first)
    if ((!std::strcmp(isa, "auto") || !std::strcmp(isa, kernels->isa)) && supports(*kernels)) return kernels;
  return nullptr;
}

}  // namespace

struct SwContext {
  SwContext(const Kernels &kernels, int threads) : kernels(kernels), pool(threads) {}

  // Scratch memory that stays for the next call; null when memory ran out.
  char *reserve(int64_t bytes) {
    if (bytes > size) {
      scratch.reset();
      const int64_t rounded = (bytes + 4095) / 4096 * 4096;
      scratch.reset(static_cast<char *>(std::aligned_alloc(64, rounded)));
      size = scratch ? rounded : 0;
    }
    return scratch.get();
  }

  const Kernels &kernels;
  samewise::ThreadPool pool;
  std::unique_ptr<char, Free> scratch;
  int64_t size = 0;
};

SwContext *sw_create(int32_t threads, const char *isa) {
  const Kernels *kernels = find_kernels(isa);
  if (!kernels) return nullptr;
  try {
    return new SwContext(*kernels, threads);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void sw_destroy(SwContext *context) { delete context; }

const char *sw_isa(const SwContext *context) { return context->kernels.isa; }

int32_t sw_threads(const SwContext *context) { return context->pool.size(); }

int64_t sw_packed_size(int32_t kind, int32_t outputs, int32_t inputs) {
  const int64_t panels = (int64_t{outputs} + 15) / 16;
  if (kind == SW_INT4) return panels * (inputs / 32) * 16 * (32 / 2 + 2 * sizeof(uint16_t));
  const int64_t multiple = kind == SW_INT8_ROTATED ? 64 : 2;
  return panels * 16 * ((inputs + multiple - 1) / multiple * multiple);
}

int32_t sw_pack(SwContext *context, int32_t kind, const float *weight, int32_t outputs, int32_t inputs, int8_t *packed,
                float *scales) {
  context->kernels.pack(context->pool, kind, weight, outputs, inputs, packed, scales);
  return 0;
}

int32_t sw_linear(SwContext *context, const SwWeight *weight, const float *x, int32_t rows, float *y) {
  if (rows == 0) return 0;
  char *scratch = context->reserve(context->kernels.linear_scratch(*weight, rows));
  if (!scratch) return 1;
  context->kernels.linear(context->pool, *weight, x, rows, y, scratch);
  return 0;
}

int32_t sw_attention(SwContext *context, const SwKvCache *cache, const SwStep *step, const SwAttention *attention,
                     const float *query, const float *key, const float *value, float *output) {
  if (step->num_tokens == 0) return 0;
  context->kernels.attention(context->pool, *cache, *step, *attention, query, key, value, output);
  return 0;
}

int32_t sw_decoder_layer(SwContext *context, const SwDecoderLayer *layer, const SwStep *step, const float *cos,
                         const float *sin, const float *input, float *output) {
  if (step->num_tokens == 0) return 0;
  char *scratch = context->reserve(context->kernels.layer_scratch(*layer, step->num_tokens));
  if (!scratch) return 1;
  context->kernels.layer(context->pool, *layer, *step, cos, sin, input, output, scratch);
  return 0;
}

int32_t sw_forward(SwContext *context, const SwModel *model, const SwStep *step, const SwPass *pass) {
  if (step->num_tokens == 0) return 0;
  char *scratch = context->reserve(context->kernels.forward_scratch(*model, *step, *pass));
  if (!scratch) return 1;
  context->kernels.forward(context->pool, *model, *step, *pass, scratch);
  return 0;
}

int32_t sw_experts(SwContext *context, const SwExperts *experts, const float *x, const int32_t *chosen,
                   const float *weights, int32_t rows, float *output) {
  if (rows == 0) return 0;
  char *scratch = context->reserve(context->kernels.experts_scratch(*experts, rows));
  if (!scratch) return 1;
  context->kernels.experts(context->pool, *experts, x, chosen, weights, rows, output, scratch);
  return 0;
}

int32_t sw_pick(SwContext *context, const float *logits, int64_t width, const SwPick *picks, int32_t count,
                int64_t *tokens) {
  context->kernels.pick(context->pool, logits, width, picks, count, tokens);
  return 0;
}

int32_t sw_draft(SwContext *context, const SwHydra *hydra, const SwDraft *draft) {
  char *scratch = context->reserve(context->kernels.draft_scratch(*hydra, *draft));
  if (!scratch) return 1;
  context->kernels.draft(context->pool, *hydra, *draft, scratch);
  return 0;
}

int32_t sw_truncate(SwContext *context, const float *logits, int32_t rows, int64_t width, const SwTruncation *steps,
                    const int32_t *first_step, float *output) {
  char *scratch = context->reserve(context->kernels.truncate_scratch(context->pool.size(), width));
  if (!scratch) return 1;
  context->kernels.truncate(context->pool, logits, rows, width, steps, first_step, output, scratch);
  return 0;
}

int32_t sw_move_kv(SwContext *context, const SwKvCache *layers, int32_t num_layers, const SwMove *moves,
                   int32_t count) {
  context->kernels.move_kv(context->pool, layers, num_layers, moves, count);
  return 0;
}
