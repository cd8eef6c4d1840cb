// Prints a hash of what every kernel gives for the inputs of tests/kernels/make_golden.py, which defines the cases and
// holds the same generator in numpy. Needs neither Python nor a test framework, so that it can be built for any
// processor and run under an emulator; tests/kernels/test_golden.py builds it and compares.
//
//   test_golden          "isas <best> <next> ...", "sve_bits <vector length, or 0>", then "<isa> <case> <sha256>" for
//                        every instruction set
//   test_golden ISA...   hashes of those only
//
// Each array lies in three places: aligned, one element off, and with its end at a page that may not be touched. All
// three must give the same bits and leave the bytes around the array alone; where they do not, it says so and fails.
#ifdef SO_HAVE_SVE
#include <sys/prctl.h>
#endif
#include "split.h"
#include "test_golden.h"
#include "undo.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

// --- Cases ----------------------------------------------------------------------------------------------------------

const char* const kNames[] = {"f32", "bf16", "f16"};
constexpr std::size_t kSizes[] = {1, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 129, 1000, 4099};
constexpr std::size_t kNormSizes[] = {1, 3, 7, 63, 64, 65, 97, 127, 129, 1000, 8191, 8192};
constexpr std::size_t kPartials = 5000;
constexpr std::size_t kManyTiles = 40007;  // more than two tiles of the thread pool
constexpr so::AdamHyper kHyper{3e-4, 0.9, 0.999, 1e-8, 0.1};
constexpr so::AdamHyper kL2{3e-4, 0.9, 0.999, 1e-8, 0.1, false, true};
constexpr so::AdamHyper kL2Uncorrected{3e-4, 0.9, 0.999, 1e-8, 0.1, false, false};
constexpr float kGradScale = 0.375f;
constexpr int kSteps = 3;
// Small enough for a tile's escape list, over one block, and too many.
constexpr std::size_t kUndoSizes[] = {1, 3, 7, 15, 17, 31, 33, 63, 65, 97, 129, 600, 4099};
constexpr std::size_t kSplitSizes[] = {1, 7, 17, 33, 65, 129, 600, 4099};
constexpr std::size_t kVariantSizes[] = {17, 97, 600};
constexpr float kRedoScale = 0.03125f;

int failures = 0;

// Memory of the record of one tile, in the places of the other arrays.
class RecordOf {
 public:
  RecordOf(std::size_t n, Place place)
      : p_(Bytes(n, 0), 1, place), m_(Bytes(n, 0), 1, place), v_(Bytes(n, 0), 1, place), escapes_(so::kEscapes) {}
  so::UndoTile tile() {
    return {p_.as<std::uint8_t>(), m_.as<std::uint8_t>(), v_.as<std::uint8_t>(), escapes_.data(), &count_};
  }
  void take(Bytes& into) const {
    append(into, count_);
    if (count_ == so::kNotStepped) return;  // what a tile that waits has in its record means nothing
    for (const Placed* x : {&p_, &m_, &v_}) x->take(into);
    for (std::uint32_t i = 0; i < count_; ++i) append(into, escapes_[i]);
  }
  bool guards_intact() const { return p_.guards_intact() && m_.guards_intact() && v_.guards_intact(); }

 private:
  Placed p_, m_, v_;
  std::vector<so::Escape> escapes_;
  std::uint32_t count_ = 0;
};

class Runner {
 public:
  explicit Runner(const so::KernelTable& table) : table_(table) {}

