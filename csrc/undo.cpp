// Tiles of the undo record in both layouts: which loop, and what to do where the escape list is full.
#include "undo.h"

#include "split.h"

namespace so {
namespace {

int output_dtype(const void* out, int dtype) { return out ? dtype : int(kF32); }

}  // namespace

bool adam_record(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype, std::size_t n,
                 const AdamScalars& s, const UndoTile& r, const KernelTable& k) {
  const int output = output_dtype(out, out_dtype);
  std::size_t escaped = 0;
  const std::size_t stepped = k.record[grad_dtype][output](p, m, v, g, out, n, s, r, escaped);
  if (stepped == n) {
    *r.count = std::uint32_t(escaped);
    return true;
  }
  k.undo[grad_dtype][output](p, m, v, g, out, stepped, s, s, r, escaped);
  // Where the list was full depends on the vector's width: the weights of the whole tile do not.
  if (output != kF32) k.cast[kF32][output](p, out, n);
  *r.count = kNotStepped;
  return false;
}

void adam_undo(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype, std::size_t n,
               const AdamScalars& s, const UndoTile& r, const KernelTable& k) {
  if (*r.count == kNotStepped) return;
  k.undo[grad_dtype][output_dtype(out, out_dtype)](p, m, v, g, out, n, s, s, r, *r.count);
}

void adam_undo_redo(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype,
                    std::size_t n, const AdamScalars& old_step, const AdamScalars& new_step, const UndoTile& r,
                    const KernelTable& k) {
  const int output = output_dtype(out, out_dtype);
  if (*r.count == kNotStepped) {
    k.adam[grad_dtype][output](p, m, v, g, out, n, new_step);
  } else {
    k.undo_redo[grad_dtype][output](p, m, v, g, out, n, old_step, new_step, r, *r.count);
  }
}

bool adam_record_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g,
                       int grad_dtype, std::size_t n, const AdamScalars& s, const UndoTile& r, const KernelTable& k) {
  std::size_t escaped = 0;
  const std::size_t stepped = k.record_split[grad_dtype](weight, remainder, m, v, g, n, s, r, escaped);
  if (stepped == n) {
    *r.count = std::uint32_t(escaped);
    return true;
  }
  k.undo_split[grad_dtype](weight, remainder, m, v, g, stepped, s, s, r, escaped);
  *r.count = kNotStepped;
  return false;
}

void adam_undo_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g, int grad_dtype,
                     std::size_t n, const AdamScalars& s, const UndoTile& r, const KernelTable& k) {
  if (*r.count == kNotStepped) return;
  k.undo_split[grad_dtype](weight, remainder, m, v, g, n, s, s, r, *r.count);
}

void adam_undo_redo_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g,
                          int grad_dtype, std::size_t n, const AdamScalars& old_step, const AdamScalars& new_step,
                          const UndoTile& r, const KernelTable& k) {
  if (*r.count == kNotStepped) {
    k.adam_split[grad_dtype](weight, remainder, m, v, g, n, new_step);
  } else {
    k.undo_redo_split[grad_dtype](weight, remainder, m, v, g, n, old_step, new_step, r, *r.count);
  }
}

}  // namespace so
