// Memory that a kernel only writes. An ordinary store makes an x86 core read the line first, a non-temporal one of the
// whole line does not: results are collected in the first-level cache and copied out line by line. Arm cores notice by
// themselves that lines are written whole, and need none of it.
//
// In an unnamed namespace for the reason that scalar_ops.h gives.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace so {
namespace {

#if defined(__x86_64__)
constexpr bool kStreamsLines = true;
#else
constexpr bool kStreamsLines = false;
#endif

constexpr std::size_t kStagedBlock = 512;  // elements collected at a time

// Place for what kStagedBlock elements write, `Size` bytes each.
template <std::size_t Size>
class Staged {
 public:
  // Where to write the results of a block that belong at `destination`.
  void* place(void* destination) { return kStreamsLines && Size > 0 ? buffer_ : destination; }

  // Copies them there. A line that the block has only a part of is written as usual, since its neighbours are too.
  void flush([[maybe_unused]] void* destination, [[maybe_unused]] std::size_t elements) const {
#if defined(__x86_64__)
    std::uint8_t* to = static_cast<std::uint8_t*>(destination);
    const std::uint8_t* from = buffer_;
    std::size_t left = elements * Size;
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLine;
    if (head && left) {
      const std::size_t part = head < left ? head : left;
      std::memcpy(to, from, part);
      to += part, from += part, left -= part;
    }
    for (; left >= kLine; to += kLine, from += kLine, left -= kLine) stream_line(to, from);
    if (left) std::memcpy(to, from, left);
#endif
  }

  // Non-temporal stores are not ordered before what this thread writes next, such as that it is done.
  static void fence() {
#if defined(__x86_64__)
    if constexpr (Size > 0) _mm_sfence();
#endif
  }

 private:
  static constexpr std::size_t kLine = 64;

#if defined(__AVX512F__)
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
#elif defined(__AVX__)
  static void stream_line(void* to, const void* from) {
    __m256i* line = static_cast<__m256i*>(to);
    const __m256i* x = static_cast<const __m256i*>(from);
    _mm256_stream_si256(line, _mm256_loadu_si256(x));
    _mm256_stream_si256(line + 1, _mm256_loadu_si256(x + 1));
  }
#elif defined(__x86_64__)
  static void stream_line(void* to, const void* from) {
    __m128i* line = static_cast<__m128i*>(to);
    const __m128i* x = static_cast<const __m128i*>(from);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(line + i, _mm_loadu_si128(x + i));
  }
#endif

  alignas(64) std::uint8_t buffer_[kStreamsLines && Size > 0 ? kStagedBlock * Size : 1];
};

}  // namespace
}  // namespace so
