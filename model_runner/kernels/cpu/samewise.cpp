// The C interface: selects the instruction set, and owns threads and scratch memory.
#include "samewise.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "runtime.h"

namespace {

using samewise::Kernels;

#if defined(__x86_64__)
bool supports(const Kernels &kernels) {
  if (&kernels == &samewise::avx512bf16_kernels && !__builtin_cpu_supports("avx512bf16")) return false;
  if (&kernels == &samewise::avx512bf16_kernels || &kernels == &samewise::avx512vnni_kernels)
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (&kernels == &samewise::avx2_kernels)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return true;
}
#else
bool supports(const Kernels &) { return true; }
#endif

// The best kernels of this library that the processor supports, or those that are named; null if there are none.
const Kernels *find_kernels(const char *isa) {
  const Kernels *best_first[] = {
#if defined(__x86_64__)
      &samewise::avx512bf16_kernels, &samewise::avx512vnni_kernels, &samewise::avx2_kernels,
#endif
      &samewise::portable_kernels};
  for (const Kernels *kernels : best_first)
    if (kernels && (!std::strcmp(isa, "auto") || !std::strcmp(isa, kernels->isa)) && supports(*kernels)) return kernels;
  return nullptr;
}

// Runs work that may fail, because memory or threads ran out; then returns 1, as nothing may be thrown at C.
template <typename Work>
int32_t guarded(const Work &work) noexcept {
  try {
    return work();
  } catch (...) {
    return 1;
  }
}

}  // namespace

SwContext::SwContext(const Kernels &kernels, int threads) : kernels(kernels), pool(threads) {}

SwContext::~SwContext() { std::free(scratch_); }

char *SwContext::reserve(int64_t bytes) {
  if (bytes > size_) {
    std::free(scratch_);
    const int64_t rounded = (bytes + 4095) / 4096 * 4096;
    scratch_ = static_cast<char *>(std::aligned_alloc(64, rounded));
    size_ = scratch_ ? rounded : 0;
  }
  return scratch_;
}

SwContext *sw_create(int32_t threads, const char *isa) {
  SwContext *made = nullptr;
  guarded([&] {
    if (const Kernels *kernels = find_kernels(isa)) made = new SwContext(*kernels, threads);
    return 0;
  });
  return made;
}

void sw_destroy(SwContext *context) { delete context; }

const char *sw_isa(const SwContext *context) { return context->kernels.isa; }

int32_t sw_threads(const SwContext *context) { return context->pool.size(); }

int64_t sw_packed_size(const SwContext *context, int32_t kind, int32_t outputs, int32_t inputs) {
  return context->kernels.packed_size(context, kind, outputs, inputs);
}

int32_t sw_repacked_kind(int32_t format) {
  switch (format) {
    case SW_Q4_1: return SW_INT4;
    case SW_Q4_0: case SW_TQ1_0: case SW_TQ2_0: return SW_AS_Q4_0;
    case SW_Q4_ZERO: return SW_AS_Q4_ZERO;
    case SW_Q4_K: return SW_AS_Q4_K;
    case SW_IQ4_NL: return SW_AS_IQ4_NL;
    case SW_IQ4_XS: return SW_AS_IQ4_XS;
    case SW_MXFP4: return SW_AS_MXFP4;
    case SW_NVFP4: return SW_AS_NVFP4;
    case SW_Q5_0: case SW_Q8_0: return SW_AS_Q8_0;
    case SW_Q5_1: return SW_AS_Q5_1;
    case SW_Q2_K: case SW_Q5_K: return SW_AS_Q5_K;
    case SW_Q3_K: case SW_Q6_K: case SW_IQ1_S: case SW_IQ1_M: case SW_IQ2_XXS: case SW_IQ2_XS: case SW_IQ2_S:
    case SW_IQ3_XXS: case SW_IQ3_S: return SW_AS_Q6_K;
    default: return -1;
  }
}

int32_t sw_repack(SwContext *context, int32_t format, const uint8_t *blocks, int64_t row_bytes, const int32_t *order,
                  int32_t outputs, int32_t inputs, int8_t *packed) {
  return guarded([&] {
    return context->kernels.repack(context, format, blocks, row_bytes, order, outputs, inputs, packed);
  });
}

