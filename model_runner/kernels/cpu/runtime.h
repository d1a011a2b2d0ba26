// What the kernels run on: threads, the table of an instruction set's kernels, and scratch memory.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "samewise.h"

namespace samewise {

// Threads that share out the units of one loop after another.
//
// The thread that owns the pool runs loops, one at a time; the others take units of the loop that is running. A loop is
// over when its units are done, not when all threads have come by: one that the system has put aside holds nobody up,
// unless it is in the middle of a unit.
class ThreadPool {
 public:
  // Of so many threads, the owner among them; of fewer if the system refuses to make them.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  // Calls work(i) for each i below count, which is below 2^32, on whichever thread is free, the caller's among them.
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
  // Of the loop that is running. Read only by threads that hold a unit of it.
  Call call_ = nullptr;
  const void *context_ = nullptr;
  uint32_t count_ = 0;
  // The number of the loop in the upper half, how many of its units nobody has taken yet in the lower. Taking a unit
  // with one exchange of both makes sure that the loop is still the same.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<uint32_t> asleep_{0};
  std::atomic<bool> ending_{false};
};

// What each instruction set offers to the C interface, by the names and with the arguments that it has there. kernels.cpp
// is compiled once for each and fills one table.
struct Kernels {
  const char *isa;
  decltype(&sw_pack) pack;
  decltype(&sw_linear) linear;
  decltype(&sw_attention) attention;
  decltype(&sw_decoder_layer) decoder_layer;
  decltype(&sw_forward) forward;
  decltype(&sw_experts) experts;
  decltype(&sw_pick) pick;
  decltype(&sw_draft) draft;
  decltype(&sw_truncate) truncate;
  decltype(&sw_move_kv) move_kv;
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512vnni_kernels;
extern const Kernels avx512bf16_kernels;
#endif

}  // namespace samewise

struct SwContext {
  SwContext(const samewise::Kernels &kernels, int threads);
  ~SwContext();

  // Scratch memory that stays for the next call; null when memory ran out.
  char *reserve(int64_t bytes);

  const samewise::Kernels &kernels;
  samewise::ThreadPool pool;

 private:
  char *scratch_ = nullptr;
  int64_t size_ = 0;
};

#ifdef SW_ISA
namespace SW_ISA {

// Hands out aligned pieces of memory that begins at `place`; where that is null, it finds out how much is needed.
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
