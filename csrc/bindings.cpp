// The Python face of the kernels. No arithmetic here; addresses are checked by superoffload.kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <tuple>

#include "kernels.h"
#include "pool.h"
#include "split.h"
#include "undo.h"

void bind_worker(nanobind::module_& m);     // bindings_worker.cpp
void bind_placement(nanobind::module_& m);  // bindings_placement.cpp

namespace nb = nanobind;

namespace {

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

// What superoffload.kernels.arguments.StepArguments holds, in its order.
using StepTuple = std::tuple<double, double, double, double, double, std::int64_t, float, bool, bool>;

struct Step {
  double lr, beta1, beta2, eps, weight_decay;
  std::int64_t step;
  float grad_scale;
  bool decoupled, bias_correction;

  explicit Step(const StepTuple& t) {
    std::tie(lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled, bias_correction) = t;
  }
  so::AdamScalars scalars(float scale) const {
    so::FloatEnvironment environment;  // the caller's rounding mode must not reach the constants
    return so::adam_scalars({lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction}, step, scale);
  }
  so::AdamScalars scalars() const { return scalars(grad_scale); }
};

// Addresses of the arrays of a step, the gradient's and the weights' dtype, and the length: superoffload.kernels'
// PlainArrays and SplitArrays. `from` gives the addresses of a tile.
using PlainTuple =
    std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, int, std::uintptr_t, int, std::size_t>;
struct PlainArrays {
  float *p, *m, *v;
  char *g, *out;
  int grad_dtype, out_dtype;
  std::size_t n;

  explicit PlainArrays(const PlainTuple& t)
      : p(at<float>(std::get<0>(t))),
        m(at<float>(std::get<1>(t))),
        v(at<float>(std::get<2>(t))),
        g(at<char>(std::get<3>(t))),
        out(at<char>(std::get<5>(t))),
        grad_dtype(std::get<4>(t)),
        out_dtype(out ? std::get<6>(t) : int(so::kF32)),
        n(std::get<7>(t)) {}
  PlainArrays from(std::size_t i) const {
    PlainArrays part = *this;
    part.p += i, part.m += i, part.v += i, part.g += i * so::dtype_bytes(grad_dtype);
    if (out) part.out += i * so::dtype_bytes(out_dtype);
    return part;
  }
};

using SplitTuple =
    std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, int, std::size_t>;
struct SplitArrays {
  std::uint16_t *weight, *remainder;
  float *m, *v;
  char* g;
  int grad_dtype;
  std::size_t n;

  explicit SplitArrays(const SplitTuple& t)
      : weight(at<std::uint16_t>(std::get<0>(t))),
        remainder(at<std::uint16_t>(std::get<1>(t))),
        m(at<float>(std::get<2>(t))),
        v(at<float>(std::get<3>(t))),
        g(at<char>(std::get<4>(t))),
        grad_dtype(std::get<5>(t)),
        n(std::get<6>(t)) {}
  SplitArrays from(std::size_t i) const {
    SplitArrays part = *this;
    part.weight += i, part.remainder += i, part.m += i, part.v += i, part.g += i * so::dtype_bytes(grad_dtype);
    return part;
  }
};

// Addresses of a whole record; tile i has its part of each array.
using RecordTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t>;
struct RecordArrays {
  std::uint8_t *low_p, *low_m, *low_v;
  so::Escape* escapes;
  std::uint32_t* counts;

