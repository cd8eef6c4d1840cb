#include "pool.h"

#include <unistd.h>

#include <chrono>

#include "kernels.h"
#include "placement.h"

namespace so {
namespace {

constexpr int kLeftBits = 48;
constexpr std::uint64_t kLeft = (std::uint64_t(1) << kLeftBits) - 1;
// How long a thread looks for work before it sleeps: longer than the gap between two buckets or two calls from Python,
// too short to be seen on an idle machine.
constexpr auto kSpin = std::chrono::microseconds(40);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // "yield" does nothing on most Arm cores
#endif
}

// Looks for at most kSpin, giving the core away about once a microsecond: where threads share cores, whoever has the
// tile that is waited for may need this one.
template <class Ready>
bool spin(Ready&& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

Pool::Pool(int threads, std::vector<int> cores)
    : process_(int(getpid())), cores_(std::move(cores)), beds_(new Bed[std::size_t(threads > 1 ? threads : 1)]) {
  workers_.reserve(std::size_t(threads > 1 ? threads - 1 : 0));
  for (int i = 1; i < threads; ++i) {
    workers_.emplace_back([this, i] { loop(i); });
    name_thread(workers_.back().native_handle(), "so-pool");
    if (cores_.empty()) continue;
    const int error = bind_thread(workers_.back().native_handle(), cores_);
    if (error && !bind_error_) bind_error_ = error;
  }
}

Pool::~Pool() {
  if (int(getpid()) != process_) {
    for (auto& t : workers_) t.detach();
    beds_.release();
    return;
  }
  stop_.store(true);
  for (int i = 1; i < threads(); ++i) rouse(i);
  for (auto& t : workers_) t.join();
}

bool Pool::has_tile_for(int id) const {
  const std::uint64_t job = job_.load();
  return (job & kLeft) && std::uint64_t(id) < (job >> kLeftBits);
}

bool Pool::claim(int id, std::size_t* tile) {
  std::uint64_t job = job_.load(std::memory_order_relaxed);
  do {
    if (!(job & kLeft) || std::uint64_t(id) >= (job >> kLeftBits)) return false;
  } while (!job_.compare_exchange_weak(job, job - 1));
  *tile = tiles_ - std::size_t(job & kLeft);
  return true;
}

std::size_t Pool::drain(int id) {
  std::size_t done = 0, tile;
  while (claim(id, &tile)) {
    if (!done) rouse_children(id);
    body_(context_, tile);
    ++done;
  }
  return done;
}

void Pool::finish(std::size_t done) {
  // Once per thread and call, not once per tile. The last one may find the caller gone: it was not asleep then.
  if (done && unfinished_.fetch_sub(done) == done) rouse(0);
}

void Pool::rouse(int id) {
  Bed& bed = beds_[id];
  if (!bed.asleep.load()) return;  // it looks once more before it sleeps, see rest()
  {
    std::lock_guard<std::mutex> lock(bed.mutex);
  }
  bed.wake.notify_one();
}

// A tree: the caller wakes thread 1, and each thread that found a tile two more. Waking costs microseconds a thread,
// which the caller would otherwise pay for all of them before its first tile.
void Pool::rouse_children(int id) {
  const int first = id == 0 ? 1 : 2 * id, last = id == 0 ? 1 : 2 * id + 1;
  for (int child = first; child <= last && child < threads(); ++child)
    if (has_tile_for(child)) rouse(child);
}

template <class Ready>
void Pool::rest(int id, Ready ready) {
  if (spin(ready)) return;
  Bed& bed = beds_[id];
  std::unique_lock<std::mutex> lock(bed.mutex);
  // First "asleep", then a look; whoever has something first makes it seen, then looks for "asleep". Both in the one
  // order of sequentially consistent operations, so one of the two sees the other.
  bed.asleep.store(true);
  bed.wake.wait(lock, ready);
  bed.asleep.store(false);
}

void Pool::loop(int id) {
  FloatEnvironment environment;
  for (;;) {
    rest(id, [&] { return stop_.load() || has_tile_for(id); });
    if (stop_.load()) return;
    finish(drain(id));
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
  tiles_ = tiles;
  body_ = body;
  context_ = context;
  unfinished_.store(tiles);
  job_.store((std::uint64_t(use) << kLeftBits) | tiles);
  finish(drain(0));
  if (unfinished_.load()) rest(0, [&] { return unfinished_.load() == 0; });
}

}  // namespace so
