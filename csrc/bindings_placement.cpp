// The Python face of the pool and of placement; superoffload.engine.placement decides, superoffload.kernels checks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "placement.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

void bind_placement(nb::module_& m) {
  nb::class_<so::Pool>(m, "Pool")
      .def(
          "__init__",
          [](so::Pool* self, int threads, std::vector<int> cores) { new (self) so::Pool(threads, std::move(cores)); },
          "threads"_a, "cores"_a = std::vector<int>())
      .def_prop_ro("threads", &so::Pool::threads)
      .def_prop_ro("cores", &so::Pool::cores)
      .def_prop_ro("bind_error", &so::Pool::bind_error)
      // What a call costs without its work. Nanoseconds of each of `calls` calls over `tiles` empty tiles, `rest_us`
      // apart: threads that had more than the pool's spin to rest are asleep.
      .def("call_ns", [](so::Pool& pool, std::size_t tiles, int calls, int rest_us) {
        nb::gil_scoped_release release;
        std::vector<std::int64_t> taken(static_cast<std::size_t>(calls));
        for (auto& ns : taken) {
          if (rest_us) std::this_thread::sleep_for(std::chrono::microseconds(rest_us));
          const auto begin = std::chrono::steady_clock::now();
          pool.for_each(tiles, [](std::size_t) {});
          ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
        }
        return taken;
      });
  m.def("bind_memory",
        [](std::uintptr_t address, std::size_t bytes, int node) { return so::bind_memory(at(address), bytes, node); });
  m.def("node_of_page", [](std::uintptr_t address) { return so::node_of_page(at(address)); });
  m.def("first_touch", [](std::uintptr_t address, std::size_t bytes, int threads, const std::vector<int>& cores) {
    nb::gil_scoped_release release;
    return so::first_touch(at(address), bytes, threads, cores);
  });
}
