#include "placement.h"

#include <cerrno>

#include "pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace so {
namespace {

constexpr std::size_t kTouchTile = std::size_t(4) << 20;  // a few huge pages, as an Adam tile's arrays are near it

}  // namespace

#if defined(__linux__)

int bind_thread(std::thread::native_handle_type thread, const std::vector<int>& cores) {
  int last = -1;
  for (int core : cores) {
    if (core < 0) return EINVAL;
    if (core > last) last = core;
  }
  if (last < 0) return EINVAL;
  const std::size_t size = CPU_ALLOC_SIZE(last + 1);  // a fixed cpu_set_t ends at 1,024 cores
  cpu_set_t* set = CPU_ALLOC(last + 1);
  if (!set) return ENOMEM;
  CPU_ZERO_S(size, set);
  for (int core : cores) CPU_SET_S(std::size_t(core), size, set);
  const int error = pthread_setaffinity_np(thread, size, set);
  CPU_FREE(set);
  return error;
}

void name_thread(std::thread::native_handle_type thread, const char* name) { pthread_setname_np(thread, name); }

int bind_memory(void* address, std::size_t bytes, int node) {
  constexpr int kBind = 2;  // MPOL_BIND of <numaif.h>, which belongs to libnuma
  constexpr int kBitsPerWord = int(8 * sizeof(unsigned long));
  if (node < 0) return EINVAL;
  std::vector<unsigned long> mask(std::size_t(node / kBitsPerWord + 1), 0);
  mask[std::size_t(node / kBitsPerWord)] = 1ul << (node % kBitsPerWord);
  // The kernel reads one bit less than it is told.
  const unsigned long bits = mask.size() * std::size_t(kBitsPerWord) + 1;
  return syscall(SYS_mbind, address, bytes, kBind, mask.data(), bits, 0u) == 0 ? 0 : errno;
}

int node_of_page(void* address) {
  constexpr unsigned kNode = 1, kAddress = 2;  // MPOL_F_NODE, MPOL_F_ADDR
  int node = -1;
  if (syscall(SYS_get_mempolicy, &node, nullptr, 0ul, address, kNode | kAddress) != 0) return -errno;
  return node;
}

#else

int bind_thread(std::thread::native_handle_type, const std::vector<int>&) { return ENOSYS; }
void name_thread(std::thread::native_handle_type, const char*) {}
int bind_memory(void*, std::size_t, int) { return ENOSYS; }
int node_of_page(void*) { return -ENOSYS; }

#endif

int first_touch(void* address, std::size_t bytes, int threads, const std::vector<int>& cores) {
  constexpr std::size_t kPage = 4096;  // the smallest there is; touching a larger page again costs nothing
  int error = 0;
  std::thread([&] {
    Pool pool(threads, cores);
    error = pool.bind_error();
#if defined(__linux__)
    if (!cores.empty()) {
      const int own = bind_thread(pthread_self(), cores);
      if (own) error = own;
    }
#endif
    auto* first = static_cast<volatile char*>(address);
    pool.for_each((bytes + kTouchTile - 1) / kTouchTile, [&](std::size_t tile) {
      const std::size_t from = tile * kTouchTile, to = bytes - from < kTouchTile ? bytes : from + kTouchTile;
      for (std::size_t i = from; i < to; i += kPage) first[i] = 0;
    });
  }).join();
  return error;
}

}  // namespace so
