// The Python face of the kernels. No arithmetic here; addresses are checked by superoffload.kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "kernels.h"
#include "pool.h"
#include "split.h"
#include "undo.h"

void bind_worker(nanobind::module_& m);     // bindings_worker.cpp
void bind_placement(nanobind::module_& m);  // bindings_placement.cpp

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::size_t kTile = 16384;

std::mutex shared_mutex;
std::vector<int> shared_cores;

// Shared by the stand-alone kernel calls; replaced by a larger one when more threads are asked for, and when its cores
// change. Never destroyed: its threads may outlive static destruction.
so::Pool& shared_pool(int threads) {
  static so::Pool* pool = nullptr;
  static int process = 0;
  std::lock_guard<std::mutex> lock(shared_mutex);
  if (!pool || pool->threads() < threads || process != int(getpid()) || pool->cores() != shared_cores)
    pool = new so::Pool(threads, shared_cores);  // not after a fork
  process = int(getpid());
  return *pool;
}

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

so::AdamScalars scalars_of(double lr, double b1, double b2, double eps, double wd, std::int64_t t, float scale) {
  so::FloatEnvironment environment;  // the caller's rounding mode must not reach the constants
  return so::adam_scalars({lr, b1, b2, eps, wd}, t, scale);
}

// Addresses of a whole record; tile i has its part of each array.
struct RecordArrays {
  std::uintptr_t low_p, low_m, low_v, escapes, counts;

  so::UndoTile tile(std::size_t i) const {
    const std::size_t from = i * so::kUndoTile;
    return {at<std::uint8_t>(low_p) + from, at<std::uint8_t>(low_m) + from, at<std::uint8_t>(low_v) + from,
            at<so::Escape>(escapes) + i * so::kEscapes, at<std::uint32_t>(counts) + i};
  }
};

// Calls f(tile, first element, elements) for every undo tile of n elements.
template <class F>
void for_each_tile(std::size_t n, int threads, F&& f) {
  shared_pool(threads).for_each((n + so::kUndoTile - 1) / so::kUndoTile,
                                [&](std::size_t i) {
                                  const std::size_t from = i * so::kUndoTile, left = n - from;
                                  f(i, from, left < so::kUndoTile ? left : so::kUndoTile);
                                },
                                threads);
}

}  // namespace

