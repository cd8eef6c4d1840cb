// The optimizer's worker: one native thread that waits for the gradient norm of a step, decides its verdict, runs Adam
// over the buckets in the order in which the next forward needs them, and sends each bucket's weights up the link.
// It never takes Python's lock: beside a busy main thread a Python worker lost fifty times the bucket's own time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace so {

// Entry points of the CUDA driver that torch has already loaded, as addresses; all zero on a CPU-only machine.
struct CudaApi {
  std::uintptr_t ctx_set_current = 0, memcpy_htod_async = 0, event_record = 0, get_error_string = 0;
  std::uintptr_t context = 0, upload_stream = 0;
  std::uintptr_t stream_query = 0,
                 download_stream = 0;  // asked while waiting, so that a device fault is not waited out
  std::uintptr_t launch_kernel = 0, cast_bf16 = 0, cast_f16 = 0;  // device casts fp32 -> 16-bit (kernels/cast_ptx.py)
};

struct SegmentDesc {
  std::int64_t param;  // index into the step's per-parameter arrays
  std::int64_t start;  // first element in the bucket
  std::int64_t numel;
};

// Addresses are of memory that the Python side owns and keeps alive until the worker is closed.
struct BucketDesc {
  std::uintptr_t master = 0, exp_avg = 0, exp_avg_sq = 0;
  std::uintptr_t grad = 0;  // held gradient on the host
  int grad_dtype = kF32;
  std::uintptr_t grad_cast = 0;  // fp32 scratch for a separate cast pass; 0 casts inside Adam
  std::uintptr_t out = 0;        // host copy of the new 16-bit weights; 0 where the weights are fp32
  int out_dtype = kF32;
  bool out_separate = false;  // write `out` in a pass of its own instead of inside Adam
  std::uintptr_t upload_from = 0, upload_to = 0;
  std::int64_t upload_bytes = 0;
  std::uintptr_t stage = 0;  // device fp32 buffer: upload goes here and is cast into upload_to; 0 copies straight
  std::int64_t stage_numel = 0;
  // CUDA events around the upload, chosen by the parity of the sequence so that a trace can still read the last
  // step's while this step's are recorded. event_start is 0 when not traced.
  std::uintptr_t event_start[2] = {0, 0}, event_done[2] = {0, 0};
  std::vector<SegmentDesc> segments;
};

struct StepDesc {
  std::int64_t sequence = 0;
  std::uintptr_t ticket = 0;  // int64 in pinned memory; the step may be judged once it equals ticket_value
  std::int64_t ticket_value = 0;
  std::uintptr_t partials = 0;  // float64
  std::int64_t partial_count = 0;
  double max_norm = -1.0;  // negative: no clipping
  double unscale = 1.0;
  std::uintptr_t active = 0;  // uint8 per parameter: had a gradient in this step
  std::uintptr_t steps = 0;   // int64 per parameter, incremented here when the step is committed
  std::uintptr_t groups = 0;  // int32 per parameter
  std::int64_t param_count = 0;
  std::vector<AdamHyper> hyper;     // per group
  std::vector<std::int32_t> order;  // buckets in the order in which they are updated
};

struct Verdict {
  std::int64_t sequence = 0;
  double norm = 0.0;
  float coefficient = 1.0f;  // of clipping alone
  bool skipped = false;      // a gradient was not finite
  std::int64_t skips = 0;    // so far
};

// Spans in nanoseconds of the steady clock (Python's time.perf_counter_ns on Linux).
struct Span {
  int kind;  // 0 wait for the norm, 1 adam, 2 cast of gradients, 3 cast of weights, 4 upload (memory copy),
             // 5 cast after upload
  std::int32_t bucket;
  std::int64_t sequence, begin_ns, end_ns;
};

class Worker {
 public:
  Worker(int threads, CudaApi cuda);
  ~Worker();

  void set_buckets(std::vector<BucketDesc> buckets);  // only while idle
  void submit(StepDesc step);
  // Each waits at most `slice_ms` and says whether it came; throws what the worker failed with.
  bool wait_verdict(std::int64_t sequence, int slice_ms);
  bool wait_bucket(int bucket, std::int64_t sequence, int slice_ms);
  bool wait_idle(int slice_ms);
  Verdict verdict();
  void trace(bool on);
  std::vector<Span> take_spans();
  void close();

  int threads() const { return pool_.threads(); }
  // Test hook: sleep this long before each bucket, so that races show.
  void set_delay_us(int us) { delay_us_ = us; }

 private:
  void loop();
  void run(const StepDesc& step);
  void update(const StepDesc& step, int index, float scale);
  void upload(int index, std::int64_t sequence);
  void span(int kind, int bucket, std::int64_t sequence, std::int64_t begin);
  void check(int code, const char* what) const;
  bool failed_locked();
  void wait_for_ticket(const StepDesc& step);

  Pool pool_;
  CudaApi cuda_;
  std::vector<BucketDesc> buckets_;
  std::vector<std::int64_t> done_;  // last sequence whose update of this bucket is enqueued
  std::deque<StepDesc> queue_;
  std::mutex mutex_;
  // On the heap, so that a forked child can leave them: destroying one waits for waiters that do not exist there.
  std::unique_ptr<std::condition_variable> work_{new std::condition_variable}, progress_{new std::condition_variable};
  Verdict verdict_;
  bool stop_ = false, running_ = false, traced_ = false;
  std::string failure_;
  std::vector<Span> spans_;
  std::atomic<int> delay_us_{0};
  std::atomic<bool> abandon_{false};
  const int process_;  // a forked child has this object, but not its threads
  std::thread thread_;
};

}  // namespace so
