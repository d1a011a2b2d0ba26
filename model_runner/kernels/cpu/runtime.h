// Runtime of the kernels: threads, the kernel table of an instruction set, and scratch memory.
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

// The kernels of one instruction set, with the names and arguments of the C interface. kernels.cpp is compiled once for
// each instruction set and fills one table; a library need not have them all, and lacking tables are at null.
struct Kernels {
  const char *isa;
  decltype(&sw_packed_size) packed_size;
  decltype(&sw_pack) pack;
  decltype(&sw_repack) repack;
  decltype(&sw_unpack) unpack;
  decltype(&sw_linear) linear;
  decltype(&sw_linears) linears;
  decltype(&sw_attention) attention;
  decltype(&sw_forward) forward;
  decltype(&sw_experts) experts;
  decltype(&sw_pick) pick;
  decltype(&sw_draft) draft;
  decltype(&sw_truncate) truncate;
  decltype(&sw_move_kv) move_kv;
  decltype(&sw_recur) recur;
  decltype(&sw_scan) scan;
  decltype(&sw_convolve) convolve;
  decltype(&sw_select) select;
};

#define SW_OPTIONAL __attribute__((weak))
extern const Kernels portable_kernels SW_OPTIONAL;
#if defined(__x86_64__)
extern const Kernels avx2_kernels SW_OPTIONAL;
extern const Kernels avx512vnni_kernels SW_OPTIONAL;
extern const Kernels avx512bf16_kernels SW_OPTIONAL;
#endif
#undef SW_OPTIONAL

}  // namespace samewise

struct SwContext {
  SwContext(const samewise::Kernels &kernels, int threads);
  ~SwContext();

  // Scratch memory, kept for the next call; null if memory ran out.
  char *reserve(int64_t bytes);

  const samewise::Kernels &kernels;
  samewise::ThreadPool pool;

 private:
  char *scratch_ = nullptr;
  int64_t size_ = 0;
};

#ifdef SW_ISA
namespace SW_ISA {

// Allocates aligned pieces from the memory at `place`. If that is null, it only computes the size.
struct ScratchAllocator {
  char *place;
  int64_t used;

  char *operator()(int64_t bytes) {
    char *piece = place + used;
    used += (bytes + 63) / 64 * 64;
    return piece;
  }
};

}  // namespace SW_ISA
#endif
