// Conversions and memory, one element at a time: the definition of what every instruction set does with a dtype.
// Everything in these headers is in an unnamed namespace on purpose: an inline function with external linkage, compiled
// here with AVX2 flags, could be the copy that the linker keeps for the baseline file too.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.h"

namespace so {
namespace {

inline std::uint32_t bits_of(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float float_of(std::uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float bf16_to_f32(std::uint16_t h) { return float_of(std::uint32_t(h) << 16); }

// Round to nearest even; every NaN becomes 0x7FC0, as in torch.
inline std::uint16_t f32_to_bf16(float x) {
  const std::uint32_t u = bits_of(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return std::uint16_t((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

inline float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1Fu, mantissa = h & 0x3FFu;
  if (exponent == 0x1F) {  // infinity, or NaN made quiet
    return float_of(sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  }
  if (exponent == 0) {  // zero or denormal: mantissa * 2^-24 is exact in fp32
    const float magnitude = float(mantissa) * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Round to nearest even, denormals included; NaN keeps its upper payload bits and becomes quiet, as F16C does.
inline std::uint16_t f32_to_f16(float x) {
  const std::uint32_t u = bits_of(x), magnitude = u & 0x7FFFFFFFu;
  const std::uint16_t sign = std::uint16_t((u >> 16) & 0x8000u);
  if (magnitude > 0x7F800000u) return std::uint16_t(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x477FF000u) return std::uint16_t(sign | 0x7C00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: the addition rounds at the denormal's last bit
    const float shifted = float_of(magnitude) + 0.5f;
    return std::uint16_t(sign | (bits_of(shifted) - 0x3F000000u));
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23);
  return std::uint16_t(sign | (rounded >> 13));
}

template <int D>
inline float load(const void* base, std::size_t i) {
  if constexpr (D == kF32) return static_cast<const float*>(base)[i];
  const std::uint16_t h = static_cast<const std::uint16_t*>(base)[i];
  return D == kBF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

template <int D>
inline void store(void* base, std::size_t i, float x) {
  if constexpr (D == kF32) {
    static_cast<float*>(base)[i] = x;
  } else {
    static_cast<std::uint16_t*>(base)[i] = D == kBF16 ? f32_to_bf16(x) : f32_to_f16(x);
  }
}

inline double halve_lanes(double* lanes, std::size_t count) {
  for (std::size_t half = count / 2; half > 0; half /= 2)
    for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

}  // namespace
}  // namespace so
