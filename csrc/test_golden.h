// What test_golden.cpp makes its cases from: hashes, the inputs of tests/kernels/make_golden.py, and places in memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "scalar_ops.h"

namespace {

using Bytes = std::vector<std::uint8_t>;

// --- SHA-256 (FIPS 180-4) -------------------------------------------------------------------------------------------

std::uint32_t rotate(std::uint32_t x, int n) { return x >> n | x << (32 - n); }

// The first 32 bits of the fractional part of a prime's square or cube root, found in integers.
std::uint32_t root_fraction(std::uint32_t prime, int degree) {
  using Wide = unsigned __int128;
  Wide low = 0, high = Wide(1) << 40;  // of the root times 2^32
  while (high - low > 1) {
    const Wide x = (low + high) / 2;
    const bool below = degree == 2 ? x * x <= Wide(prime) << 64 : x * x * x <= Wide(prime) << 96;
    (below ? low : high) = x;
  }
  return std::uint32_t(low);
}

std::string sha256(Bytes message) {
  static std::uint32_t k[64], initial[8];
  if (!k[0]) {
    int found = 0;
    for (std::uint32_t candidate = 2; found < 64; ++candidate) {
      bool prime = true;
      for (std::uint32_t d = 2; d * d <= candidate; ++d) prime = prime && candidate % d != 0;
      if (!prime) continue;
      k[found] = root_fraction(candidate, 3);
      if (found < 8) initial[found] = root_fraction(candidate, 2);
      ++found;
    }
  }
  const std::uint64_t bits = 8 * std::uint64_t(message.size());
  message.push_back(0x80);
  while (message.size() % 64 != 56) message.push_back(0);
  for (int shift = 56; shift >= 0; shift -= 8) message.push_back(std::uint8_t(bits >> shift));
  std::uint32_t h[8];
  std::memcpy(h, initial, sizeof h);
  for (std::size_t block = 0; block < message.size(); block += 64) {
    std::uint32_t w[64];
    for (int t = 0; t < 16; ++t) {
      const std::uint8_t* b = &message[block + 4 * t];
      w[t] = std::uint32_t(b[0]) << 24 | std::uint32_t(b[1]) << 16 | std::uint32_t(b[2]) << 8 | b[3];
    }
    for (int t = 16; t < 64; ++t) {
      const std::uint32_t s0 = rotate(w[t - 15], 7) ^ rotate(w[t - 15], 18) ^ w[t - 15] >> 3;
      const std::uint32_t s1 = rotate(w[t - 2], 17) ^ rotate(w[t - 2], 19) ^ w[t - 2] >> 10;
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    std::uint32_t s[8];
    std::memcpy(s, h, sizeof s);
    for (int t = 0; t < 64; ++t) {
      const std::uint32_t e = s[4], a = s[0];
      const std::uint32_t t1 =
          s[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + k[t] + w[t];
      const std::uint32_t t2 =
          (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      for (int j = 7; j > 0; --j) s[j] = s[j - 1];
      s[4] += t1;
      s[0] = t1 + t2;
    }
    for (int j = 0; j < 8; ++j) h[j] += s[j];
  }
  char text[65];
  for (int j = 0; j < 8; ++j) std::snprintf(text + 8 * j, 9, "%08x", h[j]);
  return text;
}

// --- Inputs: integers only, so that every machine makes the same ones -----------------------------------------------

enum Stream : std::uint64_t {
  kMaster = 1,
  kExpAvg,
  kExpAvgSq,
  kGradient,
  kCast,
  kNextGradient,
  kNorm = 16,
  kPartial = 32
};
// Sums are taken of this many inputs (streams kNorm, kNorm + 1, ...): another order of addition shows in few of them.
constexpr std::uint64_t kSums = 8;

// Number i of a stream: SplitMix64's output function over a counter.
std::uint64_t draw(std::uint64_t stream, std::uint64_t n, std::uint64_t i) {
  std::uint64_t z = (stream << 32) + n + (i + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Biased exponents of the ordinary (three fifths) and of the wide (a quarter) values; the rest are zeros and denormals.
struct Range {
  std::uint32_t low, count, wide_low, wide_count;
};
constexpr Range kMasterRange{119, 8, 1, 146}, kExpAvgRange{107, 16, 1, 136}, kExpAvgSqRange{87, 32, 1, 146},
    kGradientRange{115, 14, 1, 156}, kNormRange{115, 14, 100, 33};

std::uint32_t draw_f32(std::uint64_t u, const Range& r) {
  const std::uint32_t kind = u >> 56 & 127, sign = std::uint32_t(u >> 63) << 31, mantissa = u & 0x7FFFFF;
  const std::uint32_t spread = std::uint32_t(u >> 24);
  if (kind < 8) return sign;
  if (kind < 16) return sign | mantissa;
  if (kind < 48) return sign | (r.wide_low + spread % r.wide_count) << 23 | mantissa;
  return sign | (r.low + spread % r.count) << 23 | mantissa;
}

// Any finite fp16, zeros and denormals more often than chance has it.
std::uint16_t draw_f16(std::uint64_t u) {
  const std::uint32_t kind = u >> 56 & 127, sign = std::uint32_t(u >> 63) << 15, mantissa = u & 0x3FF;
  const std::uint32_t spread = std::uint32_t(u >> 24);
  if (kind < 8) return std::uint16_t(sign);
  if (kind < 16) return std::uint16_t(sign | mantissa);
  return std::uint16_t(sign | (1 + spread % 30) << 10 | mantissa);
}

// Sources of casts: everything there is, and the places where rounding may go wrong more often.
std::uint32_t draw_cast_f32(std::uint64_t u) {
  const std::uint32_t kind = u >> 56 & 127, raw = std::uint32_t(u);
  const std::uint32_t spread = std::uint32_t(u >> 32) & 0xFFFFFF;
  const std::uint32_t sign = raw & 0x80000000u, mantissa = raw & 0x7FFFFF;
  if (kind < 2) return sign | 0x7F800000u;                                                  // infinity
  if (kind < 4) return sign | 0x7F800000u | (mantissa & 0x1FFF) | 1;                        // NaN in the lost bits only
  if (kind < 8) return sign | 0x7F800000u | mantissa;                                       // NaN
  if (kind < 12) return sign;                                                               // zero
  if (kind < 20) return sign | mantissa;                                                    // denormal of fp32 and bf16
  if (kind < 36) return sign | (101 + spread % 44) << 23 | (mantissa & 0x7FE000) | 0x1000;  // half-way between two fp16
  if (kind < 52) return (raw & 0xFFFF0000u) | 0x8000;                                       // half-way between two bf16
  if (kind < 68) return sign | (101 + spread % 13) << 23 | mantissa;                        // denormal of fp16
  if (kind < 76) return sign | 142 << 23 | 0x7FC000 | (mantissa & 0x3FFF);                  // where fp16 overflows
  if (kind < 84) return sign | 0x7F7F0000u | (mantissa & 0xFFFF);                           // where bf16 overflows
  return raw;
}

std::uint16_t draw_cast_16(std::uint64_t u, std::uint32_t exponent_bits) {
  const std::uint32_t kind = u >> 56 & 127, raw = std::uint32_t(u) & 0xFFFF;
  if (kind < 8) return std::uint16_t(raw | exponent_bits);    // infinities and NaN
  if (kind < 16) return std::uint16_t(raw & ~exponent_bits);  // zeros and denormals
  return std::uint16_t(raw);
}

template <class T>
void append(Bytes& to, T x) {
  std::uint8_t raw[sizeof(T)];
  std::memcpy(raw, &x, sizeof(T));
  to.insert(to.end(), raw, raw + sizeof(T));
}

Bytes make_f32(std::uint64_t stream, std::size_t n, const Range& r, std::uint32_t keep = 0xFFFFFFFFu) {
  Bytes x;
  for (std::size_t i = 0; i < n; ++i) append(x, draw_f32(draw(stream, n, i), r) & keep);
  return x;
}

// Finite values in the storage of a dtype; bf16 is the upper half of the fp32.
Bytes make_finite(std::uint64_t stream, std::size_t n, int dtype, const Range& r) {
  Bytes x;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t u = draw(stream, n, i);
    if (dtype == so::kF32) append(x, draw_f32(u, r));
    if (dtype == so::kBF16) append(x, std::uint16_t(draw_f32(u, r) >> 16));
    if (dtype == so::kF16) append(x, draw_f16(u));
  }
  return x;
}

Bytes make_cast(std::size_t n, int dtype) {
  Bytes x;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t u = draw(kCast, n, i);
    if (dtype == so::kF32) append(x, draw_cast_f32(u));
    if (dtype == so::kBF16) append(x, draw_cast_16(u, 0x7F80));
    if (dtype == so::kF16) append(x, draw_cast_16(u, 0x7C00));
  }
  return x;
}

// --- Places ---------------------------------------------------------------------------------------------------------

enum Place { kAligned, kOneOff, kAtPageEnd, kPlaces };

// One array between guard bytes, or directly before a page without access.
class Placed {
 public:
  Placed(const Bytes& content, std::size_t element, Place place) : size_(content.size()) {
    const std::size_t page = std::size_t(sysconf(_SC_PAGESIZE));
    const std::size_t room = (size_ + 2 * kGuard + page - 1) / page * page;
    mapped_ = room + page;
    base_ =
        static_cast<std::uint8_t*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + room, page, PROT_NONE) != 0) {
      std::perror("mmap");
      std::exit(1);
    }
    std::memset(base_, kFill, room);
    end_ = base_ + room;
    data_ = place == kAtPageEnd ? end_ - size_ : base_ + kGuard + (place == kOneOff ? element : 0);
    if (size_) std::memcpy(data_, content.data(), size_);
  }
  ~Placed() { munmap(base_, mapped_); }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

  template <class T = void>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  void take(Bytes& into) const { into.insert(into.end(), data_, data_ + size_); }
  bool guards_intact() const {
    for (const std::uint8_t* b = base_; b < data_; ++b)
      if (*b != kFill) return false;
    for (const std::uint8_t* b = data_ + size_; b < end_; ++b)
      if (*b != kFill) return false;
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 256;
  static constexpr std::uint8_t kFill = 0xA5;
  std::uint8_t *base_, *data_, *end_;
  std::size_t size_, mapped_;
};

}  // namespace
