// Sends a bucket's new weights up the link, on the upload stream of the device or, where the CPU is the device, by a
// memory copy.
#pragma once

#include <cstdint>

#include "pool.h"
#include "step.h"

namespace so {

// Entry points of the CUDA driver that torch has already loaded, as addresses; all zero on a CPU-only machine.
struct CudaApi {
  std::uintptr_t ctx_set_current = 0, memcpy_htod_async = 0, event_record = 0, get_error_string = 0;
  std::uintptr_t context = 0, upload_stream = 0;
  std::uintptr_t stream_query = 0,
                 download_stream = 0;  // asked while waiting, so that a device fault is not waited out
  std::uintptr_t launch_kernel = 0, cast_bf16 = 0, cast_f16 = 0;  // device casts fp32 -> 16-bit (kernels/cast_ptx.py)
};

class Uploader {
 public:
  Uploader(CudaApi cuda, Pool& pool, SpanLog& spans) : cuda_(cuda), pool_(pool), spans_(spans) {}

  // All throw std::runtime_error with the driver's own words.
  void bind_thread() const;     // makes the device's context current on the calling thread
  void check_download() const;  // a fault of the device, which no ticket would ever tell
  // Enqueues the upload and records its event. A second upload of the same bucket overtakes nothing: one stream.
  void upload(const BucketDesc& b, std::int32_t bucket, std::int64_t sequence);

 private:
  void upload_on_host(const BucketDesc& b, std::int32_t bucket, std::int64_t sequence);
  void check(int code, const char* what) const;

  CudaApi cuda_;
  Pool& pool_;
  SpanLog& spans_;
};

}  // namespace so
