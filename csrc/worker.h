// The optimizer's worker: one native thread that runs Adam over the buckets as their gradients arrive, decides the
// verdict of a step once its norm is known, settles what it speculated with that verdict, and sends each bucket's
// weights up the link. It never takes Python's lock: beside a busy main thread a Python worker lost fifty times the
// bucket's own time.
//
// A step that speculates is begun at its first gradient, hears of each full bucket (`arrive`) and is submitted at
// `step()`; one that does not is only submitted. Messages are taken in order, and one step is settled before the next
// one's messages are looked at.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "bucket_update.h"
#include "pool.h"
#include "step.h"
#include "upload.h"

namespace so {

class Worker {
 public:
  // Pool and worker thread run on `cores`; empty leaves them to the system.
  Worker(int threads, CudaApi cuda, std::vector<int> cores = {});
  ~Worker();

  void set_buckets(std::vector<BucketDesc> buckets);  // only while idle
  // Opens a step for speculation, with the arguments that it will have unless `submit` says otherwise; `active`,
  // `ticket` and `order` do not matter yet.
  void begin(StepDesc step);
  // A bucket's gradient, and its partial sums, are in host memory once the int64 at `ticket` equals `value` (0: now),
  // and nothing reads its weights any more. Buckets arrive in the order in which their tickets are written.
  void arrive(std::int32_t bucket, std::uintptr_t ticket, std::int64_t value);
  void submit(StepDesc step);
  // Takes back what was speculated since `begin` and forgets the step; wait_cancel returns once that is done.
  std::int64_t cancel();

  // Each waits at most `slice_ms` and says whether it came; throws what the worker failed with.
  bool wait_verdict(std::int64_t sequence, int slice_ms);
  bool wait_bucket(int bucket, std::int64_t sequence, int slice_ms);
  bool wait_cancel(std::int64_t id, int slice_ms);
  bool wait_idle(int slice_ms);
  Verdict verdict();
  std::vector<StepRecord> take_records();  // of finished steps, oldest first; bounded
  void trace(bool on) { spans_.enable(on); }
  std::vector<Span> take_spans() { return spans_.take(); }
  void close();

  int threads() const { return pool_.threads(); }
  // Test hook: sleep this long before each bucket, so that races show.
  void set_delay_us(int us) { delay_us_ = us; }

 private:
  struct Message {
    enum Kind { kBegin, kArrive, kSubmit, kCancel } kind;
    StepDesc step;
    std::int32_t bucket = -1;
    std::uintptr_t ticket = 0;
    std::int64_t value = 0;  // of the ticket, or which cancel
  };
  struct Arrival {
    std::int32_t bucket;
    std::uintptr_t ticket;
    std::int64_t value;
  };
  struct Taken {
    std::int32_t bucket;
    std::int64_t waiting;  // tiles that were left alone
  };
  // The step that has begun and is not settled. Only the worker's thread looks at it.
  struct Speculation {
    bool open = false;
    StepDesc step;
    float scale = 1.0f;
    double sum = 0.0;                 // of squares, over the buckets that have arrived
    bool stopped = false;             // clipping is certain, or a gradient is not finite
    std::deque<Arrival> expected;     // on their way down, oldest first
    std::vector<std::int32_t> ready;  // newest last
    std::vector<Taken> taken;         // Adam has run
    std::int64_t spent_ns = 0;
  };

  void post(Message message);
  void loop();
  void take(Message& message);
  bool has_work() const;
  void advance();
  void look_at_tickets();
  void arrived(std::int32_t bucket);
  void speculate(std::int32_t bucket);
  void roll_back();
  Verdict judge(const StepDesc& step) const;
  void settle(const StepDesc& step);
  void finish_bucket(std::int32_t bucket, std::int64_t sequence);
  bool same_arguments(const BucketDesc& b, const StepDesc& step, float scale) const;
  void nap();
  void delay() const;
  bool failed_locked();

  Pool pool_;
  SpanLog spans_;
  BucketUpdate update_;
  Uploader uploader_;

  // The thread's own.
  Speculation speculation_;
  std::optional<StepDesc> submitted_;
  std::int64_t submitted_ns_ = 0;
  unsigned naps_ = 0;

  // Shared, under the mutex.
  std::mutex mutex_;
  std::vector<BucketDesc> buckets_;  // set while idle, read by the thread without the mutex
  std::vector<std::int64_t> done_;   // last sequence whose update of this bucket is enqueued
  std::deque<Message> queue_;
  // On the heap, so that a forked child can leave them: destroying one waits for waiters that do not exist there.
  std::unique_ptr<std::condition_variable> work_{new std::condition_variable}, progress_{new std::condition_variable};
  Verdict verdict_;
  std::deque<StepRecord> records_;
  std::int64_t cancels_asked_ = 0, cancels_done_ = 0;
  bool stop_ = false, running_ = false;
  std::string failure_;

  std::atomic<int> delay_us_{0};
  std::atomic<bool> abandon_{false};
  const int process_;  // a forked child has this object, but not its threads
  std::thread thread_;
};

}  // namespace so
