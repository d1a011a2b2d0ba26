// What each instruction set offers to the C interface. kernels.cpp is compiled once for each and fills one table.
#pragma once
#include "samewise.h"
#include "threads.h"

namespace samewise {

struct Kernels {
  const char *isa;
  void (*pack)(ThreadPool &, int32_t kind, const float *weight, int32_t outputs, int32_t inputs, int8_t *packed,
               float *scales);
  int64_t (*linear_scratch)(const SwWeight &, int32_t rows);
  void (*linear)(ThreadPool &, const SwWeight &, const float *x, int32_t rows, float *y, char *scratch);
  void (*attention)(ThreadPool &, const SwKvCache &, const SwStep &, const SwAttention &, const float *query,
                    const float *key, const float *value, float *output);
  int64_t (*layer_scratch)(const SwDecoderLayer &, int32_t rows);
  void (*layer)(ThreadPool &, const SwDecoderLayer &, const SwStep &, const float *cos, const float *sin, const float *input,
                float *output, char *scratch);
  int64_t (*forward_scratch)(const SwModel &, const SwStep &, const SwPass &);
  void (*forward)(ThreadPool &, const SwModel &, const SwStep &, const SwPass &, char *scratch);
  int64_t (*experts_scratch)(const SwExperts &, int32_t rows);
  void (*experts)(ThreadPool &, const SwExperts &, const float *x, const int32_t *chosen, const float *weights,
                  int32_t rows, float *output, char *scratch);
  void (*pick)(ThreadPool &, const float *logits, int64_t width, const SwPick *picks, int32_t count,
               int64_t *tokens);
  int64_t (*draft_scratch)(const SwHydra &, const SwDraft &);
  void (*draft)(ThreadPool &, const SwHydra &, const SwDraft &, char *scratch);
  int64_t (*truncate_scratch)(int32_t threads, int64_t width);
  void (*truncate)(ThreadPool &, const float *logits, int32_t rows, int64_t width, const SwTruncation *steps,
                   const int32_t *first_step, float *output, char *scratch);
  void (*move_kv)(ThreadPool &, const SwKvCache *layers, int32_t num_layers, const SwMove *moves, int32_t count);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512vnni_kernels;
extern const Kernels avx512bf16_kernels;
#endif

}  // namespace samewise
