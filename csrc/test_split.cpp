// The split master on every instruction set that the dispatcher finds, without Python, so that it can be built for any
// processor and run under an emulator; tests/kernels/test_split.py does. Prints one line for each set, and FAILED
// lines.
#include <cstdio>
#include <cstring>
#include <vector>

#include "split.h"

namespace {

std::uint32_t draw(std::uint32_t& state) {  // xorshift
  state ^= state << 13;
  state ^= state >> 17;
  return state ^= state << 5;
}

// Finite, of any size that a master may have; every fourth a tie of bf16.
float master(std::uint32_t& state) {
  const std::uint32_t raw = draw(state), exponent = 100 + draw(state) % 30;
  const std::uint32_t u = (raw & 0x807FFFFFu) | exponent << 23, tie = (u & 0xFFFF0000u) | 0x8000u;
  const std::uint32_t bits = draw(state) % 4 ? u : tie;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Three steps of both layouts from the same start, `skip` elements off an aligned address.
bool steps_agree(std::size_t n, std::size_t skip, int grad_dtype) {
  const so::KernelTable& k = so::kernels();
  std::uint32_t state = 12345;
  const std::size_t all = n + skip;
  std::vector<float> p(all), m(all), v(all), g(all);
  for (std::size_t i = 0; i < all; ++i) {
    p[i] = master(state);
    m[i] = master(state) * 1e-3f;
    v[i] = m[i] * m[i];
    g[i] = master(state) * 1e-2f;
  }
  std::vector<std::uint16_t> g16(all), out(all), weight(all), remainder(all);
  if (grad_dtype != so::kF32) k.cast[so::kF32][grad_dtype](g.data(), g16.data(), all);
  const void* gradient = g16.data() + skip;
  if (grad_dtype == so::kF32) gradient = g.data() + skip;
  std::vector<float> m2 = m, v2 = v, joined(p), plain_v(v);
  so::split(p.data() + skip, weight.data() + skip, remainder.data() + skip, v2.data() + skip, n);
  bool equal = true;
  for (std::int64_t t = 1; t <= 3; ++t) {
    const so::AdamScalars s = so::adam_scalars({t == 1 ? 0.0 : 1e-3, 0.9, 0.99, 1e-8, 0.1}, t, 0.5f);  // ties stay once
    k.adam[grad_dtype][so::kBF16](p.data() + skip, m.data() + skip, v.data() + skip, gradient, out.data() + skip, n, s);
    so::adam_split(weight.data() + skip, remainder.data() + skip, m2.data() + skip, v2.data() + skip, gradient,
                   grad_dtype, n, s);
    so::join(weight.data() + skip, remainder.data() + skip, v2.data() + skip, joined.data() + skip,
             plain_v.data() + skip, n);
    equal = equal && same(p, joined) && same(v, plain_v) && same(m, m2) && out == weight;
  }
  return equal;
}

}  // namespace

int main() {
  const char* names[16];
  const int count = so::available_isas(names, 16);
  bool good = true;
  for (int i = 0; i < count; ++i) {
    so::force_isa(names[i]);
    std::size_t failures = 0;
    for (std::uint32_t upper = 0; upper < 0x10000u;
         upper += upper % 0x7F80u < 3u || upper % 0x7F80u > 0x7F7Cu ? 1 : 257)
      failures += so::split_failures(upper);
    if (failures) std::printf("FAILED %s: %zu masters do not come back\n", names[i], failures);
    good = good && failures == 0;
    for (std::size_t n : {1, 3, 7, 8, 9, 31, 511, 512, 513, 1300})
      for (std::size_t skip : {0, 1, 3})
        for (int dtype = 0; dtype < so::kDTypes; ++dtype)
          if (!steps_agree(n, skip, dtype)) {
            std::printf("FAILED %s: %zu elements, %zu off, gradient %d\n", names[i], n, skip, dtype);
            good = false;
          }
    std::printf("%s\n", names[i]);
  }
  return good ? 0 : 1;
}
