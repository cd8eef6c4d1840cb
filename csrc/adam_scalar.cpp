// The baseline: plain C++ at the ABI floor, and the definition that every other instruction set must reproduce.
#include "scalar_ops.h"
#include "split_ops.h"
#include "table.h"
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

constexpr KernelTable kTable = SO_KERNEL_TABLE("scalar");

}  // namespace

const KernelTable* scalar_table() { return &kTable; }

}  // namespace so