  void adam(const char* kind, const so::AdamHyper& hyper, int grad, int out, std::size_t n) {
    const Bytes p = make_f32(kMaster, n, kMasterRange), m = make_f32(kExpAvg, n, kExpAvgRange);
    const Bytes v = make_f32(kExpAvgSq, n, kExpAvgSqRange, 0x7FFFFFFFu);  // never negative
    const Bytes g = make_finite(kGradient, n, grad, kGradientRange);
    const Bytes w(out == so::kF32 ? 0 : 2 * n, 0);
    report(kind + std::string("/") + kNames[grad] + "/" + kNames[out] + "/" + std::to_string(n), [&](Place place) {
      Placed pp(p, 4, place), pm(m, 4, place), pv(v, 4, place), pg(g, so::dtype_bytes(grad), place), pw(w, 2, place);
      for (int t = 1; t <= kSteps; ++t) {
        table_.adam[grad][out](pp.as<float>(), pm.as<float>(), pv.as<float>(), pg.as(), w.empty() ? nullptr : pw.as(),
                               n, so::adam_scalars(hyper, t, kGradScale));
      }
      Bytes result;
      for (const Placed* x : {&pp, &pm, &pv, &pw}) x->take(result);
      intact_ =
          pp.guards_intact() && pm.guards_intact() && pv.guards_intact() && pg.guards_intact() && pw.guards_intact();
      return result;
    });
  }

  // Two steps from zero moments, then a third that is recorded, taken back, recorded and redone.
  void undo(const char* kind, const so::AdamHyper& hyper, int grad, int out, std::size_t n) {
    const Bytes p = make_f32(kMaster, n, kMasterRange), zero(4 * n, 0), w(out == so::kF32 ? 0 : 2 * n, 0);
    const Bytes before = make_finite(kGradient, n, grad, kGradientRange);
    const Bytes now = make_finite(kNextGradient, n, grad, kGradientRange);
    report(kind + std::string("/") + kNames[grad] + "/" + kNames[out] + "/" + std::to_string(n), [&](Place place) {
      const std::size_t size = so::dtype_bytes(grad);
      Placed pp(p, 4, place), pm(zero, 4, place), pv(zero, 4, place), pw(w, 2, place);
      Placed pb(before, size, place), pg(now, size, place);
      void* weights = w.empty() ? nullptr : pw.as();
      for (int t = 1; t <= 2; ++t) {
        table_.adam[grad][out](pp.as<float>(), pm.as<float>(), pv.as<float>(), pb.as(), weights, n,
                               so::adam_scalars(hyper, t, kGradScale));
      }
      const so::AdamScalars s = so::adam_scalars(hyper, 3, kGradScale), again = so::adam_scalars(hyper, 3, kRedoScale);
      RecordOf record(n, place);
      Bytes result;
      const auto take = [&] {
        for (const Placed* x : {&pp, &pm, &pv, &pw}) x->take(result);
      };
      const auto step = [&] {
        so::adam_record(pp.as<float>(), pm.as<float>(), pv.as<float>(), pg.as(), grad, weights, out, n, s,
                        record.tile(), table_);
      };
      step();
      take();
      record.take(result);
      so::adam_undo(pp.as<float>(), pm.as<float>(), pv.as<float>(), pg.as(), grad, weights, out, n, s, record.tile(),
                    table_);
      take();
      step();
      so::adam_undo_redo(pp.as<float>(), pm.as<float>(), pv.as<float>(), pg.as(), grad, weights, out, n, s, again,
                         record.tile(), table_);
      take();
      intact_ = record.guards_intact() && pp.guards_intact() && pm.guards_intact() && pv.guards_intact() &&
                pb.guards_intact() && pg.guards_intact() && pw.guards_intact();
      return result;
    });
  }