int32_t sw_pack(SwContext *context, int32_t kind, const float *weight, int32_t outputs, int32_t inputs, int8_t *packed,
                float *scales) {
  return guarded([&] { return context->kernels.pack(context, kind, weight, outputs, inputs, packed, scales); });
}

int32_t sw_unpack(SwContext *context, int32_t format, const uint8_t *blocks, int64_t row_bytes, const int32_t *rows,
                  int32_t count, int32_t inputs, float *y) {
  return guarded([&] {
    return context->kernels.unpack(context, format, blocks, row_bytes, rows, count, inputs, y);
  });
}

int32_t sw_linear(SwContext *context, const SwWeight *weight, const float *x, int32_t rows, float *y) {
  return rows == 0 ? 0 : guarded([&] { return context->kernels.linear(context, weight, x, rows, y); });
}

int32_t sw_linears(SwContext *context, const SwWeight *weights, int32_t count, const float *x, int32_t rows,
                   float *y) {
  return rows == 0 ? 0 : guarded([&] { return context->kernels.linears(context, weights, count, x, rows, y); });
}

int32_t sw_attention(SwContext *context, const SwKvCache *cache, const SwStep *step, const SwAttention *attention,
                     const float *query, const float *key, const float *value, float *output) {
  if (step->num_tokens == 0) return 0;
  return guarded([&] {
    return context->kernels.attention(context, cache, step, attention, query, key, value, output);
  });
}

int32_t sw_select(SwContext *context, const SwKvCache *cache, const SwStep *step, const SwIndexer *indexer,
                  const float *query, const float *key, const float *weights, uint16_t *selected, int32_t width) {
  if (step->num_tokens == 0) return 0;
  return guarded([&] {
    return context->kernels.select(context, cache, step, indexer, query, key, weights, selected, width);
  });
}

int32_t sw_forward(SwContext *context, const SwModel *model, const SwStep *step, const SwPass *pass) {
  return step->num_tokens == 0 ? 0 : guarded([&] { return context->kernels.forward(context, model, step, pass); });
}

int32_t sw_experts(SwContext *context, const SwExperts *experts, const float *x, const int32_t *chosen,
                   const float *weights, int32_t rows, float *output) {
  if (rows == 0) return 0;
  return guarded([&] { return context->kernels.experts(context, experts, x, chosen, weights, rows, output); });
}

int32_t sw_pick(SwContext *context, const float *logits, int64_t width, const SwPick *picks, int32_t count,
                int64_t *tokens) {
  return guarded([&] { return context->kernels.pick(context, logits, width, picks, count, tokens); });
}

int32_t sw_draft(SwContext *context, const SwHydra *hydra, const SwDraft *draft) {
  return guarded([&] { return context->kernels.draft(context, hydra, draft); });
}

int32_t sw_truncate(SwContext *context, const float *logits, int32_t rows, int64_t width, const SwTruncation *steps,
                    const int32_t *first_step, float *output) {
  return guarded([&] { return context->kernels.truncate(context, logits, rows, width, steps, first_step, output); });
}

int32_t sw_move_kv(SwContext *context, const SwKvCache *layers, int32_t num_layers, const SwMove *moves,
                   int32_t count) {
  return guarded([&] { return context->kernels.move_kv(context, layers, num_layers, moves, count); });
}

int32_t sw_recur(SwContext *context, const SwRecurrence *recurrence, const SwStatePlan *plan, const float *query,
                 const float *key, const float *value, const float *log_decay, const float *beta, float *output) {
  return guarded([&] {
    return context->kernels.recur(context, recurrence, plan, query, key, value, log_decay, beta, output);
  });
}

int32_t sw_scan(SwContext *context, const SwScan *scan, const SwStatePlan *plan, const float *steps,
                const float *values, const float *b, const float *c, float *output) {
  return guarded([&] { return context->kernels.scan(context, scan, plan, steps, values, b, c, output); });
}

int32_t sw_convolve(SwContext *context, const SwConvolution *convolution, const SwStatePlan *plan, const float *x,
                    float *output) {
  return guarded([&] { return context->kernels.convolve(context, convolution, plan, x, output); });
}

