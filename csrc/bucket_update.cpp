#include "bucket_update.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "split.h"

namespace so {
namespace {

// The arrays of one tile.
struct View {
  float* p;  // of a plain master
  float *m, *v;
  const void* g;
  void* out;                 // null where weights are not written in the same pass
  std::uint16_t* remainder;  // of a split master, whose other half is `out`; null for a plain one
  std::size_t n;

  std::uint16_t* weight() const { return static_cast<std::uint16_t*>(out); }
};

bool writes_with_adam(const BucketDesc& b) { return b.out && !b.out_separate; }

// Of the weights that Adam writes in its own pass; fp32 stands for none.
int weights_dtype(const BucketDesc& b) { return writes_with_adam(b) ? b.out_dtype : int(kF32); }

View view(const BucketDesc& b, const Tile& t) {
  return {b.remainder ? nullptr : at<float>(b.master) + t.start,
          at<float>(b.exp_avg) + t.start,
          at<float>(b.exp_avg_sq) + t.start,
          at<char>(b.grad) + t.start * std::int64_t(dtype_bytes(b.grad_dtype)),
          writes_with_adam(b) ? at<char>(b.out) + t.start * std::int64_t(dtype_bytes(b.out_dtype)) : nullptr,
          b.remainder ? at<std::uint16_t>(b.remainder) + t.start : nullptr,
          std::size_t(t.numel)};
}

UndoTile record_of(const BucketDesc& b, const Tile& t) {
  return {at<std::uint8_t>(b.undo_p) + t.start, at<std::uint8_t>(b.undo_m) + t.start,
          at<std::uint8_t>(b.undo_v) + t.start, at<Escape>(b.undo_escapes) + t.index * kEscapes,
          at<std::uint32_t>(b.undo_counts) + t.index};
}

// A step that cannot be taken back, of a gradient that may have been cast before.
void plain_step(const BucketDesc& b, const View& a, const void* g, int grad_dtype, const AdamScalars& s) {
  if (a.remainder) return adam_split(a.weight(), a.remainder, a.m, a.v, g, grad_dtype, a.n, s);
  kernels().adam[grad_dtype][weights_dtype(b)](a.p, a.m, a.v, g, a.out, a.n, s);
}

void plain_step(const BucketDesc& b, const View& a, const AdamScalars& s) { plain_step(b, a, a.g, b.grad_dtype, s); }

// The two ways in which a tile's step can be taken back: the record of undo.h, and a copy of what was there before.
struct ByRecord {
  static bool step(const BucketDesc& b, const Tile& t, const View& a, const AdamScalars& s) {
    if (a.remainder)
      return adam_record_split(a.weight(), a.remainder, a.m, a.v, a.g, b.grad_dtype, a.n, s, record_of(b, t));
    return adam_record(a.p, a.m, a.v, a.g, b.grad_dtype, a.out, b.out_dtype, a.n, s, record_of(b, t));
  }
  static void undo(const BucketDesc& b, const Tile& t, const View& a, const AdamScalars& s) {
    if (a.remainder)
      return adam_undo_split(a.weight(), a.remainder, a.m, a.v, a.g, b.grad_dtype, a.n, s, record_of(b, t));
    adam_undo(a.p, a.m, a.v, a.g, b.grad_dtype, a.out, b.out_dtype, a.n, s, record_of(b, t));
  }
  static void redo(const BucketDesc& b, const Tile& t, const View& a, const AdamScalars& old_step,
                   const AdamScalars& new_step) {
    if (a.remainder)
      return adam_undo_redo_split(a.weight(), a.remainder, a.m, a.v, a.g, b.grad_dtype, a.n, old_step, new_step,
                                  record_of(b, t));
    adam_undo_redo(a.p, a.m, a.v, a.g, b.grad_dtype, a.out, b.out_dtype, a.n, old_step, new_step, record_of(b, t));
  }
};

struct BySnapshot {
  // The master in its layout: 4 bytes per element either way.
  static void keep_master(const BucketDesc& b, const Tile& t, const View& a) {
    auto* kept = at<char>(b.snapshot_p) + t.start * std::int64_t(sizeof(float));
    if (!a.remainder) {
      std::memcpy(kept, a.p, a.n * sizeof(float));
      return;
    }
    std::memcpy(kept, a.weight(), a.n * sizeof(std::uint16_t));
    std::memcpy(kept + a.n * sizeof(std::uint16_t), a.remainder, a.n * sizeof(std::uint16_t));
  }
  static void restore(const BucketDesc& b, const Tile& t, const View& a) {
    const auto* kept = at<const char>(b.snapshot_p) + t.start * std::int64_t(sizeof(float));
    if (!a.remainder) {
      std::memcpy(a.p, kept, a.n * sizeof(float));
    } else {
      std::memcpy(a.weight(), kept, a.n * sizeof(std::uint16_t));
      std::memcpy(a.remainder, kept + a.n * sizeof(std::uint16_t), a.n * sizeof(std::uint16_t));
    }
    std::memcpy(a.m, at<float>(b.snapshot_m) + t.start, a.n * sizeof(float));
    std::memcpy(a.v, at<float>(b.snapshot_v) + t.start, a.n * sizeof(float));
  }
  static bool step(const BucketDesc& b, const Tile& t, const View& a, const AdamScalars& s) {
    keep_master(b, t, a);
    std::memcpy(at<float>(b.snapshot_m) + t.start, a.m, a.n * sizeof(float));
    std::memcpy(at<float>(b.snapshot_v) + t.start, a.v, a.n * sizeof(float));
    plain_step(b, a, s);
    return true;
  }
  static void undo(const BucketDesc& b, const Tile& t, const View& a, const AdamScalars&) {
    restore(b, t, a);
    if (a.out && !a.remainder) kernels().cast[kF32][b.out_dtype](a.p, a.out, a.n);
  }
  static void redo(const BucketDesc& b, const Tile& t, const View& a, const AdamScalars&, const AdamScalars& new_step) {
    restore(b, t, a);
    plain_step(b, a, new_step);
  }
};

}  // namespace

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void SpanLog::enable(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  on_ = on;
  spans_.clear();
  if (on) spans_.reserve(kCapacity);
}

void SpanLog::add(SpanKind kind, std::int32_t bucket, std::int64_t sequence, std::int64_t begin_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (on_ && spans_.size() < kCapacity) spans_.push_back({kind, bucket, sequence, begin_ns, now_ns()});
}

std::vector<Span> SpanLog::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Span> taken = spans_;
  spans_.clear();
  return taken;
}

