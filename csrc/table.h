// The table of an instruction set, from its vectors (see vector.h) and the loops over them.
#pragma once

#include "split_ops.h"
#include "step_ops.h"
#include "undo_ops.h"

namespace so {
namespace {

#define SO_BY_DTYPE(f, G) {f<V, G, kF32>, f<V, G, kBF16>, f<V, G, kF16>}
#define SO_BY_BOTH(f) {SO_BY_DTYPE(f, kF32), SO_BY_DTYPE(f, kBF16), SO_BY_DTYPE(f, kF16)}
#define SO_BY_GRADIENT(f) {f<V, kF32>, f<V, kBF16>, f<V, kF16>}

// V has sum_sq<dtype> beside what vector.h lists: its sums stay in registers, which takes knowing how many there are.
template <class V>
constexpr KernelTable table_of(const char* name) {
  return {name,
          SO_BY_BOTH(adam),
          SO_BY_BOTH(record),
          SO_BY_BOTH(undo),
          SO_BY_BOTH(undo_redo),
          SO_BY_GRADIENT(adam_split),
          SO_BY_GRADIENT(record_split),
          SO_BY_GRADIENT(undo_split),
          SO_BY_GRADIENT(undo_redo_split),
          join<V>,
          split<V>,
          SO_BY_BOTH(cast),
          SO_BY_GRADIENT(accumulate),
          {V::template sum_sq<kF32>, V::template sum_sq<kBF16>, V::template sum_sq<kF16>},
          adam_stream};
}

#undef SO_BY_DTYPE
#undef SO_BY_BOTH
#undef SO_BY_GRADIENT

}  // namespace
}  // namespace so
