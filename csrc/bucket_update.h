// Adam over one bucket in its four forms: plain, such that it can be undone, undone, and undone and taken again.
#pragma once

#include <cstdint>
#include <vector>

#include "pool.h"
#include "step.h"
#include "undo.h"

namespace so {

// A work item: at most kUndoTile elements of one segment, with the record at `index`.
struct Tile {
  std::int32_t segment;
  std::int64_t start, numel;  // within the bucket
  std::size_t index;
};

// Tiles of a bucket, segment by segment: what a record's escapes and counts are indexed by.
std::vector<Tile> tiles_of(const BucketDesc& bucket);

class BucketUpdate {
 public:
  BucketUpdate(Pool& pool, SpanLog& spans) : pool_(pool), spans_(spans) {}

  // The step's final update: parameters that are not active in it are left alone.
  void step(const BucketDesc& b, std::int32_t bucket, const StepDesc& step, float scale);
  // The same for a step that has not been judged: every parameter counts as active and as one step further than
  // `steps` says, and the bucket's record or snapshot is written. Returns how many tiles could not be stepped: none
  // with a snapshot.
  std::int64_t speculate(const BucketDesc& b, std::int32_t bucket, const StepDesc& step, float scale);
  // Steps the tiles that `speculate` left alone, with the arguments it had; to be called after the steps were counted.
  void step_waiting(const BucketDesc& b, std::int32_t bucket, const StepDesc& step, float scale);
  void undo(const BucketDesc& b, std::int32_t bucket, const StepDesc& taken, float scale);
  // Takes `taken` back and `step` instead; the steps of `step` have been counted.
  void redo(const BucketDesc& b, std::int32_t bucket, const StepDesc& taken, float taken_scale, const StepDesc& step,
            float scale);

 private:
  std::vector<AdamScalars> scalars(const BucketDesc& b, const StepDesc& step, float scale, std::int64_t ahead) const;
  // One walk over some tiles on all threads, f(tile, its arrays), with its span.
  template <class F>
  void pass(SpanKind kind, const BucketDesc& b, std::int32_t bucket, std::int64_t sequence,
            const std::vector<Tile>& tiles, F&& f);
  // The same for one that changes the master, and the 16-bit weights after it where they are cast separately.
  template <class F>
  void update(SpanKind kind, const BucketDesc& b, std::int32_t bucket, std::int64_t sequence,
              const std::vector<Tile>& tiles, F&& f);

  Pool& pool_;
  SpanLog& spans_;
};

}  // namespace so