int64_t sw_size_of(const char *name) {
#define SIZE_OF(type) {#type, sizeof(type)}
  static constexpr std::pair<const char *, int64_t> sizes[] = {
      SIZE_OF(SwKvCache), SIZE_OF(SwStep), SIZE_OF(SwAttention), SIZE_OF(SwIndexer), SIZE_OF(SwWeight), SIZE_OF(SwExperts),
      SIZE_OF(SwDecoderLayer), SIZE_OF(SwRotary), SIZE_OF(SwEmbedding), SIZE_OF(SwModel), SIZE_OF(SwPass),
      SIZE_OF(SwPick), SIZE_OF(SwHydraHead), SIZE_OF(SwHydra), SIZE_OF(SwDraftChoice), SIZE_OF(SwDraft), SIZE_OF(SwTruncation),
      SIZE_OF(SwMove), SIZE_OF(SwSegment), SIZE_OF(SwStatePlan), SIZE_OF(SwRows), SIZE_OF(SwRecurrence), SIZE_OF(SwConvolution),
      SIZE_OF(SwGatedDeltaNet), SIZE_OF(SwMamba2), SIZE_OF(SwScan)};
#undef SIZE_OF
  for (const auto &[struct_name, size] : sizes)
    if (!std::strcmp(name, struct_name)) return size;
  return -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// The threads of a pool.

namespace samewise {
namespace {

constexpr int kAwakeTurns = 4000;  // some tens of microseconds, longer than Python needs between two layers

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline uint32_t loop_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

inline uint32_t left_of(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

}  // namespace

ThreadPool::ThreadPool(int threads) {
  try {
    workers_.reserve(std::max(threads - 1, 0));
    for (int index = 1; index < threads; ++index) workers_.emplace_back([this] { serve(); });
  } catch (const std::exception &) {
    // The system gives no more threads, or no memory for them. The existing threads do the work.
  }
}

ThreadPool::~ThreadPool() {
  ending_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (std::thread &worker : workers_) worker.join();
}

void ThreadPool::run(uint32_t count, Call call, const void *context) {
  call_ = call;
  context_ = context;
  count_ = count;
  done_.store(0, std::memory_order_relaxed);
  const uint32_t loop = loop_of(ticket_.load(std::memory_order_relaxed)) + 1;
  ticket_.store(uint64_t{loop} << 32 | count);
  if (asleep_.load() > 0) {
    wake_.fetch_add(1);
    wake_.notify_all();
  }
  while (take_unit(loop)) {
  }
  uint32_t done;
  for (int turns = 0; (done = done_.load(std::memory_order_acquire)) != count; ++turns) {
    if (turns < kAwakeTurns)
      pause();
    else
      done_.wait(done, std::memory_order_acquire);
  }
  if (failed_.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
}

bool ThreadPool::take_unit(uint32_t loop) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if (loop_of(ticket) != loop || left_of(ticket) == 0) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire));
  const uint32_t count = count_;
  try {
    call_(context_, count - left_of(ticket));
  } catch (...) {
    failed_.store(true, std::memory_order_relaxed);  // `done_` makes it visible
  }
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) done_.notify_one();
  return true;
}

void ThreadPool::serve() {
  for (uint32_t loop = 0; !ending_.load();) {
    loop = next_loop(loop);
    while (take_unit(loop)) {
    }
  }
}

// Waits for the next loop, or for the end. It first spins, then sleeps, because with few cores other work needs this
// one.
uint32_t ThreadPool::next_loop(uint32_t last) {
  for (int turns = 0; turns < kAwakeTurns; ++turns) {
    const uint32_t loop = loop_of(ticket_.load(std::memory_order_acquire));
    if (loop != last) return loop;
    pause();
  }
  const uint32_t woken = wake_.load();
  asleep_.fetch_add(1);
  while (loop_of(ticket_.load()) == last && !ending_.load() && wake_.load() == woken) wake_.wait(woken);
  asleep_.fetch_sub(1);
  return loop_of(ticket_.load(std::memory_order_acquire));
}

}  // namespace samewise
