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

#include "step_ops.h"

namespace so {
namespace {

// p and plain_v from weight, remainder and v; plain_v may be v.
template <class V>
void join(const std::uint16_t* weight, const std::uint16_t* remainder, const float* v, std::size_t n, float* p,
          float* plain_v) {
  for_each_vector<V>(n, [&](auto isa, auto lanes, std::size_t i) SO_INLINE {
    using W = decltype(isa);
    typename W::F plain = W::template load<kF32>(lanes, v, i);
    const typename W::F master = W::join(lanes, weight, remainder, i, plain);
    W::template store<kF32>(lanes, p, i, master);
    W::template store<kF32>(lanes, plain_v, i, plain);
    return true;
  });
}

// Weight, remainder and v from p and plain_v, which may be v.
template <class V>
void split(const float* p, const float* plain_v, std::size_t n, std::uint16_t* weight, std::uint16_t* remainder,
           float* v) {
  const SplitMaster to{weight, remainder, v};
  for_each_vector<V>(n, [&](auto isa, auto lanes, std::size_t i) SO_INLINE {
    using W = decltype(isa);
    const typename W::F plain = W::template load<kF32>(lanes, plain_v, i);
    to.template store<W>(lanes, i, W::template load<kF32>(lanes, p, i), plain);
    return true;
  });
}

}  // namespace
}  // namespace so
