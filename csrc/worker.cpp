#include "worker.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "placement.h"

namespace so {
namespace {

constexpr std::size_t kMaxRecords = 4096;

bool seen(std::uintptr_t ticket, std::int64_t value) {
  return !ticket || __atomic_load_n(at<std::int64_t>(ticket), __ATOMIC_ACQUIRE) == value;
}

bool operator==(const AdamHyper& a, const AdamHyper& b) {
  return a.lr == b.lr && a.beta1 == b.beta1 && a.beta2 == b.beta2 && a.eps == b.eps &&
         a.weight_decay == b.weight_decay && a.decoupled == b.decoupled && a.bias_correction == b.bias_correction;
}

}  // namespace

Worker::Worker(int threads, CudaApi cuda, std::vector<int> cores)
    : pool_(threads, cores),
      update_(pool_, spans_),
      uploader_(cuda, pool_, spans_),
      process_(int(getpid())),
      thread_([this] { loop(); }) {
  name_thread(thread_.native_handle(), "so-worker");
  if (!cores.empty()) bind_thread(thread_.native_handle(), cores);  // the pool's caller: the engine's own thread
}

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

void Worker::post(Message message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) throw std::runtime_error(failure_);
    if (stop_) throw std::runtime_error("the optimizer's worker is closed");
    const std::int64_t count = std::int64_t(buckets_.size());
    if (message.kind == Message::kArrive && (message.bucket < 0 || message.bucket >= count))
      throw std::runtime_error("a bucket arrived that does not exist");
    for (std::int32_t b : message.step.order)
      if (b < 0 || b >= count) throw std::runtime_error("a step names a bucket that does not exist");
    queue_.push_back(std::move(message));
  }
  work_->notify_one();
}

void Worker::begin(StepDesc step) { post({Message::kBegin, std::move(step)}); }

void Worker::arrive(std::int32_t bucket, std::uintptr_t ticket, std::int64_t value) {
  post({Message::kArrive, {}, bucket, ticket, value});
}

void Worker::submit(StepDesc step) { post({Message::kSubmit, std::move(step)}); }

std::int64_t Worker::cancel() {
  std::int64_t id;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    id = ++cancels_asked_;
  }
  post({Message::kCancel, {}, -1, 0, id});
  return id;
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

bool Worker::wait_cancel(std::int64_t id, int slice_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  return progress_->wait_for(lock, std::chrono::milliseconds(slice_ms),
                             [&] { return cancels_done_ >= id || failed_locked(); });
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

std::vector<StepRecord> Worker::take_records() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StepRecord> taken(records_.begin(), records_.end());
  records_.clear();
  return taken;
}

void Worker::loop() {
  FloatEnvironment environment;
  bool bound = false;
  for (;;) {
    std::deque<Message> messages;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!has_work()) {
        running_ = false;
        if (queue_.empty()) progress_->notify_all();
        work_->wait(lock, [&] { return stop_ || !queue_.empty(); });
      }
      if (stop_) break;
      messages.swap(queue_);
      running_ = true;
    }
    try {
      if (!bound) uploader_.bind_thread();
      bound = true;
      for (Message& m : messages) {
        take(m);
        // A step is settled before the messages of the next one are looked at.
        while (submitted_ && &m != &messages.back()) advance();
      }
      advance();
    } catch (const std::exception& e) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!stop_) failure_ = e.what();
      running_ = false;
      queue_.clear();
      submitted_.reset();
      speculation_ = Speculation();
      progress_->notify_all();
    }
  }
  try {
    roll_back();  // an optimizer that is dropped between backward and step leaves the weights of its last step
  } catch (const std::exception&) {
    // The device is gone, and with it the weights.
  }
}

