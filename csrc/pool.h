// A persistent pool of threads that split a range of tiles. Own threads rather than OpenMP: torch brings a second
// OpenMP runtime into the process, and the engine must leave the caller's cores alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace so {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs body(context, tile) for every tile in [0, tiles), on at most `limit` threads, the caller being one of them.
  // Returns when all are done. One caller at a time: a second one waits.
  void run(std::size_t tiles, void (*body)(void*, std::size_t), void* context, int limit = 0);

  template <class F>
  void for_each(std::size_t tiles, F&& f, int limit = 0) {
    run(tiles, [](void* c, std::size_t i) { (*static_cast<F*>(c))(i); }, &f, limit);
  }

 private:
  void loop(int id);
  void drain();

  const int process_;  // a forked child has this object, but not its threads
  std::mutex caller_;
  std::mutex mutex_;
  // On the heap for the same reason as the worker's.
  std::unique_ptr<std::condition_variable> start_{new std::condition_variable}, done_{new std::condition_variable};
  std::vector<std::thread> workers_;
  std::uint64_t generation_ = 0;
  bool stop_ = false;
  int busy_ = 0, limit_ = 0;
  std::size_t tiles_ = 0;
  std::atomic<std::size_t> next_{0};
  void (*body_)(void*, std::size_t) = nullptr;
  void* context_ = nullptr;
};

}  // namespace so
