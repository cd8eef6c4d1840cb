// SVE: exactly what the one lane of vector.h does, for any vector length; a predicate cuts the last vector short. SVE2
// and BF16 are not needed: bf16 is rounded with integers, because BFCVT keeps NaN payloads where the definition has one
// NaN (and not every SVE machine has it). 16-bit values and bytes travel in 32-bit lanes: loads widen and stores narrow
// them on the way.
#include <arm_sve.h>

#include "table.h"

namespace so {
namespace {

struct Vector {
  using F = svfloat32_t;
  using I = svuint32_t;
  static constexpr std::size_t kMaxLanes = 64;  // of 2,048 bits
  static constexpr int kUnroll = 2;
  static constexpr bool kMasks = true;

  static std::size_t width() { return svcntw(); }
  static svbool_t whole() { return svptrue_b32(); }
  static svbool_t first_lanes(std::size_t count) { return svwhilelt_b32(std::uint64_t(0), std::uint64_t(count)); }

  template <int D>
  static F load(svbool_t pg, const void* base, std::size_t i) {
    if constexpr (D == kF32) {
      return svld1_f32(pg, static_cast<const float*>(base) + i);
    } else {
      const I h = svld1uh_u32(pg, static_cast<const std::uint16_t*>(base) + i);
      if constexpr (D == kBF16) {
        return svreinterpret_f32_u32(svlsl_n_u32_x(pg, h, 16));
      } else {
        return svcvt_f32_f16_x(pg, svreinterpret_f16_u32(h));  // reads the low half of each lane
      }
    }
  }
  template <int D>
  static void store(svbool_t pg, void* base, std::size_t i, F x) {
    if constexpr (D == kF32) {
      svst1_f32(pg, static_cast<float*>(base) + i, x);
    } else {
      I h;
      if constexpr (D == kBF16) {
        const I u = svreinterpret_u32_f32(x);
        const I odd = svand_n_u32_x(pg, svlsr_n_u32_x(pg, u, 16), 1);
        const I r = svlsr_n_u32_x(pg, svadd_u32_x(pg, svadd_n_u32_x(pg, u, 0x7FFF), odd), 16);
        h = svsel_u32(svcmpuo_f32(pg, x, x), svdup_n_u32(0x7FC0), r);
      } else {
        h = svreinterpret_u32_f16(svcvt_f16_f32_x(pg, x));
      }
      svst1h_u32(pg, static_cast<std::uint16_t*>(base) + i, h);
    }
  }

  static F set(float x) { return svdup_n_f32(x); }
  static F add(F a, F b) { return svadd_f32_x(whole(), a, b); }
  static F sub(F a, F b) { return svsub_f32_x(whole(), a, b); }
  static F mul(F a, F b) { return svmul_f32_x(whole(), a, b); }
  static F div(F a, F b) { return svdiv_f32_x(whole(), a, b); }
  static F sqrt(F a) { return svsqrt_f32_x(whole(), a); }
  static F fma(F a, F b, F c) { return svmla_f32_x(whole(), c, a, b); }

  static I distance(F a, F b) { return svsub_u32_x(whole(), svreinterpret_u32_f32(a), svreinterpret_u32_f32(b)); }
  static F moved(F a, I distance) {
    return svreinterpret_f32_u32(svadd_u32_x(whole(), svreinterpret_u32_f32(a), distance));
  }
  static I reach(I distance) { return svadd_n_u32_x(whole(), distance, 128); }
  static I either(I a, I b) { return svorr_u32_x(whole(), a, b); }
  static bool any_beyond_byte(svbool_t pg, I reach) { return svptest_any(pg, svcmpgt_n_u32(pg, reach, 255)); }
  static I load_bytes(svbool_t pg, const std::int8_t* base, std::size_t i) {
    return svreinterpret_u32_s32(svld1sb_s32(pg, base + i));
  }
  static void store_bytes(svbool_t pg, std::int8_t* base, std::size_t i, I x) {
    svst1b_s32(pg, base + i, svreinterpret_s32_u32(x));
  }
  static void spill(std::uint32_t* to, I x) { svst1_u32(whole(), to, x); }

  static F join(svbool_t pg, const std::uint16_t* weight, const std::uint16_t* remainder, std::size_t i, F& v) {
    const svbool_t all = whole();
    const I w = svld1uh_u32(pg, weight + i), lower = svld1uh_u32(pg, remainder + i);
    const I odd = svand_n_u32_x(all, sveor_u32_x(all, w, svlsr_n_u32_x(all, svreinterpret_u32_f32(v), 31)), 1);
    v = svabs_f32_x(all, v);
    const I upper = svlsl_n_u32_x(all, svsub_u32_x(all, w, odd), 16);
    return svreinterpret_f32_u32(svorr_u32_x(all, upper, lower));
  }
  static void store_remainder(svbool_t pg, std::uint16_t* remainder, std::size_t i, F p) {
    svst1h_u32(pg, remainder + i, svreinterpret_u32_f32(p));
  }
  static F flagged(F v, F p) {
    const svbool_t all = whole();
    const I magnitude = svand_n_u32_x(all, svreinterpret_u32_f32(v), 0x7FFFFFFF);
    const I parity = svand_n_u32_x(all, svlsl_n_u32_x(all, svreinterpret_u32_f32(p), 15), 0x80000000u);
    return svreinterpret_f32_u32(svorr_u32_x(all, magnitude, parity));
  }

  template <int D>
  static double sum_sq(const void* x, std::size_t n);
};

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
double Vector::sum_sq(const void* x, std::size_t n) {
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

constexpr KernelTable kTable = table_of<Vector>("sve");

}  // namespace

const KernelTable* sve_table() { return &kTable; }

}  // namespace so