  // The same on a split master, and the split itself.
  void split(const char* kind, const so::AdamHyper& hyper, int grad, std::size_t n) {
    const Bytes p = make_f32(kMaster, n, kMasterRange), zero(4 * n, 0), half(2 * n, 0);
    const Bytes before = make_finite(kGradient, n, grad, kGradientRange);
    const Bytes now = make_finite(kNextGradient, n, grad, kGradientRange);
    report(kind + std::string("/") + kNames[grad] + "/" + std::to_string(n), [&](Place place) {
      const std::size_t size = so::dtype_bytes(grad);
      Placed pp(p, 4, place), pw(half, 2, place), pr(half, 2, place), pm(zero, 4, place), pv(zero, 4, place);
      Placed pb(before, size, place), pg(now, size, place);
      auto *w = pw.as<std::uint16_t>(), *r = pr.as<std::uint16_t>();
      auto *m = pm.as<float>(), *v = pv.as<float>();
      Bytes result;
      const auto take = [&] {
        for (const Placed* x : {&pw, &pr, &pm, &pv}) x->take(result);
      };
      so::split(pp.as<float>(), w, r, v, n, table_);
      take();
      for (int t = 1; t <= 2; ++t)
        so::adam_split(w, r, m, v, pb.as(), grad, n, so::adam_scalars(hyper, t, kGradScale), table_);
      take();
      const so::AdamScalars s = so::adam_scalars(hyper, 3, kGradScale), again = so::adam_scalars(hyper, 3, kRedoScale);
      RecordOf record(n, place);
      so::adam_record_split(w, r, m, v, pg.as(), grad, n, s, record.tile(), table_);
      take();
      record.take(result);
      so::adam_undo_split(w, r, m, v, pg.as(), grad, n, s, record.tile(), table_);
      take();
      so::adam_record_split(w, r, m, v, pg.as(), grad, n, s, record.tile(), table_);
      so::adam_undo_redo_split(w, r, m, v, pg.as(), grad, n, s, again, record.tile(), table_);
      take();
      intact_ = record.guards_intact() && pp.guards_intact() && pw.guards_intact() && pr.guards_intact() &&
                pm.guards_intact() && pv.guards_intact() && pb.guards_intact() && pg.guards_intact();
      return result;
    });
  }

  void cast(int from, int to, std::size_t n) {
    const Bytes x = make_cast(n, from), y(n * so::dtype_bytes(to), 0);
    report("cast/" + std::string(kNames[from]) + "/" + kNames[to] + "/" + std::to_string(n), [&](Place place) {
      Placed px(x, so::dtype_bytes(from), place), py(y, so::dtype_bytes(to), place);
      table_.cast[from][to](px.as(), py.as(), n);
      Bytes result;
      py.take(result);
      intact_ = px.guards_intact() && py.guards_intact();
      return result;
    });
  }

  void accumulate(int dtype, std::size_t n) {
    const Bytes total = make_finite(kNorm, n, so::kF32, kNormRange), x = make_finite(kNorm + 1, n, dtype, kNormRange);
    report("accumulate/" + std::string(kNames[dtype]) + "/" + std::to_string(n), [&](Place place) {
      Placed pt(total, sizeof(float), place), px(x, so::dtype_bytes(dtype), place);
      table_.accumulate[dtype](static_cast<float*>(pt.as()), px.as(), n);
      Bytes result;
      pt.take(result);
      intact_ = pt.guards_intact() && px.guards_intact();
      return result;
    });
  }

  void sum_sq(int dtype, std::size_t n) {
    std::vector<Bytes> inputs;
    for (std::uint64_t k = 0; k < kSums; ++k) inputs.push_back(make_finite(kNorm + k, n, dtype, kNormRange));
    report("sum_sq/" + std::string(kNames[dtype]) + "/" + std::to_string(n), [&](Place place) {
      Bytes result;
      intact_ = true;
      for (const Bytes& x : inputs) {
        Placed px(x, so::dtype_bytes(dtype), place);
        append(result, table_.sum_sq[dtype](px.as(), n));
        intact_ = intact_ && px.guards_intact();
      }
      return result;
    });
  }

  void all() {
    for (int a = 0; a < so::kDTypes; ++a) {
      for (int b = 0; b < so::kDTypes; ++b) {
        for (std::size_t n : kSizes) adam("adam", kHyper, a, b, n);
        for (std::size_t n : kVariantSizes) adam("adam_l2", kL2, a, b, n);
        for (std::size_t n : kVariantSizes) adam("adam_l2_uncorrected", kL2Uncorrected, a, b, n);
        for (std::size_t n : kUndoSizes) undo("undo", kHyper, a, b, n);
        for (std::size_t n : kVariantSizes) undo("undo_l2", kL2, a, b, n);
        for (std::size_t n : kSizes) cast(a, b, n);
      }
      for (std::size_t n : kSplitSizes) split("split", kHyper, a, n);
      for (std::size_t n : kVariantSizes) split("split_l2", kL2, a, n);
      for (std::size_t n : kSizes) accumulate(a, n);
      for (std::size_t n : kNormSizes) sum_sq(a, n);
    }
    adam("adam", kHyper, so::kBF16, so::kBF16, kManyTiles);
  }

