// AVX2, FMA and F16C: exactly what the one lane of vector.h does. A vector is two registers of eight lanes: packing
// 16-bit values and bytes takes two anyway, and two in flight hide the latency of square root and division.
// -ffp-contract=off matters here: GCC would fuse even intrinsics, and a product must be fused only where it is written.
#include <immintrin.h>

#include "table.h"

namespace so {
namespace {

struct Vector {
  struct F {
    __m256 low, high;
  };
  struct I {
    __m256i low, high;
  };
  static constexpr std::size_t kMaxLanes = 16;
  static constexpr int kUnroll = 1;
  static constexpr bool kMasks = false;

  static std::size_t width() { return kMaxLanes; }
  static Whole whole() { return {}; }

  static I bits(F a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
  static F floats(I a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
  static I load_16bit(const std::uint16_t* x) {
    const __m128i* h = reinterpret_cast<const __m128i*>(x);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(h)), _mm256_cvtepu16_epi32(_mm_loadu_si128(h + 1))};
  }
  // The lanes hold 0 to 65,535.
  static void store_16bit(std::uint16_t* x, I a) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.low, a.high), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), packed);
  }

  template <int D>
  static F load(Whole, const void* base, std::size_t i) {
    if constexpr (D == kF32) {
      const float* x = static_cast<const float*>(base) + i;
      return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
    } else if constexpr (D == kBF16) {
      const I h = load_16bit(static_cast<const std::uint16_t*>(base) + i);
      return floats({_mm256_slli_epi32(h.low, 16), _mm256_slli_epi32(h.high, 16)});
    } else {
      const __m128i* h = reinterpret_cast<const __m128i*>(static_cast<const std::uint16_t*>(base) + i);
      return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
    }
  }

  static __m256i to_bf16(__m256 x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7FC0), nan);
  }
  template <int D>
  static void store(Whole, void* base, std::size_t i, F x) {
    if constexpr (D == kF32) {
      float* y = static_cast<float*>(base) + i;
      _mm256_storeu_ps(y, x.low);
      _mm256_storeu_ps(y + 8, x.high);
    } else if constexpr (D == kBF16) {
      store_16bit(static_cast<std::uint16_t*>(base) + i, {to_bf16(x.low), to_bf16(x.high)});
    } else {
      constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
      __m128i* y = reinterpret_cast<__m128i*>(static_cast<std::uint16_t*>(base) + i);
      _mm_storeu_si128(y, _mm256_cvtps_ph(x.low, kNearest));
      _mm_storeu_si128(y + 1, _mm256_cvtps_ph(x.high, kNearest));
    }
  }

  static F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static F sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  static F mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static F div(F a, F b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
  static F sqrt(F a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
  static F fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }

  static I distance(F a, F b) {
    const I x = bits(a), y = bits(b);
    return {_mm256_sub_epi32(x.low, y.low), _mm256_sub_epi32(x.high, y.high)};
  }
  static F moved(F a, I distance) {
    const I x = bits(a);
    return floats({_mm256_add_epi32(x.low, distance.low), _mm256_add_epi32(x.high, distance.high)});
  }
  static I reach(I distance) {
    const __m256i half = _mm256_set1_epi32(128);
    return {_mm256_add_epi32(distance.low, half), _mm256_add_epi32(distance.high, half)};
  }
  static I either(I a, I b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
  static bool any_beyond_byte(Whole, I reach) {
    return !_mm256_testz_si256(_mm256_or_si256(reach.low, reach.high), _mm256_set1_epi32(~0xFF));
  }
  static I load_bytes(Whole, const std::int8_t* base, std::size_t i) {
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + i));
    return {_mm256_cvtepi8_epi32(b), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(b, b))};
  }
  static void store_bytes(Whole, std::int8_t* base, std::size_t i, I x) {
    const __m256i low_byte = _mm256_set1_epi32(0xFF);  // packing saturates, here nothing
    const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(x.low, low_byte), _mm256_and_si256(x.high, low_byte));
    const __m256i h = _mm256_permute4x64_epi64(packed, 0xD8);
    const __m128i b = _mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(base + i), b);
  }
  static void spill(std::uint32_t* to, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), x.high);
  }

  static __m256i joined(__m256i w, __m256i remainder, __m256i v) {
    const __m256i odd = _mm256_and_si256(_mm256_xor_si256(w, _mm256_srli_epi32(v, 31)), _mm256_set1_epi32(1));
    return _mm256_or_si256(_mm256_slli_epi32(_mm256_sub_epi32(w, odd), 16), remainder);
  }
  static F join(Whole, const std::uint16_t* weight, const std::uint16_t* remainder, std::size_t i, F& v) {
    const I w = load_16bit(weight + i), lower = load_16bit(remainder + i), u = bits(v);
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    v = floats({_mm256_and_si256(u.low, magnitude), _mm256_and_si256(u.high, magnitude)});
    return floats({joined(w.low, lower.low, u.low), joined(w.high, lower.high, u.high)});
  }
  static void store_remainder(Whole, std::uint16_t* remainder, std::size_t i, F p) {
    const I u = bits(p);
    const __m256i lower = _mm256_set1_epi32(0xFFFF);
    store_16bit(remainder + i, {_mm256_and_si256(u.low, lower), _mm256_and_si256(u.high, lower)});
  }
  static __m256i with_parity(__m256i v, __m256i p) {
    const __m256i sign = _mm256_set1_epi32(int(0x80000000u));
    return _mm256_or_si256(_mm256_andnot_si256(sign, v), _mm256_and_si256(sign, _mm256_slli_epi32(p, 15)));
  }
  static F flagged(F v, F p) {
    const I x = bits(v), y = bits(p);
    return floats({with_parity(x.low, y.low), with_parity(x.high, y.high)});
  }

  template <int D>
  static double sum_sq(const void* x, std::size_t n);
};

template <int D>
double Vector::sum_sq(const void* x, std::size_t n) {
  // Sixteen lanes at a time stay in registers; a chunk fits in the first-level cache, so four walks cost little.
  constexpr std::size_t kGroup = 16;
  alignas(32) double lanes[kNormLanes] = {};
  const std::size_t rows = n / kNormLanes;
  for (std::size_t base = 0; base < kNormLanes; base += kGroup) {
    __m256d a0 = _mm256_setzero_pd(), a1 = a0, a2 = a0, a3 = a0;
    for (std::size_t r = 0; r < rows; ++r) {
      const std::size_t i = r * kNormLanes + base;
      const auto [lo, hi] = load<D>(whole(), x, i);
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
    const double d = so::load<D>(x, i);
    lanes[i % kNormLanes] += d * d;
  }
  return halve_lanes(lanes, kNormLanes);
}

constexpr KernelTable kTable = table_of<Vector>("avx2");

}  // namespace

const KernelTable* avx2_table() { return &kTable; }

}  // namespace so
