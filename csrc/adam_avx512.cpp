// AVX-512 (F, BW, VL, DQ): sixteen lanes of exactly what adam_scalar.cpp does; a mask cuts the last vector short.
// AVX512-BF16 is left alone: VCVTNEPS2BF16 flushes denormals whatever MXCSR says and keeps NaN payloads, so its bits
// are not the definition's. The integer rounding costs six instructions in a loop that waits for memory.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header initialises its undefined vectors with themselves and then warns about it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#ifdef SO_AVX512_SIMDE
#include "avx512_simde.h"  // tests/kernels: the same intrinsics on AVX2, for machines that cannot run them
#else
#include <immintrin.h>
#endif

#include "scalar_ops.h"
#include "split_ops.h"
#include "table.h"
#include "undo_ops.h"

namespace so {
namespace {

constexpr std::size_t kWidth = 16;

inline __mmask16 first_lanes(std::size_t count) { return __mmask16((1u << count) - 1u); }

// With Tail only the lanes of `k` are touched, a masked lane being neither read nor written; without it `k` is unused.
template <bool Tail>
inline __m512 load_f32(const float* x, __mmask16 k) {
  if constexpr (Tail) return _mm512_maskz_loadu_ps(k, x);
  return _mm512_loadu_ps(x);
}

template <bool Tail>
inline void store_f32(float* x, __mmask16 k, __m512 value) {
  if constexpr (Tail) {
    _mm512_mask_storeu_ps(x, k, value);
  } else {
    _mm512_storeu_ps(x, value);
  }
}

template <int D, bool Tail>
inline __m512 load16(const void* base, std::size_t i, __mmask16 k) {
  if constexpr (D == kF32) {
    return load_f32<Tail>(static_cast<const float*>(base) + i, k);
  } else {
    const std::uint16_t* x = static_cast<const std::uint16_t*>(base) + i;
    __m256i h;
    if constexpr (Tail) {
      h = _mm256_maskz_loadu_epi16(k, x);
    } else {
      h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    }
    if constexpr (D == kBF16) return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    return _mm512_cvtph_ps(h);
  }
}

inline __m256i to_bf16(__m512 x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, r, _mm512_set1_epi32(0x7FC0)));
}

template <int D, bool Tail>
inline void store16(void* base, std::size_t i, __mmask16 k, __m512 x) {
  if constexpr (D == kF32) {
    store_f32<Tail>(static_cast<float*>(base) + i, k, x);
  } else {
    std::uint16_t* y = static_cast<std::uint16_t*>(base) + i;
    __m256i h;
    if constexpr (D == kBF16) {
      h = to_bf16(x);
    } else {
      h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    if constexpr (Tail) {
      _mm256_mask_storeu_epi16(y, k, h);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), h);
    }
  }
}

template <int G, int O, bool Tail>
inline void adam_sixteen(float* p, float* m, float* v, const void* g, void* out, std::size_t i, __mmask16 k,
                         const AdamScalars& s) {
  const __m512 raw = load16<G, Tail>(g, i, k);
  const __m512 grad = _mm512_mul_ps(raw, _mm512_set1_ps(s.grad_scale));
  const __m512 m0 = load_f32<Tail>(m + i, k);
  const __m512 m1 = _mm512_fmadd_ps(_mm512_set1_ps(s.one_minus_b1), _mm512_sub_ps(grad, m0), m0);
  const __m512 v1 = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(s.one_minus_b2), grad), grad,
                                    _mm512_mul_ps(load_f32<Tail>(v + i, k), _mm512_set1_ps(s.beta2)));
  const __m512 denominator =
      _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v1), _mm512_set1_ps(s.bc2_sqrt)), _mm512_set1_ps(s.eps));
  const __m512 p1 = _mm512_add_ps(_mm512_mul_ps(load_f32<Tail>(p + i, k), _mm512_set1_ps(s.decay)),
                                  _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(s.neg_step_size), m1), denominator));
  store_f32<Tail>(m + i, k, m1);
  store_f32<Tail>(v + i, k, v1);
  store_f32<Tail>(p + i, k, p1);
  if constexpr (O != kF32) store16<O, Tail>(out, i, k, p1);
}

template <int G, int O>
void adam(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& scalars) {
  const AdamScalars s = scalars;  // a copy that no store can change: it stays in registers
  std::size_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {  // two vectors in flight hide the latency of sqrt and divide
    adam_sixteen<G, O, false>(p, m, v, g, out, i, 0, s);
    adam_sixteen<G, O, false>(p, m, v, g, out, i + kWidth, 0, s);
  }
  if (i + kWidth <= n) {
    adam_sixteen<G, O, false>(p, m, v, g, out, i, 0, s);
    i += kWidth;
  }
  if (i < n) adam_sixteen<G, O, true>(p, m, v, g, out, i, first_lanes(n - i), s);
}

template <int S, int D>
void cast(const void* src, void* dst, std::size_t n) {
  if constexpr (S == D) {
    std::memcpy(dst, src, n * dtype_bytes(S));
  } else {
    std::size_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store16<D, false>(dst, i, 0, load16<S, false>(src, i, 0));
    if (i < n) {
      const __mmask16 k = first_lanes(n - i);
      store16<D, true>(dst, i, k, load16<S, true>(src, i, k));
    }
  }
}

// Adds the squares of sixteen elements to sixteen lanes. A square is exact in double, so the fused form rounds as the
// separate one does.
inline void add_squares(__m512 x, __m512d& low, __m512d& high) {
  const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
  low = _mm512_fmadd_pd(a, a, low);
  high = _mm512_fmadd_pd(b, b, high);
}

template <int D>
double sum_sq(const void* x, std::size_t n) {
  static_assert(kNormLanes == 4 * kWidth, "all lanes are in registers at once");
  __m512d a0 = _mm512_setzero_pd(), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
  std::size_t i = 0;
  for (; i + kNormLanes <= n; i += kNormLanes) {
    add_squares(load16<D, false>(x, i, 0), a0, a1);
    add_squares(load16<D, false>(x, i + 16, 0), a2, a3);
    add_squares(load16<D, false>(x, i + 32, 0), a4, a5);
    add_squares(load16<D, false>(x, i + 48, 0), a6, a7);
  }
  // A masked lane loads zero, and a square of zero leaves a sum's bits as they are.
  const auto left = [&](std::size_t from) { return n < from ? 0 : n - from < kWidth ? n - from : kWidth; };
  if (i < n) {
    add_squares(load16<D, true>(x, i, first_lanes(left(i))), a0, a1);
    add_squares(load16<D, true>(x, i + 16, first_lanes(left(i + 16))), a2, a3);
    add_squares(load16<D, true>(x, i + 32, first_lanes(left(i + 32))), a4, a5);
    add_squares(load16<D, true>(x, i + 48, first_lanes(left(i + 48))), a6, a7);
  }
  // Lane l plus lane l + 32, and so on down to eight lanes.
  a0 = _mm512_add_pd(_mm512_add_pd(a0, a4), _mm512_add_pd(a2, a6));
  a1 = _mm512_add_pd(_mm512_add_pd(a1, a5), _mm512_add_pd(a3, a7));
  alignas(64) double lanes[8];
  _mm512_storeu_pd(lanes, _mm512_add_pd(a0, a1));
  return halve_lanes(lanes, 8);
}

constexpr KernelTable kTable = SO_KERNEL_TABLE("avx512");

}  // namespace

const KernelTable* avx512_table() { return &kTable; }

}  // namespace so
