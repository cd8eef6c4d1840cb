#include "worker.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace so {
namespace {

constexpr std::size_t kTile = 16384;  // elements per work item: 0.5 MB of traffic, small enough to balance threads
constexpr std::size_t kMaxSpans = 1 << 16;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

struct Tile {
  std::int32_t segment;
  std::int64_t start, numel;  // within the bucket
};

}  // namespace

Worker::Worker(int threads, CudaApi cuda)
    : pool_(threads), cuda_(cuda), process_(int(getpid())), thread_([this] { loop(); }) {}

Worker::~Worker() { close(); }

void Worker::close() {
  if (int(getpid()) != process_) {
    // In a forked child the thread does not exist, and the mutex may have been held when it was copied.
    if (thread_.joinable()) thread_.detach();
    work_.release();
    progress_.release();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_) return;
    stop_ = true;
    abandon_.store(true);
  }
  work_->notify_all();
  if (thread_.joinable()) thread_.join();
  progress_->notify_all();
}

void Worker::set_buckets(std::vector<BucketDesc> buckets) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (running_ || !queue_.empty()) throw std::runtime_error("buckets cannot change while a step is running");
  done_.resize(buckets.size(), 0);
  buckets_ = std::move(buckets);
}

void Worker::submit(StepDesc step) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) throw std::runtime_error(failure_);
    if (stop_) throw std::runtime_error("the optimizer's worker is closed");
    for (std::int32_t b : step.order)
      if (b < 0 || std::size_t(b) >= buckets_.size())
        throw std::runtime_error("a step names a bucket that does not exist");
    queue_.push_back(std::move(step));
  }
  work_->notify_one();
}

bool Worker::failed_locked() {
  if (!failure_.empty()) throw std::runtime_error(failure_);
  if (stop_) throw std::runtime_error("the optimizer's worker is closed");
  return false;
}

bool Worker::wait_verdict(std::int64_t sequence, int slice_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  return progress_->wait_for(lock, std::chrono::milliseconds(slice_ms),
                             [&] { return verdict_.sequence >= sequence || failed_locked(); });
}

bool Worker::wait_bucket(int bucket, std::int64_t sequence, int slice_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  return progress_->wait_for(lock, std::chrono::milliseconds(slice_ms),
                             [&] { return done_.at(bucket) >= sequence || failed_locked(); });
}

bool Worker::wait_idle(int slice_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  return progress_->wait_for(lock, std::chrono::milliseconds(slice_ms),
                             [&] { return failed_locked() || (queue_.empty() && !running_); });
}

Verdict Worker::verdict() {
  std::lock_guard<std::mutex> lock(mutex_);
  return verdict_;
}

void Worker::trace(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  traced_ = on;
  spans_.clear();
  if (on) spans_.reserve(kMaxSpans);
}

std::vector<Span> Worker::take_spans() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Span> taken = spans_;
  spans_.clear();
  return taken;
}

void Worker::span(int kind, int bucket, std::int64_t sequence, std::int64_t begin) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (traced_ && spans_.size() < kMaxSpans) spans_.push_back({kind, bucket, sequence, begin, now_ns()});
}

void Worker::check(int code, const char* what) const {
  if (code == 0) return;
  const char* text = nullptr;
  if (cuda_.get_error_string) at<int(int, const char**)>(cuda_.get_error_string)(code, &text);
  throw std::runtime_error(std::string(what) + " failed in the optimizer's worker: CUDA driver error " +
                           std::to_string(code) + (text ? std::string(" (") + text + ")" : std::string()));
}

void Worker::loop() {
  FloatEnvironment environment;
  for (;;) {
    StepDesc step;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      running_ = false;
      progress_->notify_all();
      work_->wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      step = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
    }
    try {
      run(step);
    } catch (const std::exception& e) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!stop_) failure_ = e.what();
      running_ = false;
      queue_.clear();
      progress_->notify_all();
    }
  }
}

