// NEON: four lanes of exactly what adam_scalar.cpp does. It belongs to the floor of the aarch64 ABI, so this file needs
// no flags of its own; conversions between fp16 and fp32 are part of that floor, arithmetic in fp16 is not.
#include <arm_neon.h>

#include "scalar_ops.h"
#include "split_ops.h"
#include "table.h"
#include "undo_ops.h"

namespace so {
namespace {

constexpr std::size_t kWidth = 4;

// Two vectors at a time: one 128-bit load or store of 16-bit values serves both.
struct Eight {
  float32x4_t low, high;
};

template <int D>
inline Eight load8(const void* base, std::size_t i) {
  if constexpr (D == kF32) {
    const float* x = static_cast<const float*>(base) + i;
    return {vld1q_f32(x), vld1q_f32(x + kWidth)};
  } else {
    const uint16x8_t h = vld1q_u16(static_cast<const std::uint16_t*>(base) + i);
    if constexpr (D == kBF16) {
      return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
              vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))};
    } else {
      const float16x8_t f = vreinterpretq_f16_u16(h);
      return {vcvt_f32_f16(vget_low_f16(f)), vcvt_high_f32_f16(f)};
    }
  }
}

inline uint16x4_t to_bf16(float32x4_t x) {
  const uint32x4_t u = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t r = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), r, vdupq_n_u32(0x7FC00000)), 16);  // a NaN is not equal to itself
}

template <int D>
inline void store8(void* base, std::size_t i, Eight x) {
  if constexpr (D == kF32) {
    float* y = static_cast<float*>(base) + i;
    vst1q_f32(y, x.low);
    vst1q_f32(y + kWidth, x.high);
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

inline float32x4_t adam_four(float* p, float* m, float* v, float32x4_t g, std::size_t i, const AdamScalars& s) {
  const float32x4_t grad = vmulq_f32(g, vdupq_n_f32(s.grad_scale));
  const float32x4_t m0 = vld1q_f32(m + i);
  const float32x4_t m1 = vfmaq_f32(m0, vdupq_n_f32(s.one_minus_b1), vsubq_f32(grad, m0));
  const float32x4_t v1 =
      vfmaq_f32(vmulq_f32(vld1q_f32(v + i), vdupq_n_f32(s.beta2)), vmulq_f32(vdupq_n_f32(s.one_minus_b2), grad), grad);
  const float32x4_t denominator = vaddq_f32(vdivq_f32(vsqrtq_f32(v1), vdupq_n_f32(s.bc2_sqrt)), vdupq_n_f32(s.eps));
  const float32x4_t p1 = vaddq_f32(vmulq_f32(vld1q_f32(p + i), vdupq_n_f32(s.decay)),
                                   vdivq_f32(vmulq_f32(vdupq_n_f32(s.neg_step_size), m1), denominator));
  vst1q_f32(m + i, m1);
  vst1q_f32(v + i, v1);
  vst1q_f32(p + i, p1);
  return p1;
}

template <int G, int O>
void adam(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& scalars) {
  const AdamScalars s = scalars;  // a copy that no store can change: it stays in registers
  std::size_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    const Eight grad = load8<G>(g, i);
    Eight weight;
    weight.low = adam_four(p, m, v, grad.low, i, s);
    weight.high = adam_four(p, m, v, grad.high, i + kWidth, s);
    if constexpr (O != kF32) store8<O>(out, i, weight);
  }
  for (; i < n; ++i) adam_one<G, O>(p, m, v, g, out, i, s);
}

template <int S, int D>
void cast(const void* src, void* dst, std::size_t n) {
  if constexpr (S == D) {
    std::memcpy(dst, src, n * dtype_bytes(S));
  } else {
    std::size_t i = 0;
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) store8<D>(dst, i, load8<S>(src, i));
    for (; i < n; ++i) store<D>(dst, i, load<S>(src, i));
  }
}

// Adds the squares of four elements to four lanes. A square is exact in double, so the fused form rounds as the
// separate one does.
inline void add_squares(float32x4_t x, float64x2_t& low, float64x2_t& high) {
  const float64x2_t a = vcvt_f64_f32(vget_low_f32(x)), b = vcvt_high_f64_f32(x);
  low = vfmaq_f64(low, a, a);
  high = vfmaq_f64(high, b, b);
}

template <int D>
double sum_sq(const void* x, std::size_t n) {
  // Sixteen lanes at a time stay in registers; a chunk fits in the first-level cache, so four walks cost little.
  constexpr std::size_t kGroup = 16;
  alignas(16) double lanes[kNormLanes] = {};
  const std::size_t rows = n / kNormLanes;
  for (std::size_t base = 0; base < kNormLanes; base += kGroup) {
    float64x2_t a0 = vdupq_n_f64(0.0), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
    for (std::size_t r = 0; r < rows; ++r) {
      const std::size_t i = r * kNormLanes + base;
      const Eight first = load8<D>(x, i), second = load8<D>(x, i + 8);
      add_squares(first.low, a0, a1);
      add_squares(first.high, a2, a3);
      add_squares(second.low, a4, a5);
      add_squares(second.high, a6, a7);
    }
    const float64x2_t sums[] = {a0, a1, a2, a3, a4, a5, a6, a7};
    for (std::size_t l = 0; l < kGroup; l += 2) vst1q_f64(lanes + base + l, sums[l / 2]);
  }
  for (std::size_t i = rows * kNormLanes; i < n; ++i) {
    const double d = load<D>(x, i);
    lanes[i % kNormLanes] += d * d;
  }
  return halve_lanes(lanes, kNormLanes);
}

constexpr KernelTable kTable = SO_KERNEL_TABLE("neon");

}  // namespace

const KernelTable* neon_table() { return &kTable; }

}  // namespace so
