// Adam in one pass over memory: the arithmetic of a step and its loop, for every instruction set (`V`, see vector.h)
// and both layouts of the master. Included by every adam_*.cpp, hence the unnamed namespace (see scalar_ops.h).
#pragma once

#include "lines.h"
#include "vector.h"

namespace so {
namespace {

// --- Where p and v lie ----------------------------------------------------------------------------------------------

// fp32, with a 16-bit copy for the GPU on the side: dtype O, or kF32 for none.
template <int O>
struct PlainMaster {
  using Weights = Staged<O == kF32 ? 0 : 2>;
  float *p, *v;
  void* out;

  template <class V, class L>
  SO_INLINE typename V::F load_p(L lanes, std::size_t i, typename V::F&) const {
    return V::template load<kF32>(lanes, p, i);
  }
  template <class V, class L>
  SO_INLINE void store(L lanes, std::size_t i, typename V::F p1, typename V::F v1) const {
    V::template store<kF32>(lanes, v, i, v1);
    V::template store<kF32>(lanes, p, i, p1);
    if constexpr (O != kF32) V::template store<O>(lanes, out, i, p1);
  }

  void* weights_from(std::size_t from) const { return O == kF32 ? nullptr : static_cast<char*>(out) + 2 * from; }
  PlainMaster part(std::size_t from, Weights& weights) const {
    return {p + from, v + from, weights.place(weights_from(from))};
  }
};

// bf16 weight and remainder, and a bit in the sign of v. The weight is read too, so its line is there anyway.
struct SplitMaster {
  using Weights = Staged<0>;
  std::uint16_t *weight, *remainder;
  float* v;

  template <class V, class L>
  SO_INLINE typename V::F load_p(L lanes, std::size_t i, typename V::F& v0) const {
    return V::join(lanes, weight, remainder, i, v0);
  }
  template <class V, class L>
  SO_INLINE void store(L lanes, std::size_t i, typename V::F p1, typename V::F v1) const {
    V::template store<kBF16>(lanes, weight, i, p1);
    V::store_remainder(lanes, remainder, i, p1);
    V::template store<kF32>(lanes, v, i, V::flagged(v1, p1));
  }

  void* weights_from(std::size_t from) const { return weight + from; }
  SplitMaster part(std::size_t from, Weights&) const { return {weight + from, remainder + from, v + from}; }
};

// --- The definition of a step ---------------------------------------------------------------------------------------

// What is added to the decayed p, from the new moments.
template <class V>
SO_INLINE inline typename V::F update_of(typename V::F m1, typename V::F v1, const AdamScalars& s) {
  const auto denominator = V::add(V::div(V::sqrt(v1), V::set(s.bc2_sqrt)), V::set(s.eps));
  return V::div(V::mul(V::set(s.neg_step_size), m1), denominator);
}

// The gradient that the moments see: scaled, and with torch.optim.Adam's weight decay.
template <class V, bool L2>
SO_INLINE inline typename V::F scaled(typename V::F raw, typename V::F p0, const AdamScalars& s) {
  const auto grad = V::mul(raw, V::set(s.grad_scale));
  if constexpr (L2) return V::fma(V::set(s.l2), p0, grad);
  return grad;
}

// torch.optim's formula in its order: lerp for m, decay before the update, quotient scaled before division. The fused
// multiply-adds stand where torch's kernels have theirs.
template <class V>
SO_INLINE inline void advance_moments(typename V::F grad, typename V::F& m, typename V::F& v, const AdamScalars& s) {
  m = V::fma(V::set(s.one_minus_b1), V::sub(grad, m), m);
  v = V::fma(V::mul(V::set(s.one_minus_b2), grad), grad, V::mul(v, V::set(s.beta2)));
}
template <class V>
SO_INLINE inline typename V::F advanced(typename V::F p, typename V::F update, const AdamScalars& s) {
  return V::add(V::mul(p, V::set(s.decay)), update);
}

// --- Loops ----------------------------------------------------------------------------------------------------------

template <int G>
const void* gradient_from(const void* g, std::size_t from) {
  return static_cast<const char*>(g) + from * (G == kF32 ? 4 : 2);
}

// Calls f(from, width, master of the block, its gradient) for blocks of n elements until one does less than `width`,
// which is what f returns. Blocks are there for what is staged; where nothing is, all is one block.
template <int G, bool Staging, class Master, class F>
SO_INLINE inline void for_each_block(const Master& master, const void* g, std::size_t n, F&& f) {
  typename Master::Weights weights;
  constexpr bool kBlocks = kStreamsLines && (Staging || !std::is_same_v<typename Master::Weights, Staged<0>>);
  const std::size_t block = kBlocks ? kStagedBlock : n;
  for (std::size_t from = 0; from < n; from += block) {
    const std::size_t width = n - from < block ? n - from : block;
    const std::size_t done = f(from, width, master.part(from, weights), gradient_from<G>(g, from));
    weights.flush(master.weights_from(from), done);
    if (done < width) break;
  }
  Master::Weights::fence();
}

template <class V, int G, bool L2, class Master>
[[gnu::noinline]] void adam_loop(const Master& master, float* m, const void* g, std::size_t n,
                                 const AdamScalars& scalars) {
  const AdamScalars s = scalars;  // a copy that no store can change: it stays in registers
  const auto advance_block = [&](std::size_t from, std::size_t width, const Master& block,
                                 const void* grads) SO_INLINE {
    return for_each_vector<V>(width, [&](auto isa, auto lanes, std::size_t i) SO_INLINE {
      using W = decltype(isa);
      typename W::F v1 = W::template load<kF32>(lanes, block.v, i);
      typename W::F p1 = block.template load_p<W>(lanes, i, v1);
      typename W::F m1 = W::template load<kF32>(lanes, m + from, i);
      advance_moments<W>(scaled<W, L2>(W::template load<G>(lanes, grads, i), p1, s), m1, v1, s);
      p1 = advanced<W>(p1, update_of<W>(m1, v1, s), s);
      W::template store<kF32>(lanes, m + from, i, m1);
      block.template store<W>(lanes, i, p1, v1);
      return true;
    });
  };
  for_each_block<G, false>(master, g, n, advance_block);
}

template <class V, int G, class Master>
void adam_on(const Master& master, float* m, const void* g, std::size_t n, const AdamScalars& s) {
  if (s.l2 != 0.0f) {  // not by a product with zero, which would change bits
    adam_loop<V, G, true>(master, m, g, n, s);
  } else {
    adam_loop<V, G, false>(master, m, g, n, s);
  }
}

template <class V, int G, int O>
void adam(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& s) {
  adam_on<V, G>(PlainMaster<O>{p, v, out}, m, g, n, s);
}
template <class V, int G>
void adam_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g, std::size_t n,
                const AdamScalars& s) {
  adam_on<V, G>(SplitMaster{weight, remainder, v}, m, g, n, s);
}

}  // namespace
}  // namespace so
