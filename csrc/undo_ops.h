// The loops of the undo record, one element at a time and free of branches, so that each instruction set's compiler
// vectorises them: included by every adam_*.cpp, hence the unnamed namespace (see scalar_ops.h).
//
// A step is inverted in fp32 and repaired with one stored byte for each of p, m and v: the low byte of the old value's
// bits. Floats of one sign are neighbours exactly where their bits are, so a byte covers 128 neighbours to either side,
// and inverting costs a few. An element beyond that (or across zero) is bad and goes to an escape list. Estimates are
// the same fp32 operations when recording and when undoing, so they agree; arithmetic on bits is modulo 2^32, so that
// even a NaN comes back exactly.
#pragma once

#include "scalar_ops.h"
#include "undo.h"

namespace so {
namespace {

struct Inverse {
  float decay, beta1, beta2;  // reciprocals
};
inline Inverse inverse_of(const AdamScalars& s) {
  return {1.0f / s.decay, 1.0f / (1.0f - s.one_minus_b1), 1.0f / s.beta2};
}

// What is left of `now` is only its rounding error where the old value was zero, as all are at the first step: that is
// taken for the zero it was, or one byte could not repair it.
inline float without_residue(float estimate, float now) {
  return std::fabs(estimate) <= std::fabs(now) * 0x1p-20f ? 0.0f : estimate;
}
inline float estimate_m(float m1, float grad, const AdamScalars& s, const Inverse& r) {
  return without_residue(__builtin_fmaf(-s.one_minus_b1, grad, m1) * r.beta1, m1);
}
inline float estimate_v(float v1, float grad, const AdamScalars& s, const Inverse& r) {
  return without_residue(__builtin_fmaf(-(s.one_minus_b2 * grad), grad, v1) * r.beta2, v1);
}

inline float repaired(float estimate, std::uint32_t low_byte) {
  const std::uint32_t e = bits_of(estimate);
  return float_of(e + ((low_byte - e + 128u) & 0xFFu) - 128u);
}

// The main loops hold 32-bit values only, and bytes are packed in loops of their own: beside byte stores a compiler
// would take 64 elements at a time and spill most of them.
inline void pack(const std::uint32_t* __restrict from, std::uint8_t* __restrict to, std::size_t n) {
  std::size_t i = 0;
#ifdef __AVX512F__
  for (; i + 16 <= n; i += 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(_mm512_loadu_si512(from + i)));
  }
#endif
  for (; i < n; ++i) to[i] = std::uint8_t(from[i]);
}
inline void unpack(const std::uint8_t* __restrict from, std::uint32_t* __restrict to, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) to[i] = from[i];
}

// Steps n <= kUndoBlock elements in place and leaves the bits of the old values in old_p, old_m, old_v. An element is
// bad where its `off` is above kByteReach; returns whether any is.
bool record_block(float* __restrict p, float* __restrict m, float* __restrict v, const float* __restrict g,
                  std::size_t n, const AdamScalars& scalars, std::uint32_t* __restrict old_p,
                  std::uint32_t* __restrict old_m, std::uint32_t* __restrict old_v, std::uint32_t* __restrict off,
                  std::uint8_t* __restrict low_p, std::uint8_t* __restrict low_m, std::uint8_t* __restrict low_v) {
  const AdamScalars s = scalars;
  const Inverse r = inverse_of(s);
  std::uint32_t any = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const float p0 = p[i], m0 = m[i], v0 = v[i];
    const float grad = g[i] * s.grad_scale;
    const float m1 = __builtin_fmaf(s.one_minus_b1, grad - m0, m0);
    const float v1 = __builtin_fmaf(s.one_minus_b2 * grad, grad, v0 * s.beta2);
    const float quotient = (s.neg_step_size * m1) / (std::sqrt(v1) / s.bc2_sqrt + s.eps);
    const float p1 = p0 * s.decay + quotient;
    const std::uint32_t dp = bits_of(p0) - bits_of((p1 - quotient) * r.decay) + 128u;
    const std::uint32_t dm = bits_of(m0) - bits_of(estimate_m(m1, grad, s, r)) + 128u;
    const std::uint32_t dv = bits_of(v0) - bits_of(estimate_v(v1, grad, s, r)) + 128u;
    off[i] = dp | dm | dv;
    any |= dp | dm | dv;
    old_p[i] = bits_of(p0);
    old_m[i] = bits_of(m0);
    old_v[i] = bits_of(v0);
    p[i] = p1;
    m[i] = m1;
    v[i] = v1;
  }
  pack(old_p, low_p, n);
  pack(old_m, low_m, n);
  pack(old_v, low_v, n);
  return any > kByteReach;
}

// Restores n <= kUndoBlock elements in place, but for the bad ones.
void undo_block(float* __restrict p, float* __restrict m, float* __restrict v, const float* __restrict g, std::size_t n,
                const AdamScalars& scalars, const std::uint8_t* __restrict low_p, const std::uint8_t* __restrict low_m,
                const std::uint8_t* __restrict low_v) {
  alignas(64) std::uint32_t bp[kUndoBlock], bm[kUndoBlock], bv[kUndoBlock];
  unpack(low_p, bp, n);
  unpack(low_m, bm, n);
  unpack(low_v, bv, n);
  const AdamScalars s = scalars;
  const Inverse r = inverse_of(s);
  for (std::size_t i = 0; i < n; ++i) {
    const float p1 = p[i], m1 = m[i], v1 = v[i];
    const float grad = g[i] * s.grad_scale;
    const float quotient = (s.neg_step_size * m1) / (std::sqrt(v1) / s.bc2_sqrt + s.eps);
    p[i] = repaired((p1 - quotient) * r.decay, bp[i]);
    m[i] = repaired(estimate_m(m1, grad, s, r), bm[i]);
    v[i] = repaired(estimate_v(v1, grad, s, r), bv[i]);
  }
}

// The traffic of an fp32 AdamW step and hardly any arithmetic: reads four arrays, writes three. What a step can reach
// at best, for benchmarks.
void adam_stream(float* __restrict p, float* __restrict m, float* __restrict v, const float* __restrict g,
                 std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    p[i] += g[i];
    m[i] += g[i];
    v[i] += g[i];
  }
}

}  // namespace
}  // namespace so