void Worker::take(Message& m) {
  switch (m.kind) {
    case Message::kBegin:
      speculation_ = Speculation();
      speculation_.open = true;
      speculation_.step = std::move(m.step);
      speculation_.scale = float(speculation_.step.unscale);
      break;
    case Message::kArrive:
      if (speculation_.open) speculation_.expected.push_back({m.bucket, m.ticket, m.value});
      break;
    case Message::kSubmit:
      submitted_ = std::move(m.step);
      submitted_ns_ = now_ns();
      break;
    case Message::kCancel: {
      roll_back();
      std::lock_guard<std::mutex> lock(mutex_);
      cancels_done_ = m.value;
      progress_->notify_all();
      break;
    }
  }
}

bool Worker::has_work() const {
  const Speculation& s = speculation_;
  return submitted_ || !s.expected.empty() || (!s.stopped && !s.ready.empty());
}

// One thing at a time, the most urgent first, so that a verdict never waits for more than one bucket.
void Worker::advance() {
  if (abandon_.load(std::memory_order_relaxed)) {
    if (!submitted_) return;
    roll_back();  // no verdict will come: the weights stay those of the last step
    throw std::runtime_error("closed while a step was in flight");
  }
  look_at_tickets();
  if (submitted_ && seen(submitted_->ticket, submitted_->ticket_value)) {
    const StepDesc step = std::move(*submitted_);
    submitted_.reset();
    settle(step);
    naps_ = 0;
    return;
  }
  Speculation& s = speculation_;
  if (!s.stopped && !s.ready.empty()) {
    const std::int32_t bucket = s.ready.back();  // newest first: the next forward needs it first
    s.ready.pop_back();
    speculate(bucket);
    naps_ = 0;
    return;
  }
  if (submitted_ || !s.expected.empty()) nap();
}

void Worker::look_at_tickets() {
  Speculation& s = speculation_;
  while (!s.expected.empty() && seen(s.expected.front().ticket, s.expected.front().value)) {
    const std::int32_t bucket = s.expected.front().bucket;
    s.expected.pop_front();
    arrived(bucket);
  }
}

void Worker::arrived(std::int32_t bucket) {
  Speculation& s = speculation_;
  const auto* partials = at<const double>(s.step.partials);
  double sum = 0.0;
  for (const auto& [first, count] : buckets_[bucket].partial_runs)
    for (std::int64_t i = 0; i < count; ++i) sum += partials[first + i];
  s.sum += sum;  // in order of arrival: it only decides when to stop, never what the coefficient is
  // The sum only grows, so clipping is certain once it is past the bound, and a sum that is not finite stays so.
  if (!std::isfinite(s.sum)) s.stopped = true;
  if (s.step.max_norm >= 0.0 && std::sqrt(s.sum) * s.step.unscale > s.step.max_norm) s.stopped = true;
  s.ready.push_back(bucket);
}

void Worker::speculate(std::int32_t bucket) {
  const BucketDesc& b = buckets_[bucket];
  if (!b.can_undo()) return;  // it waits for the verdict
  delay();
  const std::int64_t begin = now_ns();
  Speculation& s = speculation_;
  s.taken.push_back({bucket, update_.speculate(b, bucket, s.step, s.scale)});
  s.spent_ns += now_ns() - begin;
  uploader_.upload(b, bucket, s.step.sequence);
}

void Worker::roll_back() {
  Speculation& s = speculation_;
  for (auto taken = s.taken.rbegin(); taken != s.taken.rend(); ++taken) {
    const BucketDesc& b = buckets_[taken->bucket];
    delay();
    update_.undo(b, taken->bucket, s.step, s.scale);
    uploader_.upload(b, taken->bucket, s.step.sequence);
  }
  speculation_ = Speculation();
}

Verdict Worker::judge(const StepDesc& step) const {
  Verdict verdict;
  verdict.sequence = step.sequence;
  const double total = combine_partials(at<const double>(step.partials), std::size_t(step.partial_count));
  verdict.norm = std::sqrt(total) * step.unscale;
  verdict.skipped = !std::isfinite(total);  // squares of finite fp32 cannot overflow a double
  if (!verdict.skipped && step.max_norm >= 0.0) {
    const double coefficient = step.max_norm / (verdict.norm + 1e-6);
    if (coefficient < 1.0) verdict.coefficient = float(coefficient);
  }
  return verdict;
}

