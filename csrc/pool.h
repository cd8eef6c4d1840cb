// A persistent pool of threads that split a range of tiles. Own threads rather than OpenMP: torch brings a second
// OpenMP runtime into the process, and the engine must leave the caller's cores alone.
//
// A call ends when its tiles are done, not when every thread has looked: threads that wake up too late find nothing and
// nobody waits for them. So a small call costs what its tiles cost, whatever the number of threads.
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
  // `cores`: the threads that the pool starts may run on these and no others; empty leaves them to the system. The
  // calling thread is one of the `threads` and is never bound: it belongs to the caller.
  explicit Pool(int threads, std::vector<int> cores = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  const std::vector<int>& cores() const { return cores_; }
  // errno of the first thread that could not be bound, which runs unbound; 0 where all are.
  int bind_error() const { return bind_error_; }

  // Runs body(context, tile) for every tile in [0, tiles), on at most `limit` threads, the caller being one of them.
  // Returns when all are done. One caller at a time: a second one waits.
  void run(std::size_t tiles, void (*body)(void*, std::size_t), void* context, int limit = 0);

  template <class F>
  void for_each(std::size_t tiles, F&& f, int limit = 0) {
    run(tiles, [](void* c, std::size_t i) { (*static_cast<F*>(c))(i); }, &f, limit);
  }
  // The same for n elements, `size` of them at a time: f(tile, first element, elements).
  template <class F>
  void for_each_range(std::size_t n, std::size_t size, F&& f, int limit = 0) {
    for_each((n + size - 1) / size,
             [&](std::size_t i) {
               const std::size_t from = i * size, left = n - from;
               f(i, from, left < size ? left : size);
             },
             limit);
  }

 private:
  // Where one thread sleeps; on a cache line of its own, since whoever wakes it writes there.
  struct alignas(64) Bed {
    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<bool> asleep{false};
  };

  void loop(int id);
  bool claim(int id, std::size_t* tile);
  bool has_tile_for(int id) const;
  std::size_t drain(int id);
  void finish(std::size_t done);
  void rouse(int id);
  void rouse_children(int id);
  template <class Ready>
  void rest(int id, Ready ready);

  const int process_;  // a forked child has this object, but not its threads
  const std::vector<int> cores_;
  int bind_error_ = 0;
  std::mutex caller_;
  // On the heap, so that a forked child can leave them: destroying a condition variable waits for waiters that do not
  // exist there. Bed 0 is the caller's.
  std::unique_ptr<Bed[]> beds_;
  std::vector<std::thread> workers_;
  std::atomic<bool> stop_{false};
  // The job in one word, so that a tile is claimed together with the right to claim it: threads with an id below
  // `limit` (upper 16 bits) may take tiles, and this many are left (lower 48 bits). Whoever has claimed a tile may read
  // the fields below until he has reported it done.
  alignas(64) std::atomic<std::uint64_t> job_{0};
  alignas(64) std::atomic<std::size_t> unfinished_{0};
  std::size_t tiles_ = 0;
  void (*body_)(void*, std::size_t) = nullptr;
  void* context_ = nullptr;
};

}  // namespace so
