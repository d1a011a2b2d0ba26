// The library without its kernels: the choice of an instruction set, threads and scratch memory.
#include "samewise.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "runtime.h"

namespace {

#if defined(__x86_64__)
bool supports(const SwKernels &kernels) {
  if (&kernels == &samewise::avx512bf16_kernels && !__builtin_cpu_supports("avx512bf16")) return false;
  if (&kernels == &samewise::avx512bf16_kernels || &kernels == &samewise::avx512vnni_kernels)
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (&kernels == &samewise::avx2_kernels)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return true;
}
#else
bool supports(const SwKernels &) { return true; }
#endif

// The best kernels of this library that the processor supports, or those that are named; null if there are none.
const SwKernels *find_kernels(const char *isa) {
  const SwKernels *best_first[] = {
#if defined(__x86_64__)
      &samewise::avx512bf16_kernels, &samewise::avx512vnni_kernels, &samewise::avx2_kernels,
#endif
      &samewise::portable_kernels};
  for (const SwKernels *kernels : best_first)
    if (kernels && (!std::strcmp(isa, "auto") || !std::strcmp(isa, kernels->isa)) && supports(*kernels)) return kernels;
  return nullptr;
}

}  // namespace

SwContext *sw_create(int32_t threads, const char *isa) {
  const SwKernels *kernels = find_kernels(isa);
  try {
    return kernels ? new SwContext{*kernels, samewise::ThreadPool(threads), {}} : nullptr;
  } catch (...) {  // memory ran out
    return nullptr;
  }
}

void sw_destroy(SwContext *context) { delete context; }

int32_t sw_threads(const SwContext *context) { return context->pool.size(); }

const SwKernels *sw_kernels(const SwContext *context) { return &context->kernels; }

int64_t sw_size_of(const char *name) {
#define SIZE_OF(type) {#type, sizeof(type)}
  static constexpr std::pair<const char *, int64_t> sizes[] = {
      SIZE_OF(SwKvCache), SIZE_OF(SwStep), SIZE_OF(SwAttention), SIZE_OF(SwIndexer), SIZE_OF(SwWeight), SIZE_OF(SwExperts),
      SIZE_OF(SwDecoderLayer), SIZE_OF(SwRotary), SIZE_OF(SwEmbedding), SIZE_OF(SwModel), SIZE_OF(SwPass),
      SIZE_OF(SwPick), SIZE_OF(SwHydraHead), SIZE_OF(SwHydra), SIZE_OF(SwDraftChoice), SIZE_OF(SwDraft), SIZE_OF(SwTruncation),
      SIZE_OF(SwMove), SIZE_OF(SwSegment), SIZE_OF(SwStatePlan), SIZE_OF(SwRows), SIZE_OF(SwRecurrence), SIZE_OF(SwConvolution),
      SIZE_OF(SwGatedDeltaNet), SIZE_OF(SwMamba2), SIZE_OF(SwScan), SIZE_OF(SwKernels)};
#undef SIZE_OF
  for (const auto &[struct_name, size] : sizes)
    if (!std::strcmp(name, struct_name)) return size;
  return -1;
}

// ---------------------------------------------------------------------------------------------------------------------

namespace samewise {

Memory::~Memory() { std::free(memory_); }

char *Memory::reserve(int64_t bytes, bool is_zero) {
  if (bytes <= size_) return memory_;
  std::free(memory_);
  size_ = (bytes + 63) / 64 * 64;
  memory_ = static_cast<char *>(std::aligned_alloc(64, size_));
  if (!memory_) {
    size_ = 0;
    throw std::bad_alloc();
  }
  if (is_zero) std::memset(memory_, 0, size_);
  return memory_;
}

// The threads of a pool.

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
