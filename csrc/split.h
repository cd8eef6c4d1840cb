// The split master of bf16 weights: weight, remainder, and one bit in the sign of v; see split_ops.h.
//
// Everything here goes element by element: any start, any length, and no two elements share a byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "undo.h"

namespace so {

// AdamFn with bf16 weights out, on the split layout: the same bits in one pass over memory.
void adam_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g, int grad_dtype,
                std::size_t n, const AdamScalars& s, const KernelTable& k = kernels());

// Between the layouts. `v` is the plain second moment before `split` and carries the bit after it; `join` writes it
// without the bit to `plain_v`, which may be `v`.
void split(const float* p, std::uint16_t* weight, std::uint16_t* remainder, float* v, std::size_t n,
           const KernelTable& k = kernels());
void join(const std::uint16_t* weight, const std::uint16_t* remainder, const float* v, float* p, float* plain_v,
          std::size_t n);

// adam_record, adam_undo and adam_undo_redo of undo.h, on at most kUndoTile elements in the split layout.
bool adam_record_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g,
                       int grad_dtype, std::size_t n, const AdamScalars& s, const UndoTile& record,
                       const KernelTable& k = kernels());
void adam_undo_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g, int grad_dtype,
                     std::size_t n, const AdamScalars& s, const UndoTile& record, const KernelTable& k = kernels());
void adam_undo_redo_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g,
                          int grad_dtype, std::size_t n, const AdamScalars& old_step, const AdamScalars& new_step,
                          const UndoTile& record, const KernelTable& k = kernels());

// Whether an element has its sign set; -0 has.
bool any_sign(const float* x, std::size_t n);

// How many of the 65,536 fp32 whose upper half is `upper` do not come back from the split layout with their exact bits
// (as any NaN where they are NaN), or change v.
std::size_t split_failures(std::uint32_t upper);

}  // namespace so
