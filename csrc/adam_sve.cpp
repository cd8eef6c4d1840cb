// SVE: exactly what adam_scalar.cpp does, for any vector length; a predicate cuts the last vector short. SVE2 and BF16
// are not needed: bf16 is rounded with integers, because BFCVT keeps NaN payloads where the definition has one NaN (and
// not every SVE machine has it). 16-bit values travel in 32-bit lanes: loads widen and stores narrow them on the way.
#include <arm_sve.h>

#include "scalar_ops.h"
#include "split_ops.h"
#include "table.h"
#include "undo_ops.h"

namespace so {
namespace {

template <int D>
inline svfloat32_t load_vector(svbool_t pg, const void* base, std::size_t i) {
  if constexpr (D == kF32) {
    return svld1_f32(pg, static_cast<const float*>(base) + i);
  } else {
    const svuint32_t h = svld1uh_u32(pg, static_cast<const std::uint16_t*>(base) + i);
    if constexpr (D == kBF16) {
      return svreinterpret_f32_u32(svlsl_n_u32_x(pg, h, 16));
    } else {
      return svcvt_f32_f16_x(pg, svreinterpret_f16_u32(h));  // reads the low half of each lane
    }
  }
}

template <int D>
inline void store_vector(svbool_t pg, void* base, std::size_t i, svfloat32_t x) {
  if constexpr (D == kF32) {
    svst1_f32(pg, static_cast<float*>(base) + i, x);
  } else {
    svuint32_t h;
    if constexpr (D == kBF16) {
      const svuint32_t u = svreinterpret_u32_f32(x);
      const svuint32_t odd = svand_n_u32_x(pg, svlsr_n_u32_x(pg, u, 16), 1);
      const svuint32_t r = svlsr_n_u32_x(pg, svadd_u32_x(pg, svadd_n_u32_x(pg, u, 0x7FFF), odd), 16);
      h = svsel_u32(svcmpuo_f32(pg, x, x), svdup_n_u32(0x7FC0), r);
    } else {
      h = svreinterpret_u32_f16(svcvt_f16_f32_x(pg, x));
    }
    svst1h_u32(pg, static_cast<std::uint16_t*>(base) + i, h);
  }
}

template <int G, int O>
inline void adam_vector(svbool_t pg, float* p, float* m, float* v, const void* g, void* out, std::size_t i,
                        const AdamScalars& s) {
  const svfloat32_t grad = svmul_n_f32_x(pg, load_vector<G>(pg, g, i), s.grad_scale);
  const svfloat32_t m0 = svld1_f32(pg, m + i);
  const svfloat32_t m1 = svmla_n_f32_x(pg, m0, svsub_f32_x(pg, grad, m0), s.one_minus_b1);
  const svfloat32_t v1 =
      svmla_f32_x(pg, svmul_n_f32_x(pg, svld1_f32(pg, v + i), s.beta2), svmul_n_f32_x(pg, grad, s.one_minus_b2), grad);
  const svfloat32_t denominator = svadd_n_f32_x(pg, svdiv_n_f32_x(pg, svsqrt_f32_x(pg, v1), s.bc2_sqrt), s.eps);
  const svfloat32_t p1 = svadd_f32_x(pg, svmul_n_f32_x(pg, svld1_f32(pg, p + i), s.decay),
                                     svdiv_f32_x(pg, svmul_n_f32_x(pg, m1, s.neg_step_size), denominator));
  svst1_f32(pg, m + i, m1);
  svst1_f32(pg, v + i, v1);
  svst1_f32(pg, p + i, p1);
  if constexpr (O != kF32) store_vector<O>(pg, out, i, p1);
}

template <int G, int O>
void adam(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& scalars) {
  const AdamScalars s = scalars;  // a copy that no store can change: it stays in registers
  const std::size_t width = svcntw();
  const svbool_t all = svptrue_b32();
  std::size_t i = 0;
  for (; i + 2 * width <= n; i += 2 * width) {  // two vectors in flight hide the latency of sqrt and divide
    adam_vector<G, O>(all, p, m, v, g, out, i, s);
    adam_vector<G, O>(all, p, m, v, g, out, i + width, s);
  }
  for (; i < n; i += width) {
    adam_vector<G, O>(svwhilelt_b32(std::uint64_t(i), std::uint64_t(n)), p, m, v, g, out, i, s);
  }
}

template <int S, int D>
void cast(const void* src, void* dst, std::size_t n) {
  if constexpr (S == D) {
    std::memcpy(dst, src, n * dtype_bytes(S));
  } else {
    for (std::size_t i = 0; i < n; i += svcntw()) {
      const svbool_t pg = svwhilelt_b32(std::uint64_t(i), std::uint64_t(n));
      store_vector<D>(pg, dst, i, load_vector<S>(pg, src, i));
    }
  }
}

// Adds the squares of x[i ...] to the lanes of `sum` that `pg` names; the others keep their bits. A square is exact in
// double, so the fused form rounds as the separate one does.
template <int D>
inline svfloat64_t add_squares(svbool_t pg, svfloat64_t sum, const void* x, std::size_t i) {
  svfloat64_t d;
  if constexpr (D == kF32) {
    const svuint64_t u = svld1uw_u64(pg, reinterpret_cast<const std::uint32_t*>(x) + i);
    d = svcvt_f64_f32_x(pg, svreinterpret_f32_u64(u));
  } else {
    const svuint64_t h = svld1uh_u64(pg, static_cast<const std::uint16_t*>(x) + i);
    if constexpr (D == kBF16) {
      d = svcvt_f64_f32_x(pg, svreinterpret_f32_u64(svlsl_n_u64_x(pg, h, 16)));
    } else {
      d = svcvt_f64_f16_x(pg, svreinterpret_f16_u64(h));
    }
  }
  return svmla_f64_m(pg, sum, d, d);
}

template <int D>
double sum_sq(const void* x, std::size_t n) {
  // Eight vectors of lanes at a time stay in registers: four walks over a chunk at 128 bits, one from 512 bits on.
  // Predicates leave out lanes that this vector length has beyond the kNormLanes.
  const std::size_t width = svcntd();
  const std::uint64_t lane_count = kNormLanes;
  double lanes[kNormLanes];
  for (std::size_t base = 0; base < kNormLanes; base += 8 * width) {
    const auto lane = [&](std::size_t k) { return std::uint64_t(base + k * width); };
    svfloat64_t a0 = svdup_n_f64(0.0), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
    const auto add_row = [&](std::size_t row, std::uint64_t end) {
      a0 = add_squares<D>(svwhilelt_b64(lane(0), end), a0, x, row + lane(0));
      a1 = add_squares<D>(svwhilelt_b64(lane(1), end), a1, x, row + lane(1));
      a2 = add_squares<D>(svwhilelt_b64(lane(2), end), a2, x, row + lane(2));
      a3 = add_squares<D>(svwhilelt_b64(lane(3), end), a3, x, row + lane(3));
      a4 = add_squares<D>(svwhilelt_b64(lane(4), end), a4, x, row + lane(4));
      a5 = add_squares<D>(svwhilelt_b64(lane(5), end), a5, x, row + lane(5));
      a6 = add_squares<D>(svwhilelt_b64(lane(6), end), a6, x, row + lane(6));
      a7 = add_squares<D>(svwhilelt_b64(lane(7), end), a7, x, row + lane(7));
    };
    std::size_t row = 0;
    for (; row + kNormLanes <= n; row += kNormLanes) add_row(row, lane_count);
    if (row < n) add_row(row, n - row);
    svst1_f64(svwhilelt_b64(lane(0), lane_count), lanes + lane(0), a0);
    svst1_f64(svwhilelt_b64(lane(1), lane_count), lanes + lane(1), a1);
    svst1_f64(svwhilelt_b64(lane(2), lane_count), lanes + lane(2), a2);
    svst1_f64(svwhilelt_b64(lane(3), lane_count), lanes + lane(3), a3);
    svst1_f64(svwhilelt_b64(lane(4), lane_count), lanes + lane(4), a4);
    svst1_f64(svwhilelt_b64(lane(5), lane_count), lanes + lane(5), a5);
    svst1_f64(svwhilelt_b64(lane(6), lane_count), lanes + lane(6), a6);
    svst1_f64(svwhilelt_b64(lane(7), lane_count), lanes + lane(7), a7);
  }
  return halve_lanes(lanes, kNormLanes);
}

constexpr KernelTable kTable = SO_KERNEL_TABLE("sve");

}  // namespace

const KernelTable* sve_table() { return &kTable; }

}  // namespace so
