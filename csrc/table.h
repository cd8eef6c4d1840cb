// The table of an instruction set, from the templates that its file has defined: adam<gradient, weight>, cast<from,
// to>, sum_sq<dtype>, and the loops of undo_ops.h and split_ops.h as they were compiled there.
#pragma once

#include "kernels.h"

#define SO_ADAM_ROW(G) {adam<G, kF32>, adam<G, kBF16>, adam<G, kF16>}
#define SO_CAST_ROW(S) {cast<S, kF32>, cast<S, kBF16>, cast<S, kF16>}
#define SO_KERNEL_TABLE(name)                                  \
  {name,                                                       \
   {SO_ADAM_ROW(kF32), SO_ADAM_ROW(kBF16), SO_ADAM_ROW(kF16)}, \
   {SO_CAST_ROW(kF32), SO_CAST_ROW(kBF16), SO_CAST_ROW(kF16)}, \
   {sum_sq<kF32>, sum_sq<kBF16>, sum_sq<kF16>},                \
   record_block,                                               \
   undo_block,                                                 \
   adam_stream,                                                \
   join_block,                                                 \
   split_block}
