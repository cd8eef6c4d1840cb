// NEON: exactly what the one lane of vector.h does. A vector is two registers of four lanes, since one 128-bit load or
// store of 16-bit values serves both, and two in flight hide the latency of square root and division. NEON belongs to
// the floor of the aarch64 ABI, so this file needs no flags of its own; conversions between fp16 and fp32 are part of
// that floor, arithmetic in fp16 is not.
#include <arm_neon.h>

#include "table.h"

namespace so {
namespace {

struct Vector {
  struct F {
    float32x4_t low, high;
  };
  struct I {
    uint32x4_t low, high;
  };
  static constexpr std::size_t kMaxLanes = 8;
  static constexpr int kUnroll = 1;
  static constexpr bool kMasks = false;

  static std::size_t width() { return kMaxLanes; }
  static Whole whole() { return {}; }

  static I bits(F a) { return {vreinterpretq_u32_f32(a.low), vreinterpretq_u32_f32(a.high)}; }
  static F floats(I a) { return {vreinterpretq_f32_u32(a.low), vreinterpretq_f32_u32(a.high)}; }

  template <int D>
  static F load(Whole, const void* base, std::size_t i) {
    if constexpr (D == kF32) {
      const float* x = static_cast<const float*>(base) + i;
      return {vld1q_f32(x), vld1q_f32(x + 4)};
    } else {
      const uint16x8_t h = vld1q_u16(static_cast<const std::uint16_t*>(base) + i);
      if constexpr (D == kBF16) return floats({vshll_n_u16(vget_low_u16(h), 16), vshll_n_u16(vget_high_u16(h), 16)});
      const float16x8_t f = vreinterpretq_f16_u16(h);
      return {vcvt_f32_f16(vget_low_f16(f)), vcvt_high_f32_f16(f)};
    }
  }

  static uint16x4_t to_bf16(float32x4_t x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t r = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), r, vdupq_n_u32(0x7FC00000)), 16);  // a NaN is not equal to itself
  }
  template <int D>
  static void store(Whole, void* base, std::size_t i, F x) {
    if constexpr (D == kF32) {
      float* y = static_cast<float*>(base) + i;
      vst1q_f32(y, x.low);
      vst1q_f32(y + 4, x.high);
    } else {
      uint16x8_t h;
      if constexpr (D == kBF16) {
        h = vcombine_u16(to_bf16(x.low), to_bf16(x.high));
      } else {
        h = vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high));
      }
      vst1q_u16(static_cast<std::uint16_t*>(base) + i, h);
    }
  }

  static F set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static F add(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
  static F sub(F a, F b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
  static F mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  static F div(F a, F b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
  static F sqrt(F a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }
  static F fma(F a, F b, F c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }

  static I distance(F a, F b) {
    const I x = bits(a), y = bits(b);
    return {vsubq_u32(x.low, y.low), vsubq_u32(x.high, y.high)};
  }
  static F moved(F a, I distance) {
    const I x = bits(a);
    return floats({vaddq_u32(x.low, distance.low), vaddq_u32(x.high, distance.high)});
  }
  static I reach(I distance) {
    const uint32x4_t half = vdupq_n_u32(128);
    return {vaddq_u32(distance.low, half), vaddq_u32(distance.high, half)};
  }
  static I either(I a, I b) { return {vorrq_u32(a.low, b.low), vorrq_u32(a.high, b.high)}; }
  static bool any_beyond_byte(Whole, I reach) { return vmaxvq_u32(vorrq_u32(reach.low, reach.high)) > 255u; }
  static I load_bytes(Whole, const std::int8_t* base, std::size_t i) {
    const int16x8_t h = vmovl_s8(vld1_s8(base + i));
    return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(h))), vreinterpretq_u32_s32(vmovl_high_s16(h))};
  }
  static void store_bytes(Whole, std::int8_t* base, std::size_t i, I x) {
    vst1_s8(base + i, vreinterpret_s8_u8(vmovn_u16(vcombine_u16(vmovn_u32(x.low), vmovn_u32(x.high)))));
  }
  static void spill(std::uint32_t* to, I x) {
    vst1q_u32(to, x.low);
    vst1q_u32(to + 4, x.high);
  }

  static F join(Whole, const std::uint16_t* weight, const std::uint16_t* remainder, std::size_t i, F& v) {
    const I u = bits(v);
    const uint16x8_t parity = vshrq_n_u16(vcombine_u16(vshrn_n_u32(u.low, 16), vshrn_n_u32(u.high, 16)), 15);
    const uint16x8_t w = vld1q_u16(weight + i);
    const uint16x8_t upper = vsubq_u16(w, vandq_u16(veorq_u16(w, parity), vdupq_n_u16(1)));
    const uint16x8x2_t master = vzipq_u16(vld1q_u16(remainder + i), upper);
    v = {vabsq_f32(v.low), vabsq_f32(v.high)};
    return {vreinterpretq_f32_u16(master.val[0]), vreinterpretq_f32_u16(master.val[1])};
  }
  static void store_remainder(Whole, std::uint16_t* remainder, std::size_t i, F p) {
    const I u = bits(p);
    vst1q_u16(remainder + i, vcombine_u16(vmovn_u32(u.low), vmovn_u32(u.high)));
  }
  static F flagged(F v, F p) {
    const I x = bits(v), y = bits(p);
    const uint32x4_t sign = vdupq_n_u32(0x80000000u);
    return floats({vbslq_u32(sign, vshlq_n_u32(y.low, 15), x.low), vbslq_u32(sign, vshlq_n_u32(y.high, 15), x.high)});
  }

  template <int D>
  static double sum_sq(const void* x, std::size_t n);
};

// Adds the squares of four elements to four lanes. A square is exact in double, so the fused form rounds as the
// separate one does.
inline void add_squares(float32x4_t x, float64x2_t& low, float64x2_t& high) {
  const float64x2_t a = vcvt_f64_f32(vget_low_f32(x)), b = vcvt_high_f64_f32(x);
  low = vfmaq_f64(low, a, a);
  high = vfmaq_f64(high, b, b);
}

template <int D>
double Vector::sum_sq(const void* x, std::size_t n) {
  // Sixteen lanes at a time stay in registers; a chunk fits in the first-level cache, so four walks cost little.
  constexpr std::size_t kGroup = 16;
  alignas(16) double lanes[kNormLanes] = {};
  const std::size_t rows = n / kNormLanes;
  for (std::size_t base = 0; base < kNormLanes; base += kGroup) {
    float64x2_t a0 = vdupq_n_f64(0.0), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
    for (std::size_t r = 0; r < rows; ++r) {
      const std::size_t i = r * kNormLanes + base;
      const F first = load<D>(whole(), x, i), second = load<D>(whole(), x, i + 8);
      add_squares(first.low, a0, a1);
      add_squares(first.high, a2, a3);
      add_squares(second.low, a4, a5);
      add_squares(second.high, a6, a7);
    }
    const float64x2_t sums[] = {a0, a1, a2, a3, a4, a5, a6, a7};
    for (std::size_t l = 0; l < kGroup; l += 2) vst1q_f64(lanes + base + l, sums[l / 2]);
  }
  for (std::size_t i = rows * kNormLanes; i < n; ++i) {
    const double d = so::load<D>(x, i);
    lanes[i % kNormLanes] += d * d;
  }
  return halve_lanes(lanes, kNormLanes);
}

constexpr KernelTable kTable = table_of<Vector>("neon");

}  // namespace

const KernelTable* neon_table() { return &kTable; }

}  // namespace so