  explicit RecordArrays(const RecordTuple& t)
      : low_p(at<std::uint8_t>(std::get<0>(t))),
        low_m(at<std::uint8_t>(std::get<1>(t))),
        low_v(at<std::uint8_t>(std::get<2>(t))),
        escapes(at<so::Escape>(std::get<3>(t))),
        counts(at<std::uint32_t>(std::get<4>(t))) {}
  so::UndoTile tile(std::size_t i) const {
    const std::size_t from = i * so::kUndoTile;
    return {low_p + from, low_m + from, low_v + from, escapes + i * so::kEscapes, counts + i};
  }
};

// Calls f(tile, first element, elements) for every undo tile of n elements.
template <class F>
void for_each_tile(std::size_t n, int threads, F&& f) {
  shared_pool(threads).for_each_range(n, so::kUndoTile, f, threads);
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

  m.def("adam_scalars", [](const StepTuple& step) {
    const so::AdamScalars s = Step(step).scalars();
    return nb::make_tuple(s.grad_scale, s.one_minus_b1, s.beta2, s.one_minus_b2, s.decay, s.neg_step_size, s.bc2_sqrt,
                          s.eps, s.l2);
  });
  m.def("adam_step", [](const PlainTuple& arrays, const StepTuple& step, int threads) {
    nb::gil_scoped_release release;
    const PlainArrays all(arrays);
    const so::AdamScalars s = Step(step).scalars();
    const so::AdamFn adam = so::kernels().adam[all.grad_dtype][all.out_dtype];
    for_each_tile(all.n, threads, [&](std::size_t, std::size_t from, std::size_t count) {
      const PlainArrays a = all.from(from);
      adam(a.p, a.m, a.v, a.g, a.out, count, s);
    });
  });
  m.attr("UNDO_TILE") = so::kUndoTile;
  m.attr("UNDO_ESCAPES") = so::kEscapes;
  m.def("adam_record", [](const PlainTuple& arrays, const StepTuple& step, const RecordTuple& into, int threads) {
    nb::gil_scoped_release release;
    const PlainArrays all(arrays);
    const RecordArrays record(into);
    const so::AdamScalars s = Step(step).scalars();
    for_each_tile(all.n, threads, [&](std::size_t i, std::size_t from, std::size_t count) {
      const PlainArrays a = all.from(from);
      so::adam_record(a.p, a.m, a.v, a.g, a.grad_dtype, a.out, a.out_dtype, count, s, record.tile(i));
    });
  });
  // new_scale negative: undo only.
  m.def("adam_undo", [](const PlainTuple& arrays, const StepTuple& step, const RecordTuple& from_record,
                        float new_scale, int threads) {
    nb::gil_scoped_release release;
    const PlainArrays all(arrays);
    const RecordArrays record(from_record);
    const so::AdamScalars s = Step(step).scalars(), again = Step(step).scalars(new_scale);
    for_each_tile(all.n, threads, [&](std::size_t i, std::size_t from, std::size_t count) {
      const PlainArrays a = all.from(from);
      const so::UndoTile tile = record.tile(i);
      if (new_scale < 0.0f) {
        so::adam_undo(a.p, a.m, a.v, a.g, a.grad_dtype, a.out, a.out_dtype, count, s, tile);
      } else {
        so::adam_undo_redo(a.p, a.m, a.v, a.g, a.grad_dtype, a.out, a.out_dtype, count, s, again, tile);
      }
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
  m.def("adam_step_split", [](const SplitTuple& arrays, const StepTuple& step, int threads) {
    nb::gil_scoped_release release;
    const SplitArrays all(arrays);
    const so::AdamScalars s = Step(step).scalars();
    for_each_tile(all.n, threads, [&](std::size_t, std::size_t from, std::size_t count) {
      const SplitArrays a = all.from(from);
      so::adam_split(a.weight, a.remainder, a.m, a.v, a.g, a.grad_dtype, count, s);
    });
  });
  m.def("adam_record_split", [](const SplitTuple& arrays, const StepTuple& step, const RecordTuple& into, int threads) {
    nb::gil_scoped_release release;
    const SplitArrays all(arrays);
    const RecordArrays record(into);
    const so::AdamScalars s = Step(step).scalars();
    for_each_tile(all.n, threads, [&](std::size_t i, std::size_t from, std::size_t count) {
      const SplitArrays a = all.from(from);
      so::adam_record_split(a.weight, a.remainder, a.m, a.v, a.g, a.grad_dtype, count, s, record.tile(i));
    });
  });
  // new_scale negative: undo only.
  m.def("adam_undo_split", [](const SplitTuple& arrays, const StepTuple& step, const RecordTuple& from_record,
                              float new_scale, int threads) {
    nb::gil_scoped_release release;
    const SplitArrays all(arrays);
    const RecordArrays record(from_record);
    const so::AdamScalars s = Step(step).scalars(), again = Step(step).scalars(new_scale);
    for_each_tile(all.n, threads, [&](std::size_t i, std::size_t from, std::size_t count) {
      const SplitArrays a = all.from(from);
      const so::UndoTile tile = record.tile(i);
      if (new_scale < 0.0f) {
        so::adam_undo_split(a.weight, a.remainder, a.m, a.v, a.g, a.grad_dtype, count, s, tile);
      } else {
        so::adam_undo_redo_split(a.weight, a.remainder, a.m, a.v, a.g, a.grad_dtype, count, s, again, tile);
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
  m.def("accumulate", [](std::uintptr_t total, std::uintptr_t x, int dtype, std::size_t n, int threads) {
    nb::gil_scoped_release release;
    const so::AccumulateFn accumulate = so::kernels().accumulate[dtype];
    const std::size_t size = so::dtype_bytes(dtype);
    for_each_tile(n, threads, [&](std::size_t, std::size_t from, std::size_t count) {
      accumulate(at<float>(total) + from, at<char>(x) + from * size, count);
    });
  });
  m.def("cast", [](std::uintptr_t src, int sd, std::uintptr_t dst, int dd, std::size_t n, int threads) {
    nb::gil_scoped_release release;
    const so::CastFn cast = so::kernels().cast[sd][dd];
    const std::size_t ss = so::dtype_bytes(sd), ds = so::dtype_bytes(dd);
    for_each_tile(n, threads, [&](std::size_t, std::size_t from, std::size_t count) {
      cast(at<char>(src) + from * ss, at<char>(dst) + from * ds, count);
    });
  });
  // One partial per NORM_CHUNK elements of x, written to `partials` (float64).
  m.def("norm_partials", [](std::uintptr_t x, int dtype, std::size_t n, std::uintptr_t partials, int threads) {
    nb::gil_scoped_release release;
    const so::SumSqFn sum_sq = so::kernels().sum_sq[dtype];
    const std::size_t size = so::dtype_bytes(dtype);
    shared_pool(threads).for_each_range(
        n, so::kNormChunk,
        [&](std::size_t i, std::size_t from, std::size_t count) {
          at<double>(partials)[i] = sum_sq(at<char>(x) + from * size, count);
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
