// Where threads run and where pages lie. Linux only; elsewhere every function says ENOSYS and nothing changes.
#pragma once

#include <cstddef>
#include <thread>
#include <vector>

namespace so {

// Each returns 0 or an errno; a caller that is refused goes on unbound.

// The thread may run on these cores and no others.
int bind_thread(std::thread::native_handle_type thread, const std::vector<int>& cores);
void name_thread(std::thread::native_handle_type thread, const char* name);

// Pages of [address, address + bytes) that are not there yet will lie on this NUMA node or nowhere (strict MPOL_BIND:
// under a mere preference pages spill to other nodes, on a GH200 into the GPU's memory). The address must be that of
// a page. A raw system call, since libnuma is not on every machine.
int bind_memory(void* address, std::size_t bytes, int node);

// The node that this page lies on, or -errno.
int node_of_page(void* address);

// Brings all pages of the range into being, as zeros, by `threads` threads on `cores` (empty: anywhere), none of them
// the caller, whose own node must not matter. The memory must be fresh, or hold nothing of worth in the first byte of a
// page. Returns the errno of binding the threads.
int first_touch(void* address, std::size_t bytes, int threads, const std::vector<int>& cores);

}  // namespace so
