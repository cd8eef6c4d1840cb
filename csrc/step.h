// What the engine tells its worker, and what the worker tells of a step. Addresses are of memory that the Python side
// owns and keeps alive until the worker is closed.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels.h"

namespace so {

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::int64_t now_ns();  // steady clock: Python's time.perf_counter_ns on Linux

struct SegmentDesc {
  std::int64_t param;  // index into the step's per-parameter arrays
  std::int64_t start;  // first element in the bucket
  std::int64_t numel;
};

struct BucketDesc {
  std::uintptr_t master = 0, exp_avg = 0, exp_avg_sq = 0;
  // Of a split master (split_ops.h): the master's lower halves; the upper ones are `out`, bf16, and `master` is 0.
  std::uintptr_t remainder = 0;
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
  // Undo record: low bytes as long as the bucket, escapes and counts by tile (tiles_of in bucket_update.h). 0 where the
  // bucket has none.
  std::uintptr_t undo_p = 0, undo_m = 0, undo_v = 0, undo_escapes = 0, undo_counts = 0;
  // Copies of p, m and v instead, each as long as the bucket. A bucket with neither waits for the verdict.
  std::uintptr_t snapshot_p = 0, snapshot_m = 0, snapshot_v = 0;
  bool can_undo() const { return undo_counts || snapshot_p; }
  std::vector<SegmentDesc> segments;
  std::vector<std::pair<std::int64_t, std::int64_t>> partial_runs;  // (first, count) of its partial sums of squares
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

// What a finished step cost.
struct StepRecord {
  Verdict verdict;
  std::int32_t speculated = 0;     // buckets whose Adam ran before the verdict
  std::int32_t undone = 0;         // of these, how many the verdict took back or took again with other arguments
  std::int64_t waiting_tiles = 0;  // tiles that speculation left alone because their escape list was full
  std::int64_t speculated_ns = 0;  // spent on speculated buckets before the verdict
  std::int64_t undo_ns = 0;        // spent on taking back and taking again
  std::int64_t after_ns = 0;       // from the verdict until the last bucket's upload was enqueued, undoing included
};

enum SpanKind : int {
  kSpanVerdict = 0,
  kSpanAdam = 1,
  kSpanCastGrad = 2,
  kSpanCastWeights = 3,
  kSpanUpload = 4,  // a memory copy; on CUDA events tell
  kSpanCastUpload = 5,
  kSpanUndo = 6,
};

struct Span {
  int kind;
  std::int32_t bucket;
  std::int64_t sequence, begin_ns, end_ns;
};

// Spans of work, kept only while somebody traces.
class SpanLog {
 public:
  void enable(bool on);
  void add(SpanKind kind, std::int32_t bucket, std::int64_t sequence, std::int64_t begin_ns);  // ends now
  std::vector<Span> take();

 private:
  static constexpr std::size_t kCapacity = 1 << 16;
  std::mutex mutex_;
  bool on_ = false;
  std::vector<Span> spans_;
};

}  // namespace so
