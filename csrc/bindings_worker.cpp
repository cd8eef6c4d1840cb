// The Python face of the optimizer's worker.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "worker.h"

namespace nb = nanobind;

namespace {

constexpr int kSliceMs = 100;

// Waits in slices, so that Ctrl-C reaches a waiting main thread. What is there already is found without giving Python's
// lock away: beside a thread that runs Python it would take a switch interval to get it back.
template <class F>
void wait(F&& arrived_within) {
  if (arrived_within(0)) return;
  for (;;) {
    bool done;
    {
      nb::gil_scoped_release release;
      done = arrived_within(kSliceMs);
    }
    if (done) return;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

}  // namespace

void bind_worker(nb::module_& m) {
  m.attr("UNDO_ESCAPE_BYTES") = sizeof(so::Escape);
  nb::class_<so::CudaApi>(m, "CudaApi")
      .def(nb::init<>())
      .def_rw("ctx_set_current", &so::CudaApi::ctx_set_current)
      .def_rw("memcpy_htod_async", &so::CudaApi::memcpy_htod_async)
      .def_rw("event_record", &so::CudaApi::event_record)
      .def_rw("get_error_string", &so::CudaApi::get_error_string)
      .def_rw("context", &so::CudaApi::context)
      .def_rw("upload_stream", &so::CudaApi::upload_stream)
      .def_rw("stream_query", &so::CudaApi::stream_query)
      .def_rw("download_stream", &so::CudaApi::download_stream)
      .def_rw("launch_kernel", &so::CudaApi::launch_kernel)
      .def_rw("cast_bf16", &so::CudaApi::cast_bf16)
      .def_rw("cast_f16", &so::CudaApi::cast_f16);
  nb::class_<so::BucketDesc>(m, "BucketDesc")
      .def(nb::init<>())
      .def_rw("master", &so::BucketDesc::master)
      .def_rw("remainder", &so::BucketDesc::remainder)
      .def_rw("exp_avg", &so::BucketDesc::exp_avg)
      .def_rw("exp_avg_sq", &so::BucketDesc::exp_avg_sq)
      .def_rw("grad", &so::BucketDesc::grad)
      .def_rw("grad_dtype", &so::BucketDesc::grad_dtype)
      .def_rw("grad_cast", &so::BucketDesc::grad_cast)
      .def_rw("out", &so::BucketDesc::out)
      .def_rw("out_dtype", &so::BucketDesc::out_dtype)
      .def_rw("out_separate", &so::BucketDesc::out_separate)
      .def_rw("upload_from", &so::BucketDesc::upload_from)
      .def_rw("upload_to", &so::BucketDesc::upload_to)
      .def_rw("upload_bytes", &so::BucketDesc::upload_bytes)
      .def_rw("stage", &so::BucketDesc::stage)
      .def_rw("stage_numel", &so::BucketDesc::stage_numel)
      .def("set_undo",
           [](so::BucketDesc& b, std::uintptr_t p, std::uintptr_t mm, std::uintptr_t v, std::uintptr_t escapes,
              std::uintptr_t counts) {
             b.undo_p = p;
             b.undo_m = mm;
             b.undo_v = v;
             b.undo_escapes = escapes;
             b.undo_counts = counts;
           })
      .def("set_snapshot",
           [](so::BucketDesc& b, std::uintptr_t p, std::uintptr_t mm, std::uintptr_t v) {
             b.snapshot_p = p;
             b.snapshot_m = mm;
             b.snapshot_v = v;
           })
      .def("add_partials",
           [](so::BucketDesc& b, std::int64_t first, std::int64_t count) { b.partial_runs.emplace_back(first, count); })
      .def("set_events",
           [](so::BucketDesc& b, int parity, std::uintptr_t start, std::uintptr_t done) {
             b.event_start[parity & 1] = start;
             b.event_done[parity & 1] = done;
           })
      .def("add_segment", [](so::BucketDesc& b, std::int64_t param, std::int64_t start, std::int64_t numel) {
        b.segments.push_back({param, start, numel});
      });
  nb::class_<so::StepDesc>(m, "StepDesc")
      .def(nb::init<>())
      .def_rw("sequence", &so::StepDesc::sequence)
      .def_rw("ticket", &so::StepDesc::ticket)
      .def_rw("ticket_value", &so::StepDesc::ticket_value)
      .def_rw("partials", &so::StepDesc::partials)
      .def_rw("partial_count", &so::StepDesc::partial_count)
      .def_rw("max_norm", &so::StepDesc::max_norm)
      .def_rw("unscale", &so::StepDesc::unscale)
      .def_rw("active", &so::StepDesc::active)
      .def_rw("steps", &so::StepDesc::steps)
      .def_rw("groups", &so::StepDesc::groups)
      .def_rw("param_count", &so::StepDesc::param_count)
      .def_rw("order", &so::StepDesc::order)
      .def("add_group", [](so::StepDesc& s, double lr, double b1, double b2, double eps, double wd) {
        s.hyper.push_back({lr, b1, b2, eps, wd});
      });
  nb::class_<so::Worker>(m, "Worker")
      .def(
          "__init__",
          [](so::Worker* self, int threads, const so::CudaApi& cuda, std::vector<int> cores) {
            new (self) so::Worker(threads, cuda, std::move(cores));
          },
          nb::arg("threads"), nb::arg("cuda"), nb::arg("cores") = std::vector<int>())
      .def_prop_ro("threads", &so::Worker::threads)
      .def("set_buckets",
           [](so::Worker& w, nb::list list) {
             std::vector<so::BucketDesc> buckets;
             for (nb::handle h : list) buckets.push_back(nb::cast<const so::BucketDesc&>(h));
             w.set_buckets(std::move(buckets));
           })
      .def("begin", [](so::Worker& w, const so::StepDesc& s) { w.begin(s); })
      .def("arrive", &so::Worker::arrive)
      .def("submit", [](so::Worker& w, const so::StepDesc& s) { w.submit(s); })
      .def("cancel",
           [](so::Worker& w) {
             const std::int64_t id = w.cancel();
             wait([&](int ms) { return w.wait_cancel(id, ms); });
           })
      .def("wait_verdict",
           [](so::Worker& w, std::int64_t sequence) { wait([&](int ms) { return w.wait_verdict(sequence, ms); }); })
      .def("wait_bucket",
           [](so::Worker& w, int bucket, std::int64_t sequence) {
             wait([&](int ms) { return w.wait_bucket(bucket, sequence, ms); });
           })
      .def("bucket_done",
           [](so::Worker& w, int bucket, std::int64_t sequence) { return w.wait_bucket(bucket, sequence, 0); })
      .def("wait_idle", [](so::Worker& w) { wait([&](int ms) { return w.wait_idle(ms); }); })
      .def("verdict",
           [](so::Worker& w) {
             const so::Verdict v = w.verdict();
             return nb::make_tuple(v.sequence, v.norm, v.coefficient, v.skipped, v.skips);
           })
      .def("take_records",
           [](so::Worker& w) {
             nb::list out;
             for (const so::StepRecord& r : w.take_records()) {
               const so::Verdict& v = r.verdict;
               out.append(nb::make_tuple(v.sequence, v.norm, v.coefficient, v.skipped, r.speculated, r.undone,
                                         r.waiting_tiles, r.speculated_ns, r.undo_ns, r.after_ns));
             }
             return out;
           })
      .def("trace", &so::Worker::trace)
      .def("take_spans",
           [](so::Worker& w) {
             nb::list out;
             for (const so::Span& s : w.take_spans())
               out.append(nb::make_tuple(s.kind, s.bucket, s.sequence, s.begin_ns, s.end_ns));
             return out;
           })
      .def("set_delay_us", &so::Worker::set_delay_us)
      .def("close", &so::Worker::close, nb::call_guard<nb::gil_scoped_release>());
}
