#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "threads.h"

namespace stquant {
namespace {

// Rounding mode and flushing of denormals are the kernels' business, not the caller's.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

// One job at a time; the threads take the next task until none is left.
class Pool {
 public:
  void run(int64_t count, int threads, const std::function<void(int64_t)>& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (started_ < threads - 1) {
        std::thread(&Pool::work, this, started_).detach();
        ++started_;
      }
      task_ = &task, count_ = count, next_ = 0;
      helpers_ = threads - 1, working_ = threads - 1;
      ++job_;
    }
    wake_.notify_all();
    take(task, count);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return working_ == 0; });
  }

  std::mutex busy;

 private:
  void take(const std::function<void(int64_t)>& task, int64_t count) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
  }

  void work(int number) {
    DefaultFloats floats;
    std::unique_lock<std::mutex> lock(mutex_);
    for (uint64_t seen = 0;;) {
      wake_.wait(lock, [&] { return job_ != seen && number < helpers_; });
      seen = job_;
      const auto* task = task_;
      const int64_t count = count_;
      lock.unlock();
      take(*task, count);
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int64_t)>* task_ = nullptr;
  std::atomic<int64_t> next_{0};
  int64_t count_ = 0;
  uint64_t job_ = 0;
  int started_ = 0, helpers_ = 0, working_ = 0;
};

// The pool of this process: a fork has none of its parent's threads, so it gets one of its own.
// Never destroyed, because its threads may outlive every static object.
Pool& pool() {
  static std::mutex mutex;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) pool = new Pool, owner = getpid();
  return *pool;
}

}  // namespace

void parallel(int64_t count, int threads, const std::function<void(int64_t)>& task) {
  if (threads > count) threads = int(count);
  DefaultFloats floats;
  if (threads > 1) {
    Pool& shared = pool();
    // While another Python thread is in a step, this one works alone.
    std::unique_lock<std::mutex> mine(shared.busy, std::try_to_lock);
    if (mine) return shared.run(count, threads, task);
  }
  for (int64_t i = 0; i < count; ++i) task(i);
}

}  // namespace stquant
