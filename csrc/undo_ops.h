// The loops of the undo record, one element at a time and free of branches, so that each instruction set's compiler
// vectorises them: included by every adam_*.cpp, hence the unnamed namespace (see scalar_ops.h).
//
// A step is inverted in fp32 and repaired with one stored byte for each of p, m and v: the low byte of the old value as
// an ordered integer. Inverting costs a few ulp, the byte covers 128 to either side; an element beyond that is `bad`
// and goes to an escape list. Estimates are the same fp32 operations when recording and when undoing, so they agree.
#pragma once

#include "scalar_ops.h"
#include "undo.h"

namespace so {
namespace {

// Neighbouring floats are neighbouring integers, across zero too; the map is its own inverse. Arithmetic on it is
// modulo 2^32, so that even a NaN comes back exactly.
inline std::uint32_t ordered(float x) {
  const std::uint32_t u = bits_of(x);
  return u ^ ((0u - (u >> 31)) & 0x7FFFFFFFu);
}
inline float from_ordered(std::uint32_t u) { return float_of(u ^ ((0u - (u >> 31)) & 0x7FFFFFFFu)); }

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
  const std::uint32_t e = ordered(estimate);
  const std::uint32_t difference = (low_byte - e + 128u) & 0xFFu;
  return from_ordered(e + difference - 128u);
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

// Steps n <= kUndoBlock elements into new_p, new_m, new_v without touching the old ones. Returns how many are bad.
std::size_t record_block(const float* __restrict p, const float* __restrict m, const float* __restrict v,
                         const float* __restrict g, std::size_t n, const AdamScalars& scalars, float* __restrict new_p,
                         float* __restrict new_m, float* __restrict new_v, std::uint8_t* __restrict low_p,
                         std::uint8_t* __restrict low_m, std::uint8_t* __restrict low_v,
                         std::uint32_t* __restrict bad) {
  alignas(64) std::uint32_t op[kUndoBlock], om[kUndoBlock], ov[kUndoBlock];
  const AdamScalars s = scalars;
  const Inverse r = inverse_of(s);
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const float grad = g[i] * s.grad_scale;
    const float m1 = __builtin_fmaf(s.one_minus_b1, grad - m[i], m[i]);
    const float v1 = __builtin_fmaf(s.one_minus_b2 * grad, grad, v[i] * s.beta2);
    const float quotient = (s.neg_step_size * m1) / (std::sqrt(v1) / s.bc2_sqrt + s.eps);
    const float p1 = p[i] * s.decay + quotient;
    op[i] = ordered(p[i]);
    om[i] = ordered(m[i]);
    ov[i] = ordered(v[i]);
    const std::uint32_t off = (op[i] - ordered((p1 - quotient) * r.decay) + 128u) |
                              (om[i] - ordered(estimate_m(m1, grad, s, r)) + 128u) |
                              (ov[i] - ordered(estimate_v(v1, grad, s, r)) + 128u);
    const std::uint32_t b = off > 255u ? 1u : 0u;  // one byte covers -128 to 127
    bad[i] = b;
    found += b;
    new_p[i] = p1;
    new_m[i] = m1;
    new_v[i] = v1;
  }
  pack(op, low_p, n);
  pack(om, low_m, n);
  pack(ov, low_v, n);
  return found;
}

// The old values of n <= kUndoBlock elements, but for the bad ones.
void undo_block(const float* __restrict p, const float* __restrict m, const float* __restrict v,
                const float* __restrict g, std::size_t n, const AdamScalars& scalars,
                const std::uint8_t* __restrict low_p, const std::uint8_t* __restrict low_m,
                const std::uint8_t* __restrict low_v, float* __restrict old_p, float* __restrict old_m,
                float* __restrict old_v) {
  alignas(64) std::uint32_t op[kUndoBlock], om[kUndoBlock], ov[kUndoBlock];
  unpack(low_p, op, n);
  unpack(low_m, om, n);
  unpack(low_v, ov, n);
  const AdamScalars s = scalars;
  const Inverse r = inverse_of(s);
  for (std::size_t i = 0; i < n; ++i) {
    const float grad = g[i] * s.grad_scale;
    const float quotient = (s.neg_step_size * m[i]) / (std::sqrt(v[i]) / s.bc2_sqrt + s.eps);
    old_p[i] = repaired((p[i] - quotient) * r.decay, op[i]);
    old_m[i] = repaired(estimate_m(m[i], grad, s, r), om[i]);
    old_v[i] = repaired(estimate_v(v[i], grad, s, r), ov[i]);
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
