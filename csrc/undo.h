// Steps that can be taken back bit for bit (speculation), tile by tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace so {

constexpr std::size_t kUndoTile = 16384;  // elements that share an escape list
constexpr std::size_t kEscapes = 640;     // per tile: 3.9 %, five eighths of a byte per parameter

struct Escape {
  std::uint32_t index;  // within the tile
  float p, m, v;        // as they were
};

// Memory of the record of one tile, and what was written there. `count` is kNotStepped where the escape list would have
// overflowed: then the tile was left as it was and waits for the verdict.
struct UndoTile {
  std::uint8_t *low_p, *low_m, *low_v;  // n signed bytes each, see undo_ops.h; fastest where they begin a cache line
  Escape* escapes;                      // kEscapes entries
  std::uint32_t* count;
};
constexpr std::uint32_t kNotStepped = 0xFFFFFFFFu;

// All take at most kUndoTile elements; `g` and `out` as in AdamFn.
// Returns false where too many elements escape: p, m and v are as they were, and `out` holds the weights of p.
bool adam_record(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype, std::size_t n,
                 const AdamScalars& s, const UndoTile& record, const KernelTable& k = kernels());
// Takes the step `s` back; a tile that was not stepped is left alone.
void adam_undo(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype, std::size_t n,
               const AdamScalars& s, const UndoTile& record, const KernelTable& k = kernels());
// Takes `old_step` back and takes `new_step` instead, in one pass over memory; a tile that was not stepped takes
// `new_step` alone. The two differ in nothing but the gradient's scale.
void adam_undo_redo(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype,
                    std::size_t n, const AdamScalars& old_step, const AdamScalars& new_step, const UndoTile& record,
                    const KernelTable& k = kernels());

}  // namespace so