bool Worker::same_arguments(const BucketDesc& b, const StepDesc& step, float scale) const {
  const Speculation& s = speculation_;
  if (scale != s.scale) return false;
  const auto* groups = at<const std::int32_t>(step.groups);
  return std::all_of(b.segments.begin(), b.segments.end(), [&](const SegmentDesc& segment) {
    const std::size_t group = std::size_t(groups[segment.param]);
    return group < step.hyper.size() && group < s.step.hyper.size() && step.hyper[group] == s.step.hyper[group];
  });
}

void Worker::finish_bucket(std::int32_t bucket, std::int64_t sequence) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_[bucket] = sequence;
  progress_->notify_all();
}

void Worker::settle(const StepDesc& step) {
  StepRecord record;
  record.verdict = judge(step);
  spans_.add(kSpanVerdict, -1, step.sequence, submitted_ns_);
  const std::int64_t decided = now_ns();
  Verdict& verdict = record.verdict;
  // Rounded once, so that the GPU, which holds the coefficient as an fp32 scalar, multiplies by the same number.
  const float scale = float(step.unscale) * verdict.coefficient;
  const Speculation& s = speculation_;
  record.speculated = std::int32_t(s.taken.size());
  record.speculated_ns = s.spent_ns;

  // What is left to do with each bucket of the step.
  enum Fate : std::uint8_t { kStep, kKeep, kFinish, kUndo, kRedo, kNothing };
  std::vector<std::uint8_t> fates(buckets_.size(), verdict.skipped ? kNothing : kStep);
  for (const Taken& t : s.taken) {
    const bool kept = !verdict.skipped && same_arguments(buckets_[t.bucket], step, scale);
    fates[t.bucket] = verdict.skipped ? kUndo : !kept ? kRedo : t.waiting ? kFinish : kKeep;
    record.undone += kept ? 0 : 1;
    record.waiting_tiles += t.waiting;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    verdict.skips = verdict_.skips + (verdict.skipped ? 1 : 0);
    if (!verdict.skipped) {
      auto* steps = at<std::int64_t>(step.steps);
      const auto* active = at<const std::uint8_t>(step.active);
      for (std::int64_t i = 0; i < step.param_count; ++i) steps[i] += active[i];
    }
    for (std::int32_t b : step.order)
      if (fates[b] == kKeep || fates[b] == kNothing) done_[b] = step.sequence;
    verdict_ = verdict;
    progress_->notify_all();
  }

  for (std::int32_t bucket : step.order) {
    // Also when the worker is being closed: with its verdict known, a step is finished, or the weights would be half
    // those of one step and half those of another.
    if (fates[bucket] == kKeep || fates[bucket] == kNothing) continue;
    const BucketDesc& b = buckets_[bucket];
    delay();
    const std::int64_t begin = now_ns();
    if (fates[bucket] == kStep) update_.step(b, bucket, step, scale);
    if (fates[bucket] == kFinish) update_.step_waiting(b, bucket, step, scale);
    if (fates[bucket] == kUndo) update_.undo(b, bucket, s.step, s.scale);
    if (fates[bucket] == kRedo) update_.redo(b, bucket, s.step, s.scale, step, scale);
    if (fates[bucket] == kUndo || fates[bucket] == kRedo) record.undo_ns += now_ns() - begin;
    uploader_.upload(b, bucket, step.sequence);
    finish_bucket(bucket, step.sequence);
  }
  record.after_ns = now_ns() - decided;
  speculation_ = Speculation();
  std::lock_guard<std::mutex> lock(mutex_);
  records_.push_back(record);
  if (records_.size() > kMaxRecords) records_.pop_front();
}

// A ticket comes when the device has got that far: spin for a moment, then sleep.
void Worker::nap() {
  if (++naps_ < 200) return;
  std::this_thread::sleep_for(std::chrono::microseconds(20));
  if (naps_ % 256 == 0) uploader_.check_download();
}

void Worker::delay() const {
  if (const int us = delay_us_.load()) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

}  // namespace so
