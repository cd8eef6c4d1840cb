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
#include <emmintrin.h>
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
    for (; left >= kLine; to += kLine, from += kLine, left -= kLine) {
      for (std::size_t b = 0; b < kLine; b += sizeof(__m128i)) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + b),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + b)));
      }
    }
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
  alignas(64) std::uint8_t buffer_[kStreamsLines && Size > 0 ? kStagedBlock * Size : 1];
};

}  // namespace
}  // namespace so
