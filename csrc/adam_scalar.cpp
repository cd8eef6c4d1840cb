// The baseline: plain C++ at the ABI floor, and the definition that every other instruction set must reproduce.
#include "scalar_ops.h"
#include "split_ops.h"
#include "undo_ops.h"

namespace so {
namespace {

template <int G, int O>
void adam(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& s) {
  for (std::size_t i = 0; i < n; ++i) adam_one<G, O>(p, m, v, g, out, i, s);
}

template <int S, int D>
void cast(const void* src, void* dst, std::size_t n) {
  if constexpr (S == D) {
    std::memcpy(dst, src, n * dtype_bytes(S));
  } else {
    for (std::size_t i = 0; i < n; ++i) store<D>(dst, i, load<S>(src, i));
  }
}

template <int D>
double sum_sq(const void* x, std::size_t n) {
  double lanes[kNormLanes] = {};
  for (std::size_t i = 0; i < n; ++i) {
    const double d = load<D>(x, i);
    lanes[i % kNormLanes] += d * d;  // the square of an fp32 is exact in double
  }
  return halve_lanes(lanes, kNormLanes);
}

constexpr KernelTable kTable = {
    "scalar",
    {{adam<kF32, kF32>, adam<kF32, kBF16>, adam<kF32, kF16>},
     {adam<kBF16, kF32>, adam<kBF16, kBF16>, adam<kBF16, kF16>},
     {adam<kF16, kF32>, adam<kF16, kBF16>, adam<kF16, kF16>}},
    {{cast<kF32, kF32>, cast<kF32, kBF16>, cast<kF32, kF16>},
     {cast<kBF16, kF32>, cast<kBF16, kBF16>, cast<kBF16, kF16>},
     {cast<kF16, kF32>, cast<kF16, kBF16>, cast<kF16, kF16>}},
    {sum_sq<kF32>, sum_sq<kBF16>, sum_sq<kF16>},
    record_block,
    undo_block,
    adam_stream,
    join_block,
    split_block,
};

}  // namespace

const KernelTable* scalar_table() { return &kTable; }

}  // namespace so
