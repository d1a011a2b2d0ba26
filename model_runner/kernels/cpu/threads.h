// Threads that share out the units of one loop after another.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace samewise {

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

}  // namespace samewise