NB_MODULE(_kernels, m) {
  nb::set_leak_warnings(false);  // an optimizer that lives until the interpreter exits is no leak
  m.attr("NORM_CHUNK") = so::kNormChunk;
  m.attr("NORM_LANES") = so::kNormLanes;
  m.attr("COMBINE_LANES") = so::kCombineLanes;

  m.def("isas", [] {
    const char* names[16];
    const int n = so::available_isas(names, 16);
    return std::vector<std::string>(names, names + n);
  });
  m.def("active_isa", [] { return std::string(so::kernels().name); });
  m.def("force_isa", [](const std::string& name) { return so::force_isa(name.c_str()); });

  m.def("adam_scalars", [](double lr, double b1, double b2, double eps, double wd, std::int64_t t, float scale) {
    const so::AdamScalars s = scalars_of(lr, b1, b2, eps, wd, t, scale);
    return nb::make_tuple(s.grad_scale, s.one_minus_b1, s.beta2, s.one_minus_b2, s.decay, s.neg_step_size, s.bc2_sqrt,
                          s.eps);
  });
  m.def("adam_step", [](std::uintptr_t p, std::uintptr_t mm, std::uintptr_t v, std::uintptr_t g, int grad_dtype,
                        std::uintptr_t out, int out_dtype, std::size_t n, double lr, double b1, double b2, double eps,
                        double wd, std::int64_t t, float scale, int threads) {
    nb::gil_scoped_release release;
    const so::AdamScalars s = scalars_of(lr, b1, b2, eps, wd, t, scale);
    const so::AdamFn adam = so::kernels().adam[grad_dtype][out ? out_dtype : int(so::kF32)];
    const std::size_t gs = so::dtype_bytes(grad_dtype), os = so::dtype_bytes(out_dtype);
    shared_pool(threads).for_each((n + kTile - 1) / kTile,
                                  [&](std::size_t i) {
                                    const std::size_t from = i * kTile, count = n - from < kTile ? n - from : kTile;
                                    adam(at<float>(p) + from, at<float>(mm) + from, at<float>(v) + from,
                                         at<char>(g) + from * gs, out ? at<char>(out) + from * os : nullptr, count, s);
                                  },
                                  threads);
  });
  m.attr("UNDO_TILE") = so::kUndoTile;
  m.attr("UNDO_ESCAPES") = so::kEscapes;
  m.def("adam_record", [](std::uintptr_t p, std::uintptr_t mm, std::uintptr_t v, std::uintptr_t g, int grad_dtype,
                          std::uintptr_t out, int out_dtype, std::size_t n, double lr, double b1, double b2, double eps,
                          double wd, std::int64_t t, float scale, std::uintptr_t low_p, std::uintptr_t low_m,
                          std::uintptr_t low_v, std::uintptr_t escapes, std::uintptr_t counts, int threads) {
    nb::gil_scoped_release release;
    const so::AdamScalars s = scalars_of(lr, b1, b2, eps, wd, t, scale);
    const RecordArrays record{low_p, low_m, low_v, escapes, counts};
    const std::size_t gs = so::dtype_bytes(grad_dtype), os = so::dtype_bytes(out_dtype);
    for_each_tile(n, threads, [&](std::size_t i, std::size_t from, std::size_t count) {
      so::adam_record(at<float>(p) + from, at<float>(mm) + from, at<float>(v) + from, at<char>(g) + from * gs,
                      grad_dtype, out ? at<char>(out) + from * os : nullptr, out_dtype, count, s, record.tile(i));
    });
  });
  m.def("adam_stream",
        [](std::uintptr_t p, std::uintptr_t mm, std::uintptr_t v, std::uintptr_t g, std::size_t n, int threads) {
          nb::gil_scoped_release release;
          const so::KernelTable& k = so::kernels();
          for_each_tile(n, threads, [&](std::size_t, std::size_t from, std::size_t count) {
            k.stream(at<float>(p) + from, at<float>(mm) + from, at<float>(v) + from, at<float>(g) + from, count);
          });
        });
  // new_scale negative: undo only.
  m.def("adam_undo",
        [](std::uintptr_t p, std::uintptr_t mm, std::uintptr_t v, std::uintptr_t g, int grad_dtype, std::uintptr_t out,
           int out_dtype, std::size_t n, double lr, double b1, double b2, double eps, double wd, std::int64_t t,
           float scale, std::uintptr_t low_p, std::uintptr_t low_m, std::uintptr_t low_v, std::uintptr_t escapes,
           std::uintptr_t counts, float new_scale, int threads) {
          nb::gil_scoped_release release;
          const so::AdamScalars s = scalars_of(lr, b1, b2, eps, wd, t, scale);
          const so::AdamScalars redo = scalars_of(lr, b1, b2, eps, wd, t, new_scale);
          const RecordArrays record{low_p, low_m, low_v, escapes, counts};
          const std::size_t gs = so::dtype_bytes(grad_dtype), os = so::dtype_bytes(out_dtype);
          for_each_tile(n, threads, [&](std::size_t i, std::size_t from, std::size_t count) {
            float *pp = at<float>(p) + from, *pm = at<float>(mm) + from, *pv = at<float>(v) + from;
            const void* pg = at<char>(g) + from * gs;
            void* po = out ? at<char>(out) + from * os : nullptr;
            if (new_scale < 0.0f) {
              so::adam_undo(pp, pm, pv, pg, grad_dtype, po, out_dtype, count, s, record.tile(i));
            } else {
              so::adam_undo_redo(pp, pm, pv, pg, grad_dtype, po, out_dtype, count, s, redo, record.tile(i));
            }
          });
        });
  m.def("adam_step_split", [](std::uintptr_t weight, std::uintptr_t remainder, std::uintptr_t mm, std::uintptr_t v,
                              std::uintptr_t g, int grad_dtype, std::size_t n, double lr, double b1, double b2,
                              double eps, double wd, std::int64_t t, float scale, int threads) {
    nb::gil_scoped_release release;
    const so::AdamScalars s = scalars_of(lr, b1, b2, eps, wd, t, scale);
    const std::size_t gs = so::dtype_bytes(grad_dtype);
    for_each_tile(n, threads, [&](std::size_t, std::size_t from, std::size_t count) {
      so::adam_split(at<std::uint16_t>(weight) + from, at<std::uint16_t>(remainder) + from, at<float>(mm) + from,
                     at<float>(v) + from, at<char>(g) + from * gs, grad_dtype, count, s);
    });
  });
  m.def("adam_record_split", [](std::uintptr_t weight, std::uintptr_t remainder, std::uintptr_t mm, std::uintptr_t v,
                                std::uintptr_t g, int grad_dtype, std::size_t n, double lr, double b1, double b2,
                                double eps, double wd, std::int64_t t, float scale, std::uintptr_t low_p,
                                std::uintptr_t low_m, std::uintptr_t low_v, std::uintptr_t escapes,
                                std::uintptr_t counts, int threads) {
    nb::gil_scoped_release release;
    const so::AdamScalars s = scalars_of(lr, b1, b2, eps, wd, t, scale);
    const RecordArrays record{low_p, low_m, low_v, escapes, counts};
    const std::size_t gs = so::dtype_bytes(grad_dtype);
    for_each_tile(n, threads, [&](std::size_t i, std::size_t from, std::size_t count) {
      so::adam_record_split(at<std::uint16_t>(weight) + from, at<std::uint16_t>(remainder) + from, at<float>(mm) + from,
                            at<float>(v) + from, at<char>(g) + from * gs, grad_dtype, count, s, record.tile(i));
    });
  });
  // new_scale negative: undo only.
  m.def("adam_undo_split",
        [](std::uintptr_t weight, std::uintptr_t remainder, std::uintptr_t mm, std::uintptr_t v, std::uintptr_t g,
           int grad_dtype, std::size_t n, double lr, double b1, double b2, double eps, double wd, std::int64_t t,
           float scale, std::uintptr_t low_p, std::uintptr_t low_m, std::uintptr_t low_v, std::uintptr_t escapes,
           std::uintptr_t counts, float new_scale, int threads) {
          nb::gil_scoped_release release;
          const so::AdamScalars s = scalars_of(lr, b1, b2, eps, wd, t, scale);
          const so::AdamScalars redo = scalars_of(lr, b1, b2, eps, wd, t, new_scale);
          const RecordArrays record{low_p, low_m, low_v, escapes, counts};
          const std::size_t gs = so::dtype_bytes(grad_dtype);
          for_each_tile(n, threads, [&](std::size_t i, std::size_t from, std::size_t count) {
            std::uint16_t *pw = at<std::uint16_t>(weight) + from, *pr = at<std::uint16_t>(remainder) + from;
            float *pm = at<float>(mm) + from, *pv = at<float>(v) + from;
            const void* pg = at<char>(g) + from * gs;
            if (new_scale < 0.0f) {
              so::adam_undo_split(pw, pr, pm, pv, pg, grad_dtype, count, s, record.tile(i));
            } else {
              so::adam_undo_redo_split(pw, pr, pm, pv, pg, grad_dtype, count, s, redo, record.tile(i));
            }
          });
        });
  m.def("split", [](std::uintptr_t p, std::uintptr_t weight, std::uintptr_t remainder, std::uintptr_t v, std::size_t n,
                    int threads) {
    nb::gil_scoped_release release;
    for_each_tile(n, threads, [&](std::size_t, std::size_t from, std::size_t count) {
      so::split(at<float>(p) + from, at<std::uint16_t>(weight) + from, at<std::uint16_t>(remainder) + from,
                at<float>(v) + from, count);
    });
  });
  m.def("join", [](std::uintptr_t weight, std::uintptr_t remainder, std::uintptr_t v, std::uintptr_t p,
                   std::uintptr_t plain_v, std::size_t n, int threads) {
    nb::gil_scoped_release release;
    for_each_tile(n, threads, [&](std::size_t, std::size_t from, std::size_t count) {
      so::join(at<std::uint16_t>(weight) + from, at<std::uint16_t>(remainder) + from, at<float>(v) + from,
               at<float>(p) + from, at<float>(plain_v) + from, count);
    });
  });
  m.def("any_sign", [](std::uintptr_t x, std::size_t n) {
    nb::gil_scoped_release release;
    return so::any_sign(at<float>(x), n);
  });
  // Of the fp32 whose upper half is in [first, first + count): how many the split layout does not hold exactly.
  m.def("split_failures", [](std::uint32_t first, std::uint32_t count, int threads) {
    nb::gil_scoped_release release;
    std::atomic<std::size_t> failures{0};
    shared_pool(threads).for_each(
        count, [&](std::size_t i) { failures += so::split_failures(first + std::uint32_t(i)); }, threads);
    return failures.load();
  });
  m.def("cast", [](std::uintptr_t src, int sd, std::uintptr_t dst, int dd, std::size_t n, int threads) {
    nb::gil_scoped_release release;
    const so::CastFn cast = so::kernels().cast[sd][dd];
    const std::size_t ss = so::dtype_bytes(sd), ds = so::dtype_bytes(dd);
    shared_pool(threads).for_each((n + kTile - 1) / kTile,
                                  [&](std::size_t i) {
                                    const std::size_t from = i * kTile, count = n - from < kTile ? n - from : kTile;
                                    cast(at<char>(src) + from * ss, at<char>(dst) + from * ds, count);
                                  },
                                  threads);
  });
  // One partial per NORM_CHUNK elements of x, written to `partials` (float64).
  m.def("norm_partials", [](std::uintptr_t x, int dtype, std::size_t n, std::uintptr_t partials, int threads) {
    nb::gil_scoped_release release;
    const so::SumSqFn sum_sq = so::kernels().sum_sq[dtype];
    const std::size_t size = so::dtype_bytes(dtype);
    shared_pool(threads).for_each((n + so::kNormChunk - 1) / so::kNormChunk,
                                  [&](std::size_t i) {
                                    const std::size_t from = i * so::kNormChunk, left = n - from;
                                    at<double>(partials)[i] = sum_sq(at<char>(x) + from * size,
                                                                     left < so::kNormChunk ? left : so::kNormChunk);
                                  },
                                  threads);
  });
  m.def("combine_partials", [](std::uintptr_t partials, std::size_t n) {
    nb::gil_scoped_release release;
    return so::combine_partials(at<const double>(partials), n);
  });

  // From now on; 0, or the errno of a trial, and then nothing changes.
  m.def("bind_cores", [](std::vector<int> cores) {
    if (!cores.empty()) {
      const so::Pool trial(2, cores);
      if (trial.bind_error()) return trial.bind_error();
    }
    std::lock_guard<std::mutex> lock(shared_mutex);
    shared_cores = std::move(cores);
    return 0;
  });

  bind_worker(m);
  bind_placement(m);
}
