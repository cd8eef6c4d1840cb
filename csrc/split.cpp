// The split master beside its steps, which are in undo.cpp: to and from it, and the proof of it by trying.
#include "split.h"

#include <cstring>

namespace so {
namespace {

constexpr std::size_t kBlock = 128;

// 1 or 0, without a branch: 2^32 of them are asked for.
std::uint32_t nan_bit(std::uint32_t u) { return std::int32_t(u & 0x7FFFFFFFu) > 0x7F800000 ? 1u : 0u; }

}  // namespace

void adam_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g, int grad_dtype,
                std::size_t n, const AdamScalars& s, const KernelTable& k) {
  k.adam_split[grad_dtype](weight, remainder, m, v, g, n, s);
}

void split(const float* p, std::uint16_t* weight, std::uint16_t* remainder, float* v, std::size_t n,
           const KernelTable& k) {
  k.split(p, v, n, weight, remainder, v);
}

void join(const std::uint16_t* weight, const std::uint16_t* remainder, const float* v, float* p, float* plain_v,
          std::size_t n) {
  kernels().join(weight, remainder, v, n, p, plain_v);
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
  std::size_t failures = 0;
  for (std::uint32_t lower = 0; lower < 0x10000u; lower += kBlock) {
    for (std::uint32_t i = 0; i < kBlock; ++i) {
      u[i] = upper << 16 | (lower + i);
      v[i] = (u[i] ^ u[i] << 13) & 0x7FFFFFFFu;  // anything without a sign
    }
    std::memcpy(p, u, sizeof u);
    std::memcpy(carried, v, sizeof v);
    split(p, weight, remainder, carried, kBlock);
    join(weight, remainder, carried, joined, joined_v, kBlock);
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
