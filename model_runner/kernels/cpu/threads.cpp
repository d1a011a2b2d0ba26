#include "threads.h"

#include <algorithm>
#include <exception>

namespace samewise {
namespace {

constexpr int kAwakeTurns = 4000;  // some tens of microseconds: longer than Python needs between two layers

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
    // The system gives no more threads, or no memory for them: those that there are do the work.
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
}

bool ThreadPool::take_unit(uint32_t loop) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if (loop_of(ticket) != loop || left_of(ticket) == 0) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire));
  const uint32_t count = count_;
  call_(context_, count - left_of(ticket));
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

// Waits for a loop after the last one, or for the end; awake at first, then asleep, for with few cores whoever else
// has work needs this one.
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
