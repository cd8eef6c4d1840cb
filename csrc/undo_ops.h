// The loops of the undo record, for every instruction set and both layouts of the master (see step_ops.h).
//
// A step is inverted in fp32 and repaired with one stored byte for each of p, m and v: the old value's bits less those
// of the estimate. Floats of one sign are neighbours exactly where their bits are, so a byte covers 128 neighbours to
// either side, and inverting costs a few. An element beyond that (or across zero) escapes: it goes to a list with its
// old values. Estimates are the same fp32 operations when recording and when undoing, so they agree; arithmetic on bits
// is modulo 2^32, so that even a NaN comes back exactly.
#pragma once

#include "step_ops.h"
#include "undo.h"

namespace so {
namespace {

struct Inverse {
  float decay, beta1, beta2;  // reciprocals
};
inline Inverse inverse_of(const AdamScalars& s) {
  return {1.0f / s.decay, 1.0f / (1.0f - s.one_minus_b1), 1.0f / s.beta2};
}

template <class V>
SO_INLINE inline typename V::F estimate_p(typename V::F p1, typename V::F update, const Inverse& r) {
  return V::mul(V::sub(p1, update), V::set(r.decay));
}
// Products rounded by themselves, as the step's fused multiply-adds round them where the old moment is zero: then the
// estimate is exactly +0. All moments are zero at the first step, and those of untouched embeddings for long.
template <class V>
SO_INLINE inline typename V::F estimate_m(typename V::F m1, typename V::F grad, const AdamScalars& s,
                                          const Inverse& r) {
  return V::mul(V::sub(m1, V::mul(V::set(s.one_minus_b1), grad)), V::set(r.beta1));
}
template <class V>
SO_INLINE inline typename V::F estimate_v(typename V::F v1, typename V::F grad, const AdamScalars& s,
                                          const Inverse& r) {
  return V::mul(V::sub(v1, V::mul(V::mul(V::set(s.one_minus_b2), grad), grad)), V::set(r.beta2));
}

// One vector of values in memory, for the rare element that is looked at by itself.
template <class V>
struct Spilled {
  float p[V::kMaxLanes], m[V::kMaxLanes], v[V::kMaxLanes];
  std::uint32_t reach[V::kMaxLanes];
};

// Appends the elements whose `reach` is above a byte's; false, and the list as it was, where it has no room for them.
[[gnu::noinline, gnu::cold]] bool append_escapes(const float* p, const float* m, const float* v,
                                                 const std::uint32_t* reach, std::size_t lanes, std::size_t first,
                                                 Escape* list, std::size_t& count) {
  std::size_t next = count;
  for (std::size_t l = 0; l < lanes; ++l) {
    if (reach[l] <= 255u) continue;
    if (next == kEscapes) return false;
    list[next++] = {std::uint32_t(first + l), p[l], m[l], v[l]};
  }
  count = next;
  return true;
}

// Puts the escaped elements below first + lanes in their places; returns the next entry of the list.
[[gnu::noinline, gnu::cold]] std::size_t restore_escapes(float* p, float* m, float* v, std::size_t lanes,
                                                         std::size_t first, const Escape* list, std::size_t next,
                                                         std::size_t count) {
  for (; next < count && list[next].index < first + lanes; ++next) {
    const Escape& e = list[next];
    p[e.index - first] = e.p;
    m[e.index - first] = e.m;
    v[e.index - first] = e.v;
  }
  return next;
}

template <class V, int G, bool L2, class Master>
std::size_t record_loop(const Master& master, float* m, const void* g, std::size_t n, const AdamScalars& scalars,
                        const UndoTile& tile, std::size_t& escaped) {
  const AdamScalars s = scalars;
  const Inverse r = inverse_of(s);
  const UndoTile record = tile;
  Staged<1> staged_p, staged_m, staged_v;
  std::size_t count = 0, stepped = 0;
  const auto record_block = [&](std::size_t from, std::size_t width, const Master& block, const void* grads) SO_INLINE {
    auto* byte_p = static_cast<std::int8_t*>(staged_p.place(record.low_p + from));
    auto* byte_m = static_cast<std::int8_t*>(staged_m.place(record.low_m + from));
    auto* byte_v = static_cast<std::int8_t*>(staged_v.place(record.low_v + from));
    const std::size_t done = for_each_vector<V>(width, [&](auto isa, auto lanes, std::size_t i) SO_INLINE {
      using W = decltype(isa);
      typename W::F v1 = W::template load<kF32>(lanes, block.v, i);
      typename W::F p1 = block.template load_p<W>(lanes, i, v1);
      typename W::F m1 = W::template load<kF32>(lanes, m + from, i);
      const typename W::F p0 = p1, m0 = m1, v0 = v1;
      const auto grad = scaled<W, L2>(W::template load<G>(lanes, grads, i), p0, s);
      advance_moments<W>(grad, m1, v1, s);
      const auto update = update_of<W>(m1, v1, s);
      // One after the other, and each byte stored at once: AVX2 has no registers for all three.
      const auto off_m = W::distance(m0, estimate_m<W>(m1, grad, s, r));
      W::store_bytes(lanes, byte_m, i, off_m);
      auto reach = W::reach(off_m);
      const auto off_v = W::distance(v0, estimate_v<W>(v1, grad, s, r));
      W::store_bytes(lanes, byte_v, i, off_v);
      reach = W::either(reach, W::reach(off_v));
      p1 = advanced<W>(p0, update, s);
      const auto off_p = W::distance(p0, estimate_p<W>(p1, update, r));
      W::store_bytes(lanes, byte_p, i, off_p);
      reach = W::either(reach, W::reach(off_p));
      if (__builtin_expect(W::any_beyond_byte(lanes, reach), 0)) {
        Spilled<W> x;  // of the old values, which are still where they were
        typename W::F old_v = W::template load<kF32>(lanes, block.v, i);
        W::template store<kF32>(W::whole(), x.p, 0, block.template load_p<W>(lanes, i, old_v));
        W::template store<kF32>(W::whole(), x.m, 0, W::template load<kF32>(lanes, m + from, i));
        W::template store<kF32>(W::whole(), x.v, 0, old_v);
        W::spill(x.reach, reach);
        const std::size_t here = width - i < W::width() ? width - i : W::width();
        std::size_t now = count;
        if (!append_escapes(x.p, x.m, x.v, x.reach, here, from + i, record.escapes, now)) return false;
        count = now;
      }
      W::template store<kF32>(lanes, m + from, i, m1);
      block.template store<W>(lanes, i, p1, v1);
      return true;
    });
    staged_p.flush(record.low_p + from, done);
    staged_m.flush(record.low_m + from, done);
    staged_v.flush(record.low_v + from, done);
    stepped = from + done;
    return done;
  };
  for_each_block<G, true>(master, g, n, record_block);
  Staged<1>::fence();
  escaped = count;
  return stepped;
}

template <class V, int G, bool L2, bool Redo, class Master>
void undo_loop(const Master& master, float* m, const void* g, std::size_t n, const AdamScalars& old_step,
               const AdamScalars& new_step, const UndoTile& tile, std::size_t escaped) {
  const AdamScalars s = old_step, again = new_step;
  const Inverse r = inverse_of(s);
  const Escape* const list = tile.escapes;
  const auto index = [&](std::size_t entry) { return entry < escaped ? std::size_t(list[entry].index) : kUndoTile; };
  std::size_t next = 0, next_index = index(0);
  const auto undo_block = [&](std::size_t from, std::size_t width, const Master& block, const void* grads) SO_INLINE {
    const auto* byte_p = reinterpret_cast<const std::int8_t*>(tile.low_p) + from;
    const auto* byte_m = reinterpret_cast<const std::int8_t*>(tile.low_m) + from;
    const auto* byte_v = reinterpret_cast<const std::int8_t*>(tile.low_v) + from;
    return for_each_vector<V>(width, [&](auto isa, auto lanes, std::size_t i) SO_INLINE {
      using W = decltype(isa);
      typename W::F v0 = W::template load<kF32>(lanes, block.v, i);
      typename W::F p0 = block.template load_p<W>(lanes, i, v0);
      typename W::F m0 = W::template load<kF32>(lanes, m + from, i);
      const auto raw = W::template load<G>(lanes, grads, i);
      p0 = W::moved(estimate_p<W>(p0, update_of<W>(m0, v0, s), r), W::load_bytes(lanes, byte_p, i));
      const auto grad = scaled<W, L2>(raw, p0, s);  // from the p that the step had
      m0 = W::moved(estimate_m<W>(m0, grad, s, r), W::load_bytes(lanes, byte_m, i));
      v0 = W::moved(estimate_v<W>(v0, grad, s, r), W::load_bytes(lanes, byte_v, i));
      if (__builtin_expect(next_index < from + i + W::width(), 0)) {
        Spilled<W> x;
        W::template store<kF32>(W::whole(), x.p, 0, p0);
        W::template store<kF32>(W::whole(), x.m, 0, m0);
        W::template store<kF32>(W::whole(), x.v, 0, v0);
        next = restore_escapes(x.p, x.m, x.v, W::width(), from + i, list, next, escaped);
        next_index = index(next);
        p0 = W::template load<kF32>(W::whole(), x.p, 0);
        m0 = W::template load<kF32>(W::whole(), x.m, 0);
        v0 = W::template load<kF32>(W::whole(), x.v, 0);
      }
      if constexpr (Redo) {
        advance_moments<W>(scaled<W, L2>(raw, p0, again), m0, v0, again);
        p0 = advanced<W>(p0, update_of<W>(m0, v0, again), again);
      }
      W::template store<kF32>(lanes, m + from, i, m0);
      block.template store<W>(lanes, i, p0, v0);
      return true;
    });
  };
  for_each_block<G, false>(master, g, n, undo_block);
}

template <class V, int G, class Master>
std::size_t record_on(const Master& master, float* m, const void* g, std::size_t n, const AdamScalars& s,
                      const UndoTile& tile, std::size_t& escaped) {
  if (s.l2 != 0.0f) return record_loop<V, G, true>(master, m, g, n, s, tile, escaped);
  return record_loop<V, G, false>(master, m, g, n, s, tile, escaped);
}
template <class V, int G, bool Redo, class Master>
void undo_on(const Master& master, float* m, const void* g, std::size_t n, const AdamScalars& old_step,
             const AdamScalars& new_step, const UndoTile& tile, std::size_t escaped) {
  if (old_step.l2 != 0.0f) {
    undo_loop<V, G, true, Redo>(master, m, g, n, old_step, new_step, tile, escaped);
  } else {
    undo_loop<V, G, false, Redo>(master, m, g, n, old_step, new_step, tile, escaped);
  }
}

template <class V, int G, int O>
std::size_t record(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& s,
                   const UndoTile& tile, std::size_t& escaped) {
  return record_on<V, G>(PlainMaster<O>{p, v, out}, m, g, n, s, tile, escaped);
}
template <class V, int G, int O>
void undo(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& old_step,
          const AdamScalars& new_step, const UndoTile& tile, std::size_t escaped) {
  undo_on<V, G, false>(PlainMaster<O>{p, v, out}, m, g, n, old_step, new_step, tile, escaped);
}
template <class V, int G, int O>
void undo_redo(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& old_step,
               const AdamScalars& new_step, const UndoTile& tile, std::size_t escaped) {
  undo_on<V, G, true>(PlainMaster<O>{p, v, out}, m, g, n, old_step, new_step, tile, escaped);
}
template <class V, int G>
std::size_t record_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g,
                         std::size_t n, const AdamScalars& s, const UndoTile& tile, std::size_t& escaped) {
  return record_on<V, G>(SplitMaster{weight, remainder, v}, m, g, n, s, tile, escaped);
}
template <class V, int G>
void undo_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g, std::size_t n,
                const AdamScalars& old_step, const AdamScalars& new_step, const UndoTile& tile, std::size_t escaped) {
  undo_on<V, G, false>(SplitMaster{weight, remainder, v}, m, g, n, old_step, new_step, tile, escaped);
}
template <class V, int G>
void undo_redo_split(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g, std::size_t n,
                     const AdamScalars& old_step, const AdamScalars& new_step, const UndoTile& tile,
                     std::size_t escaped) {
  undo_on<V, G, true>(SplitMaster{weight, remainder, v}, m, g, n, old_step, new_step, tile, escaped);
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
