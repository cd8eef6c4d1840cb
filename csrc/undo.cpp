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

// Undoes one block in place. `next` walks through the escape list, which is in order of index.
void undo_escaping(float* p, float* m, float* v, const float* grad, std::size_t from, std::size_t n,
                   const AdamScalars& s, const UndoTile& r, std::size_t count, std::size_t& next) {
  kernels().undo_block(p + from, m + from, v + from, grad, n, s, r.low_p + from, r.low_m + from, r.low_v + from);
  for (; next < count && r.escapes[next].index < from + n; ++next) {
    const Escape& e = r.escapes[next];
    p[e.index] = e.p;
    m[e.index] = e.m;
    v[e.index] = e.v;
  }
}

void undo_prefix(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype, std::size_t n,
                 const AdamScalars& s, const UndoTile& r, std::size_t count) {
  alignas(64) float grad[kBlock];
  std::size_t next = 0;
  for (std::size_t from = 0; from < n; from += kBlock) {
    const std::size_t width = n - from < kBlock ? n - from : kBlock;
    undo_escaping(p, m, v, gradient(g, grad_dtype, from, width, grad), from, width, s, r, count, next);
    write_weights(p + from, out, out_dtype, from, width);
  }
}

}  // namespace

bool adam_record(float* p, float* m, float* v, const void* g, int grad_dtype, void* out, int out_dtype, std::size_t n,
                 const AdamScalars& s, const UndoTile& r) {
  alignas(64) float grad[kBlock];
  alignas(64) std::uint32_t old_p[kBlock], old_m[kBlock], old_v[kBlock], off[kBlock];
  const KernelTable& k = kernels();
  std::size_t count = 0;
  for (std::size_t from = 0; from < n; from += kBlock) {
    const std::size_t width = n - from < kBlock ? n - from : kBlock;
    const float* gradients = gradient(g, grad_dtype, from, width, grad);
    const bool any = k.record_block(p + from, m + from, v + from, gradients, width, s, old_p, old_m, old_v, off,
                                    r.low_p + from, r.low_m + from, r.low_v + from);
    for (std::size_t i = 0; any && i < width; ++i) {
      if (off[i] <= kByteReach) continue;
      if (count == kEscapes) {
        // This block's old values are still at hand; the blocks before it have their records.
        std::memcpy(p + from, old_p, width * sizeof(float));
        std::memcpy(m + from, old_m, width * sizeof(float));
        std::memcpy(v + from, old_v, width * sizeof(float));
        while (count > 0 && r.escapes[count - 1].index >= from) --count;
        undo_prefix(p, m, v, g, grad_dtype, out, out_dtype, from, s, r, count);
        *r.count = kNotStepped;
        return false;
      }
      Escape& e = r.escapes[count++];
      e.index = std::uint32_t(from + i);
      std::memcpy(&e.p, &old_p[i], sizeof(float));
      std::memcpy(&e.m, &old_m[i], sizeof(float));
      std::memcpy(&e.v, &old_v[i], sizeof(float));
    }
    write_weights(p + from, out, out_dtype, from, width);
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
  const int dtype = out ? out_dtype : int(kF32);
  if (*r.count == kNotStepped) {
    k.adam[grad_dtype][dtype](p, m, v, g, out, n, new_step);
    return;
  }
  alignas(64) float grad[kBlock];
  std::size_t next = 0;
  for (std::size_t from = 0; from < n; from += kBlock) {
    const std::size_t width = n - from < kBlock ? n - from : kBlock;
    const float* gradients = gradient(g, grad_dtype, from, width, grad);
    undo_escaping(p, m, v, gradients, from, width, old_step, r, *r.count, next);
    void* target = dtype == kF32 ? nullptr : static_cast<char*>(out) + from * 2;
    k.adam[kF32][dtype](p + from, m + from, v + from, gradients, target, width, new_step);  // still in the first cache
  }
}

}  // namespace so
