// What the loops of step_ops.h and undo_ops.h ask of an instruction set: a struct of static functions on its vectors.
// The one here has a single lane. It is the definition, and the end of an array where there are no masks.
//
// Vectors travel by value and are never members: those of SVE have no size. `lanes` says which lanes of a vector stand
// for elements: Whole, or a type of the instruction set for the end of an array. Only memory is masked; arithmetic on
// the other lanes does no harm, and what they load is zero.
#pragma once

#include "scalar_ops.h"

// A loop's body in a lambda or function must not become a call: vectors would go through memory.
#define SO_INLINE __attribute__((always_inline))

namespace so {
namespace {

struct Whole {};  // every lane

struct ScalarVector {
  using F = float;
  using I = std::uint32_t;
  static constexpr std::size_t kMaxLanes = 1;
  static constexpr int kUnroll = 1;      // vectors in a turn of the main loop
  static constexpr bool kMasks = false;  // whether first_lanes() is there

  static std::size_t width() { return 1; }
  static Whole whole() { return {}; }

  template <int D>
  static F load(Whole, const void* base, std::size_t i) {
    return so::load<D>(base, i);
  }
  template <int D>
  static void store(Whole, void* base, std::size_t i, F x) {
    so::store<D>(base, i, x);
  }

  static F set(float x) { return x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return std::sqrt(a); }
  static F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }  // a * b + c; at the ABI floor libm's, also exact

  // Of the undo record: floats of one sign are neighbours exactly where their bits are.
  static I distance(F a, F b) { return bits_of(a) - bits_of(b); }  // modulo 2^32
  static F moved(F a, I distance) { return float_of(bits_of(a) + distance); }
  // At most 255 where the distance is -128 to 127, and so where either is.
  static I reach(I distance) { return distance + 128u; }
  static I either(I a, I b) { return a | b; }
  static bool any_beyond_byte(Whole, I reach) { return reach > 255u; }
  static I load_bytes(Whole, const std::int8_t* base, std::size_t i) { return I(std::int32_t(base[i])); }
  static void store_bytes(Whole, std::int8_t* base, std::size_t i, I x) { base[i] = std::int8_t(x); }
  static void spill(std::uint32_t* to, I x) { *to = x; }

  // Of the split master; see split_ops.h. `join` takes the bit out of v.
  static F join(Whole, const std::uint16_t* weight, const std::uint16_t* remainder, std::size_t i, F& v) {
    const std::uint32_t w = weight[i], flagged = bits_of(v);
    v = float_of(flagged & 0x7FFFFFFFu);
    return float_of((w - ((w ^ (flagged >> 31)) & 1u)) << 16 | remainder[i]);
  }
  static void store_remainder(Whole, std::uint16_t* remainder, std::size_t i, F p) {
    remainder[i] = std::uint16_t(bits_of(p));
  }
  static F flagged(F v, F p) { return float_of((bits_of(v) & 0x7FFFFFFFu) | (bits_of(p) << 15 & 0x80000000u)); }
};

// Calls body(isa, lanes, i) for every vector of n elements until it returns false; returns the element where that was,
// or n. `isa` is an object of V, or of ScalarVector at the end.
template <class V, class Body>
SO_INLINE inline std::size_t for_each_vector(std::size_t n, Body&& body) {
  const std::size_t width = V::width();
  std::size_t i = 0;
  for (; i + V::kUnroll * width <= n; i += V::kUnroll * width) {
    if (!body(V{}, V::whole(), i)) return i;
    // Two vectors in flight hide the latency of square root and division.
    if constexpr (V::kUnroll == 2)
      if (!body(V{}, V::whole(), i + width)) return i + width;
  }
  if constexpr (V::kMasks) {
    for (; i < n; i += width)
      if (!body(V{}, V::first_lanes(n - i), i)) return i;
  } else if constexpr (V::kMaxLanes > 1) {
    for (; i < n; ++i)
      if (!body(ScalarVector{}, Whole{}, i)) return i;
  }
  return n;
}

template <class V, int S, int D>
void cast(const void* src, void* dst, std::size_t n) {
  if constexpr (S == D) {
    std::memcpy(dst, src, n * dtype_bytes(S));
  } else {
    for_each_vector<V>(n, [&](auto isa, auto lanes, std::size_t i) SO_INLINE {
      using W = decltype(isa);
      W::template store<D>(lanes, dst, i, W::template load<S>(lanes, src, i));
      return true;
    });
  }
}

// total += x, each element rounded once.
template <class V, int S>
void accumulate(float* total, const void* x, std::size_t n) {
  for_each_vector<V>(n, [&](auto isa, auto lanes, std::size_t i) SO_INLINE {
    using W = decltype(isa);
    W::template store<kF32>(lanes, total, i,
                            W::add(W::template load<kF32>(lanes, total, i), W::template load<S>(lanes, x, i)));
    return true;
  });
}

}  // namespace
}  // namespace so