// The copy stream writes the ticket after the last partial sum, so seeing it means that every gradient of this step is
// in host memory. Spin for a moment, then sleep: the wait is as long as the rest of backward.
void Worker::wait_for_ticket(const StepDesc& step) {
  constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY
  auto* ticket = at<std::int64_t>(step.ticket);
  for (int spins = 0; __atomic_load_n(ticket, __ATOMIC_ACQUIRE) != step.ticket_value; ++spins) {
    if (abandon_.load(std::memory_order_relaxed)) throw std::runtime_error("closed while a step was in flight");
    if (spins < 200) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (spins % 256 == 0 && cuda_.stream_query) {
      const int code = at<int(void*)>(cuda_.stream_query)(at<void>(cuda_.download_stream));
      if (code != kNotReady) check(code, "the download of gradients");
    }
  }
}

void Worker::run(const StepDesc& step) {
  if (cuda_.ctx_set_current) check(at<int(void*)>(cuda_.ctx_set_current)(at<void>(cuda_.context)), "cuCtxSetCurrent");

  const std::int64_t begin = now_ns();
  if (step.ticket) wait_for_ticket(step);
  Verdict verdict;
  verdict.sequence = step.sequence;
  const double total = combine_partials(at<const double>(step.partials), std::size_t(step.partial_count));
  verdict.norm = std::sqrt(total) * step.unscale;
  verdict.skipped = !std::isfinite(total);  // squares of finite fp32 cannot overflow a double
  if (!verdict.skipped && step.max_norm >= 0.0) {
    const double coefficient = step.max_norm / (verdict.norm + 1e-6);
    if (coefficient < 1.0) verdict.coefficient = float(coefficient);
  }
  span(0, -1, step.sequence, begin);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    verdict.skips = verdict_.skips + (verdict.skipped ? 1 : 0);
    if (!verdict.skipped) {
      auto* steps = at<std::int64_t>(step.steps);
      const auto* active = at<const std::uint8_t>(step.active);
      for (std::int64_t i = 0; i < step.param_count; ++i) steps[i] += active[i];
    } else {
      for (std::int32_t b : step.order) done_[b] = step.sequence;
    }
    verdict_ = verdict;
  }
  progress_->notify_all();
  if (verdict.skipped) return;

  // Rounded once, so that the GPU, which holds the coefficient as an fp32 scalar, multiplies by the same number.
  const float scale = float(step.unscale) * verdict.coefficient;
  for (std::int32_t b : step.order) {
    if (abandon_.load(std::memory_order_relaxed)) throw std::runtime_error("closed while a step was in flight");
    if (const int us = delay_us_.load()) std::this_thread::sleep_for(std::chrono::microseconds(us));
    update(step, b, scale);
    upload(b, step.sequence);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_[b] = step.sequence;
    }
    progress_->notify_all();
  }
}

