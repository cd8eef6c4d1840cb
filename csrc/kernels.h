// The table every instruction set fills and the dispatcher picks from. Kernels work on raw pointers, know nothing of
// Python or CUDA, and give the same bits on every instruction set: the same operations in the same order, fused
// multiply-adds only where they are written, IEEE square root and division, denormals kept.
#pragma once

#include <cstddef>
#include <cstdint>

namespace so {

enum DType : int { kF32 = 0, kBF16 = 1, kF16 = 2, kDTypes = 3 };

inline std::size_t dtype_bytes(int d) { return d == kF32 ? 4 : 2; }

// Elements per partial sum of squares and lanes that a chunk is dealt to; see layout.py.
constexpr std::size_t kNormChunk = 8192;
constexpr std::size_t kNormLanes = 64;
constexpr std::size_t kCombineLanes = 1024;

// Everything a step needs besides the arrays, already in fp32 (computed in double, rounded once).
struct AdamScalars {
  float grad_scale;    // unscale times clip coefficient
  float one_minus_b1;  // 1 - beta1
  float beta2;
  float one_minus_b2;   // 1 - beta2
  float decay;          // 1 - lr * weight_decay, or 1
  float neg_step_size;  // -lr / (1 - beta1^t), or -lr
  float bc2_sqrt;       // sqrt(1 - beta2^t), or 1
  float eps;
  float l2;  // weight decay that is added to the gradient, or 0
};

// p, m, v are updated in place; `out` (16-bit weights) may be null when the table entry is the no-output one.
using AdamFn = void (*)(float* p, float* m, float* v, const void* g, void* out, std::size_t n, const AdamScalars& s);
using CastFn = void (*)(const void* src, void* dst, std::size_t n);
using AccumulateFn = void (*)(float* total, const void* x, std::size_t n);
// Sum of squares of at most kNormChunk elements, over kNormLanes virtual lanes, in double.
using SumSqFn = double (*)(const void* x, std::size_t n);

struct UndoTile;  // undo.h

// A step with an undo record, over at most a tile. Stops before the vector that would overflow the escape list: returns
// how many elements were stepped, and in `escaped` how many entries are theirs.
using RecordFn = std::size_t (*)(float* p, float* m, float* v, const void* g, void* out, std::size_t n,
                                 const AdamScalars& s, const UndoTile& record, std::size_t& escaped);
// Takes `old_step` back, with the first `escaped` entries of the list; the redoing one takes `new_step` afterwards.
using UndoFn = void (*)(float* p, float* m, float* v, const void* g, void* out, std::size_t n,
                        const AdamScalars& old_step, const AdamScalars& new_step, const UndoTile& record,
                        std::size_t escaped);

// The same on the split master; see split_ops.h.
using AdamSplitFn = void (*)(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g,
                             std::size_t n, const AdamScalars& s);
using RecordSplitFn = std::size_t (*)(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v,
                                      const void* g, std::size_t n, const AdamScalars& s, const UndoTile& record,
                                      std::size_t& escaped);
using UndoSplitFn = void (*)(std::uint16_t* weight, std::uint16_t* remainder, float* m, float* v, const void* g,
                             std::size_t n, const AdamScalars& old_step, const AdamScalars& new_step,
                             const UndoTile& record, std::size_t escaped);
using JoinFn = void (*)(const std::uint16_t* weight, const std::uint16_t* remainder, const float* v, std::size_t n,
                        float* p, float* plain_v);
using SplitFn = void (*)(const float* p, const float* plain_v, std::size_t n, std::uint16_t* weight,
                         std::uint16_t* remainder, float* v);

struct KernelTable {
  const char* name;
  AdamFn adam[kDTypes][kDTypes];  // [gradient dtype][output dtype; kF32 = no output]
  RecordFn record[kDTypes][kDTypes];
  UndoFn undo[kDTypes][kDTypes], undo_redo[kDTypes][kDTypes];
  AdamSplitFn adam_split[kDTypes];  // [gradient dtype]
  RecordSplitFn record_split[kDTypes];
  UndoSplitFn undo_split[kDTypes], undo_redo_split[kDTypes];
  JoinFn join;
  SplitFn split;
  CastFn cast[kDTypes][kDTypes];  // [source][destination]
  AccumulateFn accumulate[kDTypes];
  SumSqFn sum_sq[kDTypes];
  void (*stream)(float* p, float* m, float* v, const float* g, std::size_t n);  // the ceiling; see undo_ops.h
};

const KernelTable* scalar_table();
#ifdef SO_HAVE_AVX2
const KernelTable* avx2_table();
#endif
#ifdef SO_HAVE_AVX512
const KernelTable* avx512_table();
#endif
#ifdef SO_HAVE_NEON
const KernelTable* neon_table();
#endif
#ifdef SO_HAVE_SVE
const KernelTable* sve_table();
#endif

// Chosen once by CPU features (or SUPEROFFLOAD_ISA); force_isa overrides it and returns false for an unknown name.
const KernelTable& kernels();
bool force_isa(const char* name);
int available_isas(const char** names, int capacity);

// Lane l takes partials l, l + 1024, ...; then the lanes are halved pairwise. The GPU does the same.
double combine_partials(const double* partials, std::size_t n);

// Hyperparameters of one parameter group, and the scalars of a parameter at integer step `t` (1 for the first).
struct AdamHyper {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled = true;  // AdamW; false adds weight_decay * p to the gradient, as torch.optim.Adam does
  bool bias_correction = true;
};
AdamScalars adam_scalars(const AdamHyper& h, std::int64_t t, float grad_scale);

// Sets round-to-nearest with denormals kept for its lifetime and restores what the caller had.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::uint64_t saved_;
};

}  // namespace so
