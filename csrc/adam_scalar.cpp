// The baseline: one lane at the ABI floor, and the definition that every other instruction set must reproduce.
#include "table.h"

namespace so {
namespace {

struct Vector : ScalarVector {
  template <int D>
  static double sum_sq(const void* x, std::size_t n) {
    double lanes[kNormLanes] = {};
    for (std::size_t i = 0; i < n; ++i) {
      const double d = so::load<D>(x, i);
      lanes[i % kNormLanes] += d * d;  // the square of an fp32 is exact in double
    }
    return halve_lanes(lanes, kNormLanes);
  }
};

constexpr KernelTable kTable = table_of<Vector>("scalar");

}  // namespace

const KernelTable* scalar_table() { return &kTable; }

}  // namespace so
