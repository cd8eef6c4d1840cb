// The AVX-512 intrinsics of csrc/adam_avx512.cpp on AVX2, through SIMDe (Debian: libsimde-dev); what its releases lack
// is written here lane by lane. For tests only: it shows the bits, not the speed.
#pragma once

// Vector types lose an attribute when they are template arguments, to nobody's harm.
#pragma GCC diagnostic ignored "-Wignored-attributes"

#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

#include <cstdint>

namespace so_simde {

// A masked lane must not be read or written, which "load all, then select" would do.
template <class Vector, class Element>
inline Vector load_lanes(unsigned mask, const Element* from) {
  Element lanes[sizeof(Vector) / sizeof(Element)] = {};
  for (unsigned l = 0; l < sizeof(Vector) / sizeof(Element); ++l)
    if (mask >> l & 1) lanes[l] = from[l];
  Vector x;
  __builtin_memcpy(&x, lanes, sizeof(x));
  return x;
}

template <class Element, class Vector>
inline void store_lanes(Element* to, unsigned mask, Vector x) {
  Element lanes[sizeof(Vector) / sizeof(Element)];
  __builtin_memcpy(lanes, &x, sizeof(x));
  for (unsigned l = 0; l < sizeof(Vector) / sizeof(Element); ++l)
    if (mask >> l & 1) to[l] = lanes[l];
}

// A 512-bit vector and what it converts to or from, as two halves.
template <class Whole, class Half>
struct Halves {
  Half part[2];
  explicit Halves(Whole x) { __builtin_memcpy(part, &x, sizeof(part)); }
  Halves(Half low, Half high) : part{low, high} {}
  Whole whole() const {
    static_assert(sizeof(Whole) == sizeof(part), "two halves make a whole");
    Whole x;
    __builtin_memcpy(&x, part, sizeof(x));
    return x;
  }
};

inline __m512 cvtph_ps(__m256i h) {
  const Halves<__m256i, __m128i> x(h);
  return Halves<__m512, __m256>(simde_mm256_cvtph_ps(x.part[0]), simde_mm256_cvtph_ps(x.part[1])).whole();
}

template <int Rounding>
inline __m256i cvtps_ph(__m512 a) {
  const Halves<__m512, __m256> x(a);
  return Halves<__m256i, __m128i>(simde_mm256_cvtps_ph(x.part[0], Rounding), simde_mm256_cvtps_ph(x.part[1], Rounding))
      .whole();
}

inline __m512i cvtepu16_epi32(__m256i h) {
  const Halves<__m256i, __m128i> x(h);
  return Halves<__m512i, __m256i>(simde_mm256_cvtepu16_epi32(x.part[0]), simde_mm256_cvtepu16_epi32(x.part[1])).whole();
}

inline __m256i cvtepi32_epi16(__m512i a) {  // the low half of every lane
  std::uint32_t lanes[16];
  std::uint16_t low[16];
  __builtin_memcpy(lanes, &a, sizeof(lanes));
  for (int l = 0; l < 16; ++l) low[l] = std::uint16_t(lanes[l]);
  __m256i x;
  __builtin_memcpy(&x, low, sizeof(x));
  return x;
}

inline __m512i cvtepi8_epi32(__m128i b) {
  const __m128i upper = simde_mm_srli_si128(b, 8);
  return Halves<__m512i, __m256i>(simde_mm256_cvtepi8_epi32(b), simde_mm256_cvtepi8_epi32(upper)).whole();
}

inline __m128i cvtepi32_epi8(__m512i a) {  // the low byte of every lane
  std::uint32_t lanes[16];
  std::uint8_t low[16];
  __builtin_memcpy(lanes, &a, sizeof(lanes));
  for (int l = 0; l < 16; ++l) low[l] = std::uint8_t(lanes[l]);
  __m128i x;
  __builtin_memcpy(&x, low, sizeof(x));
  return x;
}

inline __m512d cvtps_pd(__m256 a) {
  const Halves<__m256, __m128> x(a);
  return Halves<__m512d, __m256d>(simde_mm256_cvtps_pd(x.part[0]), simde_mm256_cvtps_pd(x.part[1])).whole();
}

inline __m256 extractf32x8_ps(__m512 a, int which) { return Halves<__m512, __m256>(a).part[which]; }

}  // namespace so_simde

#undef _mm512_cvtps_ph  // a macro of GCC's where it does not optimize
#undef _mm512_extractf32x8_ps
#define _mm512_maskz_loadu_ps(k, from) so_simde::load_lanes<__m512>(k, from)
#define _mm512_mask_storeu_ps(to, k, x) so_simde::store_lanes(to, k, x)
#define _mm256_maskz_loadu_epi16(k, from) so_simde::load_lanes<__m256i>(k, from)
#define _mm256_mask_storeu_epi16(to, k, x) so_simde::store_lanes(to, k, x)
#define _mm512_cvtph_ps(x) so_simde::cvtph_ps(x)
#define _mm512_cvtps_ph(x, rounding) so_simde::cvtps_ph<(rounding)>(x)
#define _mm512_cvtepu16_epi32(x) so_simde::cvtepu16_epi32(x)
#define _mm512_cvtepi32_epi16(x) so_simde::cvtepi32_epi16(x)
#define _mm512_cvtps_pd(x) so_simde::cvtps_pd(x)
#define _mm512_extractf32x8_ps(x, which) so_simde::extractf32x8_ps(x, which)
#define _mm512_cvtepi8_epi32(x) so_simde::cvtepi8_epi32(x)
#define _mm512_cvtepi32_epi8(x) so_simde::cvtepi32_epi8(x)
#define _mm_maskz_loadu_epi8(k, from) so_simde::load_lanes<__m128i>(k, from)
#define _mm_mask_storeu_epi8(to, k, x) so_simde::store_lanes(to, k, x)