std::vector<Tile> tiles_of(const BucketDesc& bucket) {
  constexpr std::int64_t kTile = std::int64_t(kUndoTile);
  std::vector<Tile> tiles;
  for (std::size_t s = 0; s < bucket.segments.size(); ++s) {
    const SegmentDesc& segment = bucket.segments[s];
    for (std::int64_t from = 0; from < segment.numel; from += kTile) {
      const std::int64_t left = segment.numel - from;
      tiles.push_back({std::int32_t(s), segment.start + from, left < kTile ? left : kTile, tiles.size()});
    }
  }
  return tiles;
}

std::vector<AdamScalars> BucketUpdate::scalars(const BucketDesc& b, const StepDesc& step, float scale,
                                               std::int64_t ahead) const {
  const auto* steps = at<const std::int64_t>(step.steps);
  const auto* groups = at<const std::int32_t>(step.groups);
  std::vector<AdamScalars> found;
  found.reserve(b.segments.size());
  for (const SegmentDesc& segment : b.segments) {
    const std::int32_t group = groups[segment.param];
    if (group < 0 || std::size_t(group) >= step.hyper.size())
      throw std::runtime_error("parameter " + std::to_string(segment.param) + " is in group " + std::to_string(group) +
                               ", but the step has " + std::to_string(step.hyper.size()));
    found.push_back(adam_scalars(step.hyper[group], steps[segment.param] + ahead, scale));
  }
  return found;
}

template <class F>
void BucketUpdate::pass(SpanKind kind, const BucketDesc& b, std::int32_t bucket, std::int64_t sequence,
                        const std::vector<Tile>& tiles, F&& f) {
  const std::int64_t begin = now_ns();
  pool_.for_each(tiles.size(), [&](std::size_t i) { f(tiles[i], view(b, tiles[i])); });
  spans_.add(kind, bucket, sequence, begin);
}

