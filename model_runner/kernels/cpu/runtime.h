// Runtime of the kernels: threads, scratch memory, and the table of functions for an instruction set.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "samewise.h"

namespace samewise {

// Threads that share the units of one loop after another.
//
// The thread that owns the pool runs loops, one at a time; the others take units of the running loop. A loop ends when
// its units are done. It does not wait for threads that the system has suspended, unless they are in the middle of a
// unit.
class ThreadPool {
 public:
  // Makes `threads` threads including the owner, or fewer if the system refuses.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  // Calls work(i) for each i below count, which is below 2^32, on any free thread including the caller's. If a call
  // throws, memory ran out: for_each throws std::bad_alloc, at the latest when all other units are done.
  template <typename Work>
  void for_each(int64_t count, const Work &work) {
    if (count == 1 || workers_.empty()) {
      for (int64_t i = 0; i < count; ++i) work(i);
    } else if (count > 0) {
      run(count, [](const void *context, int64_t i) { (*static_cast<const Work *>(context))(i); }, &work);
    }
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  using Call = void (*)(const void *context, int64_t unit);

  void run(uint32_t count, Call call, const void *context);
  void serve();
  bool take_unit(uint32_t loop);
  uint32_t next_loop(uint32_t last);

  std::vector<std::thread> workers_;
  // The running loop. Read only by threads that hold a unit of it.
  Call call_ = nullptr;
  const void *context_ = nullptr;
  uint32_t count_ = 0;
  // The loop's number in the upper half, and the number of its untaken units in the lower. A thread takes a unit by one
  // compare-and-exchange of both, which fails if the loop has changed.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<uint32_t> asleep_{0};
  std::atomic<bool> ending_{false};
  std::atomic<bool> failed_{false};  // a unit of the running loop has thrown
};

// Memory that is kept for the next use.
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

  // At least so many bytes, aligned to 64. What was in the memory is lost if it grows; it is then zero on request.
  // Throws std::bad_alloc.
  char *reserve(int64_t bytes, bool is_zero = false);

 private:
  char *memory_ = nullptr;
  int64_t size_ = 0;
};

// A function as Python calls it: nothing may be thrown at C, so it returns 1 if memory or threads ran out.
template <auto Function>
struct Guarded;

template <typename Result, typename... Arguments, Result (*Function)(Arguments...)>
struct Guarded<Function> {
  static Result call(Arguments... arguments) noexcept {
    try {
      return Function(arguments...);
    } catch (...) {
      return 1;
    }
  }
};

// Tables of functions. kernels.cpp is compiled once for each instruction set and fills one; a library need not have them
// all, and lacking tables are at null.
#define SW_OPTIONAL __attribute__((weak))
extern const SwKernels portable_kernels SW_OPTIONAL;
#if defined(__x86_64__)
extern const SwKernels avx2_kernels SW_OPTIONAL;
extern const SwKernels avx512vnni_kernels SW_OPTIONAL;
extern const SwKernels avx512bf16_kernels SW_OPTIONAL;
#endif
#undef SW_OPTIONAL

}  // namespace samewise

struct SwContext {
  const SwKernels &kernels;
  samewise::ThreadPool pool;
  samewise::Memory memory;  // scratch memory of the running call
};

#ifdef SW_ISA
namespace SW_ISA {

// Allocates aligned pieces of memory from `place` on. If that is null, it only computes the size.
struct ScratchAllocator {
  char *place;
  int64_t used;

  // Sets a piece to memory of `count` items.
  template <typename T>
  void operator()(T *&piece, int64_t count) {
    piece = reinterpret_cast<T *>(place + used);
    used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }
};

// Calls lay_out(take), which takes its pieces of the memory, and returns its result. It is called twice, at first to
// learn the size.
template <typename LayOut>
inline auto laid_out_in(samewise::Memory &memory, const LayOut &lay_out, bool is_zero = false) {
  ScratchAllocator needed{nullptr, 0};
  lay_out(needed);
  ScratchAllocator take{memory.reserve(needed.used, is_zero), 0};
  return lay_out(take);
}

}  // namespace SW_ISA
#endif
