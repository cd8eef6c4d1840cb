// AVX2, FMA and F16C: eight lanes of exactly what adam_scalar.cpp does. -ffp-contract=off matters here: GCC would fuse
// even intrinsics, and a product must be fused only where it is written so.
#include <immintrin.h>

#include "scalar_ops.h"
#include "split_ops.h"
#include "table.h"
#include "undo_ops.h"

namespace so {
namespace {

constexpr std::size_t kWidth = 8;

template <int D>
inline __m256 load8(const void* base, std::size_t i) {
  if constexpr (D == kF32) return _mm256_loadu_ps(static_cast<const float*>(base) + i);
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint16_t*>(base) + i));
  if constexpr (D == kBF16) return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  return _mm256_cvtph_ps(h);
}

inline __m128i to_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7FC0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0xD8);
  return _mm256_castsi256_si128(packed);
}

template <int D>
inline void store8(void* base, std::size_t i, __m256 x) {
  if constexpr (D == kF32) {
    _mm256_storeu_ps(static_cast<float*>(base) + i, x);
  } else {
    __m128i h;
    if constexpr (D == kBF16) {
      h = to_bf16(x);
    } else {
      h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<std::uint16_t*>(base) + i), h);
  }
}

template <int G, int O>
inline void adam_eight(float* p, float* m, float* v, const void* g, void* out, std::size_t i, const AdamScalars& s) {
  const __m256 grad = _mm256_mul_ps(load8<G>(g, i), _mm256_set1_ps(s.grad_scale));
  const __m256 m0 = _mm256_loadu_ps(m + i);
  const __m256 m1 = _mm256_fmadd_ps(_mm256_set1_ps(s.one_minus_b1), _mm256_sub_ps(grad, m0), m0);
  const __m256 v1 = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(s.one_minus_b2), grad), grad,
                                    _mm256_mul_ps(_mm256_loadu_ps(v + i), _mm256_set1_ps(s.beta2)));
  const __m256 denominator =
      _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v1), _mm256_set1_ps(s.bc2_sqrt)), _mm256_set1_ps(s.eps));
  const __m256 p1 = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(p + i), _mm256_set1_ps(s.decay)),
                                  _mm256_div_ps(_mm256_mul_ps(_mm256_set1_ps(s.neg_step_size), m1), denominator));
  _mm256_storeu_ps(m + i, m1);
  _mm256_storeu_ps(v + i, v1);
  _mm256_storeu_ps(p + i, p1);
  if constexpr (O != kF32) store8<O>(out, i, p1);
}

template <int G, int O>
void adam(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& scalars) {
  const AdamScalars s = scalars;  // a copy: the arrays might alias the caller's, and then every vector would reload it
  std::size_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {  // two vectors in flight hide the latency of sqrt and divide
    adam_eight<G, O>(p, m, v, g, out, i, s);
    adam_eight<G, O>(p, m, v, g, out, i + kWidth, s);
  }
  for (; i + kWidth <= n; i += kWidth) adam_eight<G, O>(p, m, v, g, out, i, s);
  for (; i < n; ++i) adam_one<G, O>(p, m, v, g, out, i, s);
}

template <int S, int D>
void cast(const void* src, void* dst, std::size_t n) {
  if constexpr (S == D) {
    std::memcpy(dst, src, n * dtype_bytes(S));
  } else {
    std::size_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store8<D>(dst, i, load8<S>(src, i));
    for (; i < n; ++i) store<D>(dst, i, load<S>(src, i));
  }
}

template <int D>
double sum_sq(const void* x, std::size_t n) {
  // Sixteen lanes at a time stay in registers; a chunk fits in the first-level cache, so four walks cost little.
  constexpr std::size_t kGroup = 16;
  alignas(32) double lanes[kNormLanes] = {};
  const std::size_t rows = n / kNormLanes;
  for (std::size_t base = 0; base < kNormLanes; base += kGroup) {
    __m256d a0 = _mm256_setzero_pd(), a1 = a0, a2 = a0, a3 = a0;
    for (std::size_t r = 0; r < rows; ++r) {
      const std::size_t i = r * kNormLanes + base;
      const __m256 lo = load8<D>(x, i), hi = load8<D>(x, i + 8);
      const __m256d d0 = _mm256_cvtps_pd(_mm256_castps256_ps128(lo));
      const __m256d d1 = _mm256_cvtps_pd(_mm256_extractf128_ps(lo, 1));
      const __m256d d2 = _mm256_cvtps_pd(_mm256_castps256_ps128(hi));
      const __m256d d3 = _mm256_cvtps_pd(_mm256_extractf128_ps(hi, 1));
      a0 = _mm256_add_pd(a0, _mm256_mul_pd(d0, d0));
      a1 = _mm256_add_pd(a1, _mm256_mul_pd(d1, d1));
      a2 = _mm256_add_pd(a2, _mm256_mul_pd(d2, d2));
      a3 = _mm256_add_pd(a3, _mm256_mul_pd(d3, d3));
    }
    _mm256_store_pd(lanes + base, a0);
    _mm256_store_pd(lanes + base + 4, a1);
    _mm256_store_pd(lanes + base + 8, a2);
    _mm256_store_pd(lanes + base + 12, a3);
  }
  for (std::size_t i = rows * kNormLanes; i < n; ++i) {
    const double d = load<D>(x, i);
    lanes[i % kNormLanes] += d * d;
  }
  return halve_lanes(lanes, kNormLanes);
}

constexpr KernelTable kTable = SO_KERNEL_TABLE("avx2");

}  // namespace

const KernelTable* avx2_table() { return &kTable; }

}  // namespace so
