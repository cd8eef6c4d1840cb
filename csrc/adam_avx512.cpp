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

#include "table.h"

namespace so {
namespace {

struct Vector {
  using F = __m512;
  using I = __m512i;
  using Lanes = __mmask16;
  static constexpr std::size_t kMaxLanes = 16;
  static constexpr int kUnroll = 2;
  static constexpr bool kMasks = true;

  static std::size_t width() { return kMaxLanes; }
  static Whole whole() { return {}; }
  static Lanes first_lanes(std::size_t count) { return count < kMaxLanes ? Lanes((1u << count) - 1u) : Lanes(0xFFFF); }

  static __m256i load_16bit(Whole, const std::uint16_t* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  }
  static __m256i load_16bit(Lanes k, const std::uint16_t* x) { return _mm256_maskz_loadu_epi16(k, x); }
  static void store_16bit(Whole, std::uint16_t* x, __m256i h) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), h); }
  static void store_16bit(Lanes k, std::uint16_t* x, __m256i h) { _mm256_mask_storeu_epi16(x, k, h); }
  static F load_f32(Whole, const float* x) { return _mm512_loadu_ps(x); }
  static F load_f32(Lanes k, const float* x) { return _mm512_maskz_loadu_ps(k, x); }
  static void store_f32(Whole, float* x, F value) { _mm512_storeu_ps(x, value); }
  static void store_f32(Lanes k, float* x, F value) { _mm512_mask_storeu_ps(x, k, value); }

  template <int D, class L>
  static F load(L lanes, const void* base, std::size_t i) {
    if constexpr (D == kF32) {
      return load_f32(lanes, static_cast<const float*>(base) + i);
    } else {
      const __m256i h = load_16bit(lanes, static_cast<const std::uint16_t*>(base) + i);
      if constexpr (D == kBF16) return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
      return _mm512_cvtph_ps(h);
    }
  }

  static __m256i to_bf16(F x) {
    const I u = _mm512_castps_si512(x);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const I r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, r, _mm512_set1_epi32(0x7FC0)));
  }
  template <int D, class L>
  static void store(L lanes, void* base, std::size_t i, F x) {
    if constexpr (D == kF32) {
      store_f32(lanes, static_cast<float*>(base) + i, x);
    } else if constexpr (D == kBF16) {
      store_16bit(lanes, static_cast<std::uint16_t*>(base) + i, to_bf16(x));
    } else {
      store_16bit(lanes, static_cast<std::uint16_t*>(base) + i,
                  _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }

  static F set(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  static I distance(F a, F b) { return _mm512_sub_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)); }
  static F moved(F a, I distance) { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), distance)); }
  static I reach(I distance) { return _mm512_add_epi32(distance, _mm512_set1_epi32(128)); }
  static I either(I a, I b) { return _mm512_or_si512(a, b); }
  template <class L>
  static bool any_beyond_byte(L, I reach) {
    return _mm512_test_epi32_mask(reach, _mm512_set1_epi32(~0xFF)) != 0;
  }
  static I load_bytes(Whole, const std::int8_t* base, std::size_t i) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(base + i)));
  }
  static I load_bytes(Lanes k, const std::int8_t* base, std::size_t i) {
    return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(k, base + i));
  }
  static void store_bytes(Whole, std::int8_t* base, std::size_t i, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(base + i), _mm512_cvtepi32_epi8(x));
  }
  static void store_bytes(Lanes k, std::int8_t* base, std::size_t i, I x) {
    _mm_mask_storeu_epi8(base + i, k, _mm512_cvtepi32_epi8(x));
  }
  static void spill(std::uint32_t* to, I x) { _mm512_storeu_si512(to, x); }

  template <class L>
  static F join(L lanes, const std::uint16_t* weight, const std::uint16_t* remainder, std::size_t i, F& v) {
    const I w = _mm512_cvtepu16_epi32(load_16bit(lanes, weight + i)), u = _mm512_castps_si512(v);
    const I lower = _mm512_cvtepu16_epi32(load_16bit(lanes, remainder + i));
    const I odd = _mm512_and_si512(_mm512_xor_si512(w, _mm512_srli_epi32(u, 31)), _mm512_set1_epi32(1));
    v = _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(0x7FFFFFFF)));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(_mm512_sub_epi32(w, odd), 16), lower));
  }
  template <class L>
  static void store_remainder(L lanes, std::uint16_t* remainder, std::size_t i, F p) {
    store_16bit(lanes, remainder + i, _mm512_cvtepi32_epi16(_mm512_castps_si512(p)));
  }
  static F flagged(F v, F p) {
    const I sign = _mm512_set1_epi32(int(0x80000000u)), parity = _mm512_slli_epi32(_mm512_castps_si512(p), 15);
    return _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_andnot_si512(sign, _mm512_castps_si512(v)), _mm512_and_si512(sign, parity)));
  }

  template <int D>
  static double sum_sq(const void* x, std::size_t n);
};

// Adds the squares of sixteen elements to sixteen lanes. A square is exact in double, so the fused form rounds as the
// separate one does.
inline void add_squares(__m512 x, __m512d& low, __m512d& high) {
  const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
  low = _mm512_fmadd_pd(a, a, low);
  high = _mm512_fmadd_pd(b, b, high);
}

template <int D>
double Vector::sum_sq(const void* x, std::size_t n) {
  static_assert(kNormLanes == 4 * kMaxLanes, "all lanes are in registers at once");
  __m512d a0 = _mm512_setzero_pd(), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
  std::size_t i = 0;
  for (; i + kNormLanes <= n; i += kNormLanes) {
    add_squares(load<D>(Whole{}, x, i), a0, a1);
    add_squares(load<D>(Whole{}, x, i + 16), a2, a3);
    add_squares(load<D>(Whole{}, x, i + 32), a4, a5);
    add_squares(load<D>(Whole{}, x, i + 48), a6, a7);
  }
  // A masked lane loads zero, and a square of zero leaves a sum's bits as they are.
  const auto left = [&](std::size_t from) { return n < from ? 0 : n - from < kMaxLanes ? n - from : kMaxLanes; };
  if (i < n) {
    add_squares(load<D>(first_lanes(left(i)), x, i), a0, a1);
    add_squares(load<D>(first_lanes(left(i + 16)), x, i + 16), a2, a3);
    add_squares(load<D>(first_lanes(left(i + 32)), x, i + 32), a4, a5);
    add_squares(load<D>(first_lanes(left(i + 48)), x, i + 48), a6, a7);
  }
  // Lane l plus lane l + 32, and so on down to eight lanes.
  a0 = _mm512_add_pd(_mm512_add_pd(a0, a4), _mm512_add_pd(a2, a6));
  a1 = _mm512_add_pd(_mm512_add_pd(a1, a5), _mm512_add_pd(a3, a7));
  alignas(64) double lanes[8];
  _mm512_storeu_pd(lanes, _mm512_add_pd(a0, a1));
  return halve_lanes(lanes, 8);
}

constexpr KernelTable kTable = table_of<Vector>("avx512");

}  // namespace

const KernelTable* avx512_table() { return &kTable; }

}  // namespace so