template <class F>
void BucketUpdate::update(SpanKind kind, const BucketDesc& b, std::int32_t bucket, std::int64_t sequence,
                          const std::vector<Tile>& tiles, F&& f) {
  pass(kind, b, bucket, sequence, tiles, f);
  if (!b.out || !b.out_separate) return;
  const CastFn cast = kernels().cast[kF32][b.out_dtype];
  const std::int64_t size = std::int64_t(dtype_bytes(b.out_dtype));
  pass(kSpanCastWeights, b, bucket, sequence, tiles,
       [&](const Tile& t, const View& a) { cast(a.p, at<char>(b.out) + t.start * size, a.n); });
}

void BucketUpdate::step(const BucketDesc& b, std::int32_t bucket, const StepDesc& step, float scale) {
  const KernelTable& k = kernels();
  const auto* active = at<const std::uint8_t>(step.active);
  const std::vector<AdamScalars> s = scalars(b, step, scale, 0);
  std::vector<Tile> tiles;
  for (const Tile& t : tiles_of(b))
    if (active[b.segments[t.segment].param]) tiles.push_back(t);  // no gradient, no update: as torch does

  if (b.grad_cast) {
    const CastFn cast = k.cast[b.grad_dtype][kF32];
    pass(kSpanCastGrad, b, bucket, step.sequence, tiles,
         [&](const Tile& t, const View& a) { cast(a.g, at<float>(b.grad_cast) + t.start, a.n); });
  }
  update(kSpanAdam, b, bucket, step.sequence, tiles, [&](const Tile& t, const View& a) {
    if (b.grad_cast) {
      plain_step(b, a, at<float>(b.grad_cast) + t.start, kF32, s[t.segment]);
    } else {
      plain_step(b, a, s[t.segment]);
    }
  });
}

// From here on the gradient is always cast inside the pass: the bits are those of a cast before it, and the scratch of
// a separate cast would be another bucket's by the time of an undo.

std::int64_t BucketUpdate::speculate(const BucketDesc& b, std::int32_t bucket, const StepDesc& step, float scale) {
  const std::vector<AdamScalars> s = scalars(b, step, scale, 1);
  const auto step_tile = b.snapshot_p ? BySnapshot::step : ByRecord::step;
  std::atomic<std::int64_t> waiting{0};
  update(kSpanAdam, b, bucket, step.sequence, tiles_of(b), [&](const Tile& t, const View& a) {
    if (!step_tile(b, t, a, s[t.segment])) waiting.fetch_add(1, std::memory_order_relaxed);
  });
  return waiting.load();
}

void BucketUpdate::step_waiting(const BucketDesc& b, std::int32_t bucket, const StepDesc& step, float scale) {
  if (b.snapshot_p) return;  // no tile of it waits, and it has no record to ask
  const std::vector<AdamScalars> s = scalars(b, step, scale, 0);
  std::vector<Tile> tiles;
  for (const Tile& t : tiles_of(b))
    if (*record_of(b, t).count == kNotStepped) tiles.push_back(t);
  update(kSpanAdam, b, bucket, step.sequence, tiles,
         [&](const Tile& t, const View& a) { plain_step(b, a, s[t.segment]); });
}

void BucketUpdate::undo(const BucketDesc& b, std::int32_t bucket, const StepDesc& taken, float scale) {
  const std::vector<AdamScalars> s = scalars(b, taken, scale, 1);
  const auto undo_tile = b.snapshot_p ? BySnapshot::undo : ByRecord::undo;
  update(kSpanUndo, b, bucket, taken.sequence, tiles_of(b),
         [&](const Tile& t, const View& a) { undo_tile(b, t, a, s[t.segment]); });
}

void BucketUpdate::redo(const BucketDesc& b, std::int32_t bucket, const StepDesc& taken, float taken_scale,
                        const StepDesc& step, float scale) {
  const std::vector<AdamScalars> old_step = scalars(b, taken, taken_scale, 0), new_step = scalars(b, step, scale, 0);
  const auto redo_tile = b.snapshot_p ? BySnapshot::redo : ByRecord::redo;
  update(kSpanUndo, b, bucket, step.sequence, tiles_of(b),
         [&](const Tile& t, const View& a) { redo_tile(b, t, a, old_step[t.segment], new_step[t.segment]); });
}

}  // namespace so
