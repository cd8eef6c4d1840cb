// What the undo record needs beside the vector loops: blocks that fit in the first-level cache, and the escape list.
#include "undo.h"

#include <cstring>

namespace so {
namespace {

constexpr std::size_t kBlock = kUndoBlock;

// Gradient of one block in fp32: in place, or converted into `buffer`.
const float* gradient(const void* g, int dtype, std::size_t from, std::size_t n, float* buffer) {
  if (dtype == kF32) return static_cast<const float*>(g) + from;
  kernels().cast[dtype][kF32](static_cast<const char*>(g) + from * 2, buffer, n);
  return buffer;
}

void write_weights(const float* p, void* out, int dtype, std::size_t from, std::size_t n) {
  if (out && dtype != kF32) kernels().cast[kF32][dtype](p, static_cast<char*>(out) + from * 2, n);
}

// Undoes one block into p0, m0, v0. `next` walks through the escape list, which is in order of index.
void old_values(const float* p, const float* m, const float* v, const float* grad, std::size_t from, std::size_t n,
                const AdamScalars& s, const UndoTile& r, std::size_t count, std::size_t& next, float* p0, float* m0,
                float* v0) {
  kernels().undo_block(p + from, m + from, v + from, grad, n, s, r.low_p + from, r.low_m + from, r.low_v + from, p0, m0,
                       v0);
  for (; next < count && r.escapes[next].index < from + n; ++next) {
    const Escape& e = r.escapes[next];
    p0[e.index - from] = e.p;
    m0[e.index - from] = e.m;
    v0[e.index - from] = e.v;
  }
}

void undo_prefix(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype, std::size_t n,
                 const AdamScalars& s, const UndoTile& r, std::size_t count) {
  alignas(64) float grad[kBlock], p0[kBlock], m0[kBlock], v0[kBlock];
  std::size_t next = 0;
  for (std::size_t from = 0; from < n; from += kBlock) {
    const std::size_t width = n - from < kBlock ? n - from : kBlock;
    old_values(p, m, v, gradient(g, grad_dtype, from, width, grad), from, width, s, r, count, next, p0, m0, v0);
    std::memcpy(p + from, p0, width * sizeof(float));
    std::memcpy(m + from, m0, width * sizeof(float));
    std::memcpy(v + from, v0, width * sizeof(float));
    write_weights(p0, out, out_dtype, from, width);
  }
}

}  // namespace

bool adam_record(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype, std::size_t n,
                 const AdamScalars& s, const UndoTile& r) {
  alignas(64) float grad[kBlock], p1[kBlock], m1[kBlock], v1[kBlock];
  alignas(64) std::uint32_t bad[kBlock];
  const KernelTable& k = kernels();
  std::size_t count = 0;
  for (std::size_t from = 0; from < n; from += kBlock) {
    const std::size_t width = n - from < kBlock ? n - from : kBlock;
    const float* gradients = gradient(g, grad_dtype, from, width, grad);
    const std::size_t found = k.record_block(p + from, m + from, v + from, gradients, width, s, p1, m1, v1,
                                             r.low_p + from, r.low_m + from, r.low_v + from, bad);
    if (count + found > kEscapes) {
      undo_prefix(p, m, v, g, grad_dtype, out, out_dtype, from, s, r, count);
      *r.count = kNotStepped;
      return false;
    }
    // The record is whole before anything is overwritten.
    for (std::size_t i = 0; found && i < width; ++i)
      if (bad[i]) r.escapes[count++] = {std::uint32_t(from + i), p[from + i], m[from + i], v[from + i]};
    std::memcpy(p + from, p1, width * sizeof(float));
    std::memcpy(m + from, m1, width * sizeof(float));
    std::memcpy(v + from, v1, width * sizeof(float));
    write_weights(p1, out, out_dtype, from, width);
  }
  *r.count = std::uint32_t(count);
  return true;
}

void adam_undo(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype, std::size_t n,
               const AdamScalars& s, const UndoTile& r) {
  if (*r.count == kNotStepped) return;
  undo_prefix(p, m, v, g, grad_dtype, out, out_dtype, n, s, r, *r.count);
}

void adam_undo_redo(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype,
                    std::size_t n, const AdamScalars& old_step, const AdamScalars& new_step, const UndoTile& r) {
  const KernelTable& k = kernels();
  if (*r.count == kNotStepped) {
    k.adam[grad_dtype][out ? out_dtype : int(kF32)](p, m, v, g, out, n, new_step);
    return;
  }
  alignas(64) float grad[kBlock], p0[kBlock], m0[kBlock], v0[kBlock];
  std::size_t next = 0;
  for (std::size_t from = 0; from < n; from += kBlock) {
    const std::size_t width = n - from < kBlock ? n - from : kBlock;
    const float* gradients = gradient(g, grad_dtype, from, width, grad);
    old_values(p, m, v, gradients, from, width, old_step, r, *r.count, next, p0, m0, v0);
    const int dtype = out ? out_dtype : int(kF32);
    void* target = dtype == kF32 ? nullptr : static_cast<char*>(out) + from * 2;
    k.adam[kF32][dtype](p0, m0, v0, gradients, target, width, new_step);
    std::memcpy(p + from, p0, width * sizeof(float));
    std::memcpy(m + from, m0, width * sizeof(float));
    std::memcpy(v + from, v0, width * sizeof(float));
  }
}

}  // namespace so