void Worker::update(const StepDesc& step, int index, float scale) {
  const BucketDesc& b = buckets_[index];
  const KernelTable& k = kernels();
  const auto* active = at<const std::uint8_t>(step.active);
  const auto* steps = at<const std::int64_t>(step.steps);
  const auto* groups = at<const std::int32_t>(step.groups);

  std::vector<AdamScalars> scalars(b.segments.size());
  std::vector<Tile> tiles;
  for (std::size_t s = 0; s < b.segments.size(); ++s) {
    const SegmentDesc& segment = b.segments[s];
    if (!active[segment.param]) continue;  // no gradient, no update: as torch does
    const std::int32_t group = groups[segment.param];
    if (group < 0 || std::size_t(group) >= step.hyper.size())
      throw std::runtime_error("parameter " + std::to_string(segment.param) + " is in group " + std::to_string(group) +
                               ", but the step has " + std::to_string(step.hyper.size()));
    scalars[s] = adam_scalars(step.hyper[group], steps[segment.param], scale);
    for (std::int64_t from = 0; from < segment.numel; from += kTile) {
      const std::int64_t left = segment.numel - from;
      tiles.push_back({std::int32_t(s), segment.start + from, left < std::int64_t(kTile) ? left : std::int64_t(kTile)});
    }
  }
  const std::size_t grad_size = dtype_bytes(b.grad_dtype), out_size = dtype_bytes(b.out_dtype);

  if (b.grad_cast) {
    const std::int64_t begin = now_ns();
    pool_.for_each(tiles.size(), [&](std::size_t i) {
      const Tile& t = tiles[i];
      k.cast[b.grad_dtype][kF32](at<char>(b.grad) + t.start * grad_size, at<float>(b.grad_cast) + t.start, t.numel);
    });
    span(2, index, step.sequence, begin);
  }
  const bool fused_out = b.out && !b.out_separate;
  const int grad_dtype = b.grad_cast ? int(kF32) : b.grad_dtype;
  const AdamFn adam = k.adam[grad_dtype][fused_out ? b.out_dtype : int(kF32)];
  const std::int64_t begin = now_ns();
  pool_.for_each(tiles.size(), [&](std::size_t i) {
    const Tile& t = tiles[i];
    const void* g = b.grad_cast ? static_cast<const void*>(at<float>(b.grad_cast) + t.start)
                                : static_cast<const void*>(at<char>(b.grad) + t.start * grad_size);
    adam(at<float>(b.master) + t.start, at<float>(b.exp_avg) + t.start, at<float>(b.exp_avg_sq) + t.start, g,
         fused_out ? at<char>(b.out) + t.start * out_size : nullptr, t.numel, scalars[t.segment]);
  });
  span(1, index, step.sequence, begin);
  if (b.out && b.out_separate) {
    const std::int64_t cast_begin = now_ns();
    pool_.for_each(tiles.size(), [&](std::size_t i) {
      const Tile& t = tiles[i];
      k.cast[kF32][b.out_dtype](at<float>(b.master) + t.start, at<char>(b.out) + t.start * out_size, t.numel);
    });
    span(3, index, step.sequence, cast_begin);
  }
}

void Worker::upload(int index, std::int64_t sequence) {
  const BucketDesc& b = buckets_[index];
  if (!b.upload_to) return;
  const std::uintptr_t target = b.stage ? b.stage : b.upload_to;
  if (!cuda_.memcpy_htod_async) {
    std::int64_t begin = now_ns();
    std::memcpy(at<void>(target), at<void>(b.upload_from), std::size_t(b.upload_bytes));
    span(4, index, sequence, begin);
    if (!b.stage) return;
    begin = now_ns();
    const CastFn cast = kernels().cast[kF32][b.out_dtype];
    const std::size_t n = std::size_t(b.stage_numel), size = dtype_bytes(b.out_dtype);
    pool_.for_each((n + kTile - 1) / kTile, [&](std::size_t i) {
      const std::size_t from = i * kTile, left = n - from;
      cast(at<float>(b.stage) + from, at<char>(b.upload_to) + from * size, left < kTile ? left : kTile);
    });
    span(5, index, sequence, begin);
    return;
  }
  void* stream = at<void>(cuda_.upload_stream);
  auto* record = at<int(void*, void*)>(cuda_.event_record);
  const std::uintptr_t begun = b.event_start[sequence & 1], done = b.event_done[sequence & 1];
  if (begun) check(record(at<void>(begun), stream), "cuEventRecord");
  check(at<int(std::uintptr_t, const void*, std::size_t, void*)>(cuda_.memcpy_htod_async)(
            target, at<void>(b.upload_from), std::size_t(b.upload_bytes), stream),
        "cuMemcpyHtoDAsync");
  if (b.stage) {
    // All uploads share one stream, so one staging buffer serves them all: the next copy starts after this cast.
    std::uintptr_t source = b.stage, destination = b.upload_to;
    std::uint64_t n = std::uint64_t(b.stage_numel);
    void* arguments[] = {&source, &destination, &n};
    constexpr unsigned kThreads = 256;
    const unsigned blocks = unsigned((n + kThreads - 1) / kThreads);
    using Launch =
        int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    check(at<Launch>(cuda_.launch_kernel)(at<void>(b.out_dtype == kBF16 ? cuda_.cast_bf16 : cuda_.cast_f16), blocks, 1,
                                          1, kThreads, 1, 1, 0, stream, arguments, nullptr),
          "cuLaunchKernel");
  }
  check(record(at<void>(done), stream), "cuEventRecord");
}

}  // namespace so
