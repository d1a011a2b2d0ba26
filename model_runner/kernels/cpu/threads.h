// A team of threads that works through one parallel region at a time.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace samewise {

// What a thread sees of its team inside a parallel region. All threads run the same code and meet after every for_each.
class Team {
 public:
  // Calls work(i) for each i below count, on whichever thread is free first. Returns on every thread when all are done.
  template <typename Work>
  void for_each(int64_t count, const Work &work) {
    std::atomic<int64_t> &next = shared_.next[phase_ & 1];
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
    meet();
  }

  int index() const { return index_; }
  int size() const { return size_; }

 private:
  friend class ThreadPool;

  struct Shared {
    alignas(64) std::atomic<int64_t> next[2] = {0, 0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> round{0};
  };

  Team(Shared &shared, int index, int size) : shared_(shared), index_(index), size_(size) {}
  void meet();

  Shared &shared_;
  int index_;
  int size_;
  uint32_t phase_ = 0;
};

// Threads that sleep between regions, after a short time of waiting awake for the next one.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  // Runs body on all threads, the caller's among them.
  void run(const std::function<void(Team &)> &body);
  int size() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  void serve(int index);

  std::vector<std::thread> workers_;
  const std::function<void(Team &)> *body_ = nullptr;
  Team::Shared shared_;
  std::atomic<uint32_t> job_{0};  // odd after the last one: time to end
};

}  // namespace samewise
