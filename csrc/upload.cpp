#include "upload.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "undo.h"

namespace so {

void Uploader::check(int code, const char* what) const {
  if (code == 0) return;
  const char* text = nullptr;
  if (cuda_.get_error_string) at<int(int, const char**)>(cuda_.get_error_string)(code, &text);
  throw std::runtime_error(std::string(what) + " failed in the optimizer's worker: CUDA driver error " +
                           std::to_string(code) + (text ? std::string(" (") + text + ")" : std::string()));
}

void Uploader::bind_thread() const {
  if (cuda_.ctx_set_current) check(at<int(void*)>(cuda_.ctx_set_current)(at<void>(cuda_.context)), "cuCtxSetCurrent");
}

void Uploader::check_download() const {
  constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY
  if (!cuda_.stream_query) return;
  const int code = at<int(void*)>(cuda_.stream_query)(at<void>(cuda_.download_stream));
  if (code != kNotReady) check(code, "the download of gradients");
}

void Uploader::upload(const BucketDesc& b, std::int32_t bucket, std::int64_t sequence) {
  if (!b.upload_to) return;
  if (!cuda_.memcpy_htod_async) return upload_on_host(b, bucket, sequence);
  void* stream = at<void>(cuda_.upload_stream);
  auto* record = at<int(void*, void*)>(cuda_.event_record);
  const std::uintptr_t begun = b.event_start[sequence & 1], done = b.event_done[sequence & 1];
  if (begun) check(record(at<void>(begun), stream), "cuEventRecord");
  check(at<int(std::uintptr_t, const void*, std::size_t, void*)>(cuda_.memcpy_htod_async)(
            b.stage ? b.stage : b.upload_to, at<void>(b.upload_from), std::size_t(b.upload_bytes), stream),
        "cuMemcpyHtoDAsync");
  if (b.stage) {
    // All uploads share one stream, so one staging buffer serves them all: the next copy starts after this cast.
    std::uintptr_t source = b.stage, destination = b.upload_to;
    std::uint64_t n = std::uint64_t(b.stage_numel);
    void* arguments[] = {&source, &destination, &n};
    constexpr unsigned kThreads = 256;
    const unsigned blocks = unsigned((n + kThreads - 1) / kThreads);
    using Launch =
        int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    check(at<Launch>(cuda_.launch_kernel)(at<void>(b.out_dtype == kBF16 ? cuda_.cast_bf16 : cuda_.cast_f16), blocks, 1,
                                          1, kThreads, 1, 1, 0, stream, arguments, nullptr),
          "cuLaunchKernel");
  }
  check(record(at<void>(done), stream), "cuEventRecord");
}

void Uploader::upload_on_host(const BucketDesc& b, std::int32_t bucket, std::int64_t sequence) {
  std::int64_t begin = now_ns();
  std::memcpy(at<void>(b.stage ? b.stage : b.upload_to), at<void>(b.upload_from), std::size_t(b.upload_bytes));
  spans_.add(kSpanUpload, bucket, sequence, begin);
  if (!b.stage) return;
  begin = now_ns();
  const CastFn cast = kernels().cast[kF32][b.out_dtype];
  const std::size_t n = std::size_t(b.stage_numel), size = dtype_bytes(b.out_dtype);
  pool_.for_each_range(n, kUndoTile, [&](std::size_t, std::size_t from, std::size_t count) {
    cast(at<float>(b.stage) + from, at<char>(b.upload_to) + from * size, count);
  });
  spans_.add(kSpanCastUpload, bucket, sequence, begin);
}

}  // namespace so
