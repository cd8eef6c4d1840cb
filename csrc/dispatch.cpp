// Chooses the instruction set once, and holds what does not depend on it.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#if defined(SO_HAVE_SVE)
#include <sys/auxv.h>
#endif

namespace so {
namespace {

// Tables this CPU can run, best first.
std::vector<const KernelTable*> usable_tables() {
  std::vector<const KernelTable*> tables;
#if defined(SO_HAVE_AVX2) || defined(SO_HAVE_AVX512)
  __builtin_cpu_init();  // asks the operating system too: the wide registers must survive a context switch
#endif
#ifdef SO_HAVE_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    tables.push_back(avx512_table());
#endif
#ifdef SO_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    tables.push_back(avx2_table());
#endif
#ifdef SO_HAVE_SVE
  constexpr unsigned long kHwcapSve = 1ul << 22;  // HWCAP_SVE of the Linux ABI; old headers lack the name
  if (getauxval(AT_HWCAP) & kHwcapSve) tables.push_back(sve_table());
#endif
#ifdef SO_HAVE_NEON
  tables.push_back(neon_table());
#endif
  tables.push_back(scalar_table());
  return tables;
}

const std::vector<const KernelTable*>& tables() {
  static const auto* list = new std::vector<const KernelTable*>(usable_tables());
  return *list;
}

const KernelTable* find(const char* name) {
  for (const KernelTable* t : tables())
    if (std::strcmp(t->name, name) == 0) return t;
  return nullptr;
}

std::atomic<const KernelTable*>& active() {
  static std::atomic<const KernelTable*> table{[] {
    const char* wanted = std::getenv("SUPEROFFLOAD_ISA");
    const KernelTable* t = wanted ? find(wanted) : nullptr;
    if (wanted && !t && std::strcmp(wanted, "auto") != 0)
      std::fprintf(stderr, "superoffload: SUPEROFFLOAD_ISA=%s is not to be had here; using %s\n", wanted,
                   tables().front()->name);
    return t ? t : tables().front();
  }()};
  return table;
}

// x^n by squaring in double: the same bits everywhere, unlike libm's pow.
double power(double x, std::int64_t n) {
  double result = 1.0;
  for (; n > 0; n >>= 1) {
    if (n & 1) result *= x;
    x *= x;
  }
  return result;
}

}  // namespace

const KernelTable& kernels() { return *active().load(std::memory_order_acquire); }

bool force_isa(const char* name) {
  const KernelTable* t = std::strcmp(name, "auto") == 0 ? tables().front() : find(name);
  if (t) active().store(t, std::memory_order_release);
  return t != nullptr;
}

int available_isas(const char** names, int capacity) {
  int n = 0;
  for (const KernelTable* t : tables())
    if (n < capacity) names[n++] = t->name;
  return n;
}

double combine_partials(const double* partials, std::size_t n) {
  std::vector<double> lanes(kCombineLanes, 0.0);
  for (std::size_t base = 0; base < n; base += kCombineLanes) {
    const std::size_t width = n - base < kCombineLanes ? n - base : kCombineLanes;
    for (std::size_t l = 0; l < width; ++l) lanes[l] += partials[base + l];
  }
  for (std::size_t half = kCombineLanes / 2; half > 0; half /= 2)
    for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

AdamScalars adam_scalars(const AdamHyper& h, std::int64_t t, float grad_scale) {
  const double bc1 = h.bias_correction ? 1.0 - power(h.beta1, t) : 1.0;
  const double bc2 = h.bias_correction ? 1.0 - power(h.beta2, t) : 1.0;
  AdamScalars s;
  s.grad_scale = grad_scale;
  s.one_minus_b1 = float(1.0 - h.beta1);
  s.beta2 = float(h.beta2);
  s.one_minus_b2 = float(1.0 - h.beta2);
  s.decay = h.decoupled ? float(1.0 - h.lr * h.weight_decay) : 1.0f;
  s.neg_step_size = float(-(h.lr / bc1));
  s.bc2_sqrt = float(std::sqrt(bc2));
  s.eps = float(h.eps);
  s.l2 = h.decoupled ? 0.0f : float(h.weight_decay);
  return s;
}

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
FloatEnvironment::FloatEnvironment() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" : : "r"(std::uint64_t(0)));
}
FloatEnvironment::~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
FloatEnvironment::FloatEnvironment() : saved_(0) {}
FloatEnvironment::~FloatEnvironment() {}
#endif

}  // namespace so
