// The loops of the split master: 32-bit floats to and from their two halves. Included by every adam_*.cpp, hence the
// unnamed namespace (see scalar_ops.h).
//
// The weight w is the master's bits u rounded to nearest even, the remainder their lower half. Rounding leaves the
// upper half h = u >> 16 alone or adds one to it:
//
//     w = (u + 0x7FFF + (h & 1)) >> 16 = h + c,  c = 1 where lower + 0x7FFF + (h & 1) >= 0x10000, else 0.
//
// So w and the remainder leave two candidates, w and w - 1, of which one is even and the other odd: the parity of h,
// one bit, decides, whatever u is. That bit stands where no Adam has use for one, in the sign of v:
//
//     h = w - ((w ^ parity) & 1),  u = h << 16 | remainder.
//
// Without it no 16-bit remainder can do. c depends on h for lower = 0x8000 only: below, h = w; above, h = w - 1; at
// 0x8000, the tie, h is w where w is even and w - 1 where that is odd, so w is even both times. An odd weight has
// 65,535 masters, w * 65536 - 0x7FFF to w * 65536 + 0x7FFF, and an even one 65,537, with both ties: one more than
// remainders. (0, -0 and the infinities have only the 32,769 on one side, as beyond them lie NaN.)
//
// v has the sign to spare: v * beta2 + (1 - beta2) * g * g is a sum of products of equal signs, at least +0. A NaN
// becomes the weight 0x7FC0 whatever its bits, and comes back as a NaN: as 0x7FC0 or 0x7FBF and any lower half.
#pragma once

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "scalar_ops.h"

namespace so {
namespace {

// p and plain_v from weight, remainder and v.
void join_block(const std::uint16_t* __restrict weight, const std::uint16_t* __restrict remainder,
                const float* __restrict v, std::size_t n, float* __restrict p, float* __restrict plain_v) {
  std::size_t i = 0;
#if defined(__ARM_NEON)  // these files are compiled without the compiler's own vectors
  for (; i + 8 <= n; i += 8) {
    const uint32x4_t low = vld1q_u32(reinterpret_cast<const std::uint32_t*>(v + i));
    const uint32x4_t high = vld1q_u32(reinterpret_cast<const std::uint32_t*>(v + i + 4));
    const uint16x8_t parity = vshrq_n_u16(vcombine_u16(vshrn_n_u32(low, 16), vshrn_n_u32(high, 16)), 15);
    const uint16x8_t w = vld1q_u16(weight + i);
    const uint16x8_t upper = vsubq_u16(w, vandq_u16(veorq_u16(w, parity), vdupq_n_u16(1)));
    const uint16x8x2_t u = vzipq_u16(vld1q_u16(remainder + i), upper);
    vst1q_f32(p + i, vreinterpretq_f32_u16(u.val[0]));
    vst1q_f32(p + i + 4, vreinterpretq_f32_u16(u.val[1]));
    vst1q_f32(plain_v + i, vabsq_f32(vreinterpretq_f32_u32(low)));
    vst1q_f32(plain_v + i + 4, vabsq_f32(vreinterpretq_f32_u32(high)));
  }
#endif
  for (; i < n; ++i) {
    const std::uint32_t w = weight[i], flagged = bits_of(v[i]);
    const std::uint32_t upper = w - ((w ^ (flagged >> 31)) & 1u);
    p[i] = float_of(upper << 16 | remainder[i]);
    plain_v[i] = float_of(flagged & 0x7FFFFFFFu);
  }
}

// remainder and v from p and plain_v; the weight is the cast of p.
void split_block(const float* __restrict p, const float* __restrict plain_v, std::size_t n,
                 std::uint16_t* __restrict remainder, float* __restrict v) {
  std::size_t i = 0;
#if defined(__ARM_NEON)
  for (; i + 4 <= n; i += 4) {
    const uint32x4_t u = vreinterpretq_u32_f32(vld1q_f32(p + i));
    vst1_u16(remainder + i, vmovn_u32(u));
    const uint32x4_t sign = vdupq_n_u32(0x80000000u);
    const uint32x4_t flagged = vbslq_u32(sign, vshlq_n_u32(u, 15), vreinterpretq_u32_f32(vld1q_f32(plain_v + i)));
    vst1q_f32(v + i, vreinterpretq_f32_u32(flagged));
  }
#endif
  for (; i < n; ++i) {
    const std::uint32_t u = bits_of(p[i]);
    remainder[i] = std::uint16_t(u);
    v[i] = float_of((bits_of(plain_v[i]) & 0x7FFFFFFFu) | (u << 15 & 0x80000000u));
  }
}

}  // namespace
}  // namespace so
