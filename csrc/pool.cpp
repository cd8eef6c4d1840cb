#include "pool.h"

#include <unistd.h>

#include "kernels.h"

namespace so {

Pool::Pool(int threads) : process_(int(getpid())) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { loop(i); });
}

Pool::~Pool() {
  if (int(getpid()) != process_) {
    for (auto& t : workers_) t.detach();
    start_.release();
    done_.release();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  start_->notify_all();
  for (auto& t : workers_) t.join();
}

void Pool::drain() {
  for (;;) {
    const std::size_t tile = next_.fetch_add(1, std::memory_order_relaxed);
    if (tile >= tiles_) return;
    body_(context_, tile);
  }
}

void Pool::loop(int id) {
  FloatEnvironment environment;
  std::uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      start_->wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      if (id >= limit_) continue;  // run() counted only the threads below its limit
    }
    drain();
    std::lock_guard<std::mutex> lock(mutex_);
    if (--busy_ == 0) done_->notify_one();
  }
}

void Pool::run(std::size_t tiles, void (*body)(void*, std::size_t), void* context, int limit) {
  std::lock_guard<std::mutex> one_caller(caller_);
  FloatEnvironment environment;
  int use = limit > 0 && limit < threads() ? limit : threads();
  if (static_cast<std::size_t>(use) > tiles) use = static_cast<int>(tiles);
  if (use <= 1) {
    for (std::size_t i = 0; i < tiles; ++i) body(context, i);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tiles_ = tiles;
    body_ = body;
    context_ = context;
    next_.store(0, std::memory_order_relaxed);
    limit_ = use;
    busy_ = use - 1;
    ++generation_;
  }
  start_->notify_all();
  drain();
  std::unique_lock<std::mutex> lock(mutex_);
  done_->wait(lock, [&] { return busy_ == 0; });
}

}  // namespace so
