// The split master in blocks that fit in the first-level cache: joined there, stepped by the plain kernel, split again.
#include "split.h"

#include <cstring>

namespace so {
namespace {

// Few enough for the processor to work on two blocks at once: one waits for memory while the other computes.
constexpr std::size_t kBlock = 128;

std::size_t at_most(std::size_t left, std::size_t limit) { return left < limit ? left : limit; }

// Calls f(p, v) on the plain arrays of one tile; f writes the weights itself. They stay in the second-level cache.
template <class F>
auto with_plain(const std::uint16_t* weight, std::uint16_t* remainder, float* v, std::size_t n, F&& f) {
  alignas(64) float p[kUndoTile], plain_v[kUndoTile];
  const KernelTable& k = kernels();
  k.join_block(weight, remainder, v, n, p, plain_v);
  struct SplitAgain {  // f may return nothing
    const KernelTable& k;
    const float *p, *plain_v;
    std::size_t n;
    std::uint16_t* remainder;
    float* v;
    ~SplitAgain() { k.split_block(p, plain_v, n, remainder, v); }
  } split_again{k, p, plain_v, n, remainder, v};
  return f(p, plain_v);
}

// 1 or 0, without a branch: 2^32 of them are asked for.
std::uint32_t nan_bit(std::uint32_t u) { return std::int32_t(u & 0x7FFFFFFFu) > 0x7F800000 ? 1u : 0u; }

}  // namespace

void adam_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g, int grad_dtype,
                std::size_t n, const AdamScalars& s) {
  alignas(64) float p[kBlock], plain_v[kBlock];
  const KernelTable& k = kernels();
  const AdamFn adam = k.adam[grad_dtype][kBF16];
  const std::size_t size = dtype_bytes(grad_dtype);
  for (std::size_t from = 0; from < n; from += kBlock) {
    const std::size_t width = at_most(n - from, kBlock);
    k.join_block(weight + from, remainder + from, v + from, width, p, plain_v);
    adam(p, m + from, plain_v, static_cast<const char*>(g) + from * size, weight + from, width, s);
    k.split_block(p, plain_v, width, remainder + from, v + from);
  }
}

void split(const float* p, std::uint16_t* weight, std::uint16_t* remainder, float* v, std::size_t n) {
  alignas(64) float plain_v[kBlock];
  const KernelTable& k = kernels();
  for (std::size_t from = 0; from < n; from += kBlock) {
    const std::size_t width = at_most(n - from, kBlock);
    std::memcpy(plain_v, v + from, width * sizeof(float));
    k.cast[kF32][kBF16](p + from, weight + from, width);
    k.split_block(p + from, plain_v, width, remainder + from, v + from);
  }
}

void join(const std::uint16_t* weight, const std::uint16_t* remainder, const float* v, float* p, float* plain_v,
          std::size_t n) {
  alignas(64) float buffer[kBlock];
  const KernelTable& k = kernels();
  for (std::size_t from = 0; from < n; from += kBlock) {
    const std::size_t width = at_most(n - from, kBlock);
    k.join_block(weight + from, remainder + from, v + from, width, p + from, buffer);
    std::memcpy(plain_v + from, buffer, width * sizeof(float));
  }
}

bool adam_record_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g,
                       int grad_dtype, std::size_t n, const AdamScalars& s, const UndoTile& record) {
  return with_plain(weight, remainder, v, n, [&](float* p, float* plain_v) {
    return adam_record(p, m, plain_v, g, grad_dtype, weight, kBF16, n, s, record);
  });
}

void adam_undo_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g, int grad_dtype,
                     std::size_t n, const AdamScalars& s, const UndoTile& record) {
  with_plain(weight, remainder, v, n,
             [&](float* p, float* plain_v) { adam_undo(p, m, plain_v, g, grad_dtype, weight, kBF16, n, s, record); });
}

void adam_undo_redo_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g,
                          int grad_dtype, std::size_t n, const AdamScalars& old_step, const AdamScalars& new_step,
                          const UndoTile& record) {
  with_plain(weight, remainder, v, n, [&](float* p, float* plain_v) {
    adam_undo_redo(p, m, plain_v, g, grad_dtype, weight, kBF16, n, old_step, new_step, record);
  });
}

bool any_sign(const float* x, std::size_t n) {
  std::uint32_t all = 0;
  for (std::size_t i = 0; i < n; ++i) {
    std::uint32_t u;
    std::memcpy(&u, x + i, sizeof u);
    all |= u;
  }
  return all >> 31 != 0;
}

std::size_t split_failures(std::uint32_t upper) {
  alignas(64) std::uint32_t u[kBlock], v[kBlock], back[kBlock], plain_v[kBlock];
  alignas(64) float p[kBlock], carried[kBlock], joined[kBlock], joined_v[kBlock];
  alignas(64) std::uint16_t weight[kBlock], remainder[kBlock];
  const KernelTable& k = kernels();
  std::size_t failures = 0;
  for (std::uint32_t lower = 0; lower < 0x10000u; lower += kBlock) {
    for (std::uint32_t i = 0; i < kBlock; ++i) {
      u[i] = upper << 16 | (lower + i);
      v[i] = (u[i] ^ u[i] << 13) & 0x7FFFFFFFu;  // anything without a sign
    }
    std::memcpy(p, u, sizeof u);
    std::memcpy(carried, v, sizeof v);
    split(p, weight, remainder, carried, kBlock);
    k.join_block(weight, remainder, carried, kBlock, joined, joined_v);
    std::memcpy(back, joined, sizeof back);
    std::memcpy(plain_v, joined_v, sizeof plain_v);
    std::uint32_t bad = 0;
    for (std::uint32_t i = 0; i < kBlock; ++i) {
      // Rounding in other words: to the nearer of two neighbours, of two as near to the even one.
      const std::uint32_t low = u[i] & 0xFFFFu, high = u[i] >> 16, nan = nan_bit(u[i]);
      const std::uint32_t nearest = high + ((low > 0x8000u ? 1u : 0u) | (low == 0x8000u ? high & 1u : 0u));
      const std::uint32_t wanted = nan ? 0x7FC0u : nearest;
      const std::uint32_t differs = nan ? 1u ^ nan_bit(back[i]) : u[i] ^ back[i];
      bad += (differs | (weight[i] ^ wanted) | (v[i] ^ plain_v[i])) != 0u ? 1u : 0u;
    }
    failures += bad;
  }
  return failures;
}

}  // namespace so