 private:
  template <class F>
  void report(const std::string& name, F&& run) {
    static const char* const places[] = {"aligned", "one element off", "at the end of a page"};
    Bytes first;
    for (int place = 0; place < kPlaces; ++place) {
      const Bytes result = run(Place(place));
      if (place == 0) first = result;
      if (result != first || !intact_) {
        std::printf("FAILED %s %s %s: %s\n", table_.name, name.c_str(), places[place],
                    intact_ ? "other bits than aligned" : "bytes outside the array were written");
        ++failures;
      }
    }
    std::printf("%s %s %s\n", table_.name, name.c_str(), sha256(first).c_str());
  }

  const so::KernelTable& table_;
  bool intact_ = true;
};

// --- Floating-point modes that a caller may have set, and that must neither matter nor be lost
// --------------------------

#if defined(__x86_64__)
std::uint64_t modes() { return _mm_getcsr() & ~0x3Fu; }                          // without the exception flags
void set_hostile_modes() { _mm_setcsr(0x1F80u | 0x8000u | 0x6000u | 0x0040u); }  // flush, round to zero, no denormals
#elif defined(__aarch64__)
std::uint64_t modes() {
  std::uint64_t x;
  asm volatile("mrs %0, fpcr" : "=r"(x));
  return x;
}
void set_hostile_modes() {  // other half precision, one NaN, flush, round to zero
  asm volatile("msr fpcr, %0" : : "r"(std::uint64_t(0x7C00000)));
}
#else
std::uint64_t modes() { return 0; }
void set_hostile_modes() {}
#endif

int sve_bits() {
#ifdef SO_HAVE_SVE
  const int length = prctl(51);  // PR_SVE_GET_VL: bytes and flags
  return length < 0 ? 0 : 8 * (length & 0xFFFF);
#else
  return 0;
#endif
}

void run_all(int argc, char** argv) {
  so::FloatEnvironment environment;
  std::vector<const so::KernelTable*> tables;
  const char* names[16];
  const int count = so::available_isas(names, 16);
#ifdef SO_AVX512_SIMDE
  tables.push_back(so::avx512_table());  // emulated: no CPU feature to ask for
#endif
  for (int i = 0; i < count; ++i) {
    so::force_isa(names[i]);
    tables.push_back(&so::kernels());
  }
  std::printf("isas");
  for (const so::KernelTable* t : tables) std::printf(" %s", t->name);
  std::printf("\nsve_bits %d\n", sve_bits());
  int ran = 0;
  for (const so::KernelTable* t : tables) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], t->name) == 0;
    if (!wanted) continue;
    Runner(*t).all();
    ++ran;
  }
  if (argc > 1 && ran != argc - 1) {
    std::printf("FAILED: an instruction set that was asked for is not there\n");
    ++failures;
  }
  // Does not depend on the instruction set, but is compiled for each processor.
  Bytes totals;
  for (std::uint64_t k = 0; k < kSums; ++k) {
    std::vector<double> partials;
    for (std::size_t i = 0; i < kPartials; ++i)
      partials.push_back(double(so::float_of(draw_f32(draw(kPartial + k, kPartials, i), kNormRange) & 0x7FFFFFFFu)));
    append(totals, so::combine_partials(partials.data(), partials.size()));
  }
  std::printf("any combine/%zu %s\n", kPartials, sha256(totals).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (sha256({'a', 'b', 'c'}) != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad") {
    std::printf("FAILED sha256 of \"abc\"\n");
    return 1;
  }
  set_hostile_modes();
  const std::uint64_t before = modes();
  run_all(argc, argv);
  if (modes() != before) {
    std::printf("FAILED: the caller's floating-point modes were not restored\n");
    ++failures;
  }
  return failures != 0;
}
