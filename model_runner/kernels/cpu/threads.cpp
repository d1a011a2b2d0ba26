#include "threads.h"

namespace samewise {
namespace {

constexpr int kAwakeTurns = 4000;  // some tens of microseconds: longer than Python needs between two layers

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The first value of `number` that is not `seen`. Waits awake for a short time, then sleeps: on a machine with few cores
// the thread that is waited for may need this one.
uint32_t await_change(const std::atomic<uint32_t> &number, uint32_t seen) {
  for (int turns = 0; turns < kAwakeTurns; ++turns) {
    const uint32_t now = number.load(std::memory_order_acquire);
    if (now != seen) return now;
    pause();
  }
  number.wait(seen, std::memory_order_acquire);
  return number.load(std::memory_order_acquire);
}

}  // namespace

void Team::meet() {
  ++phase_;
  const uint32_t round = shared_.round.load(std::memory_order_acquire);
  if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    // The counter of the next phase was last used in the one before this, which all have left.
    shared_.next[phase_ & 1].store(0, std::memory_order_relaxed);
    shared_.arrived.store(0, std::memory_order_relaxed);
    shared_.round.store(round + 1, std::memory_order_release);
    shared_.round.notify_all();
    return;
  }
  await_change(shared_.round, round);
}

ThreadPool::ThreadPool(int threads) {
  for (int index = 1; index < threads; ++index) workers_.emplace_back([this, index] { serve(index); });
}

ThreadPool::~ThreadPool() {
  job_.fetch_or(1);
  job_.notify_all();
  for (std::thread &worker : workers_) worker.join();
}

void ThreadPool::run(const std::function<void(Team &)> &body) {
  body_ = &body;
  shared_.next[0].store(0, std::memory_order_relaxed);
  shared_.next[1].store(0, std::memory_order_relaxed);
  if (!workers_.empty()) {
    job_.fetch_add(2, std::memory_order_release);
    job_.notify_all();
  }
  Team team(shared_, 0, size());
  body(team);
  team.meet();
}

void ThreadPool::serve(int index) {
  for (uint32_t job = 0; ((job = await_change(job_, job)) & 1) == 0;) {
    Team team(shared_, index, size());
    (*body_)(team);
    team.meet();
  }
}

}  // namespace samewise
