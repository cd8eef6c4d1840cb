"""The compiled module, csrc/bindings.cpp; superoffload.kernels.reference has the same interface in numpy."""

NORM_CHUNK: int
NORM_LANES: int
COMBINE_LANES: int
UNDO_TILE: int
UNDO_ESCAPES: int

def isas() -> list[str]: ...
def active_isa() -> str: ...
def force_isa(name: str) -> bool: ...
def adam_scalars(
    lr: float, b1: float, b2: float, eps: float, wd: float, t: int, scale: float
) -> tuple[float, float, float, float, float, float, float, float]: ...
def adam_step(
    p: int, m: int, v: int, g: int, grad_dtype: int, out: int, out_dtype: int, n: int,
    lr: float, b1: float, b2: float, eps: float, wd: float, t: int, scale: float, threads: int,
) -> None: ...  # fmt: skip
def adam_record(
    p: int, m: int, v: int, g: int, grad_dtype: int, out: int, out_dtype: int, n: int,
    lr: float, b1: float, b2: float, eps: float, wd: float, t: int, scale: float,
    low_p: int, low_m: int, low_v: int, escapes: int, counts: int, threads: int,
) -> None: ...  # fmt: skip
def adam_stream(p: int, m: int, v: int, g: int, n: int, threads: int) -> None: ...
def adam_undo(
    p: int, m: int, v: int, g: int, grad_dtype: int, out: int, out_dtype: int, n: int,
    lr: float, b1: float, b2: float, eps: float, wd: float, t: int, scale: float,
    low_p: int, low_m: int, low_v: int, escapes: int, counts: int, new_scale: float, threads: int,
) -> None: ...  # fmt: skip
def adam_step_split(
    weight: int, remainder: int, m: int, v: int, g: int, grad_dtype: int, n: int,
    lr: float, b1: float, b2: float, eps: float, wd: float, t: int, scale: float, threads: int,
) -> None: ...  # fmt: skip
def adam_record_split(
    weight: int, remainder: int, m: int, v: int, g: int, grad_dtype: int, n: int,
    lr: float, b1: float, b2: float, eps: float, wd: float, t: int, scale: float,
    low_p: int, low_m: int, low_v: int, escapes: int, counts: int, threads: int,
) -> None: ...  # fmt: skip
def adam_undo_split(
    weight: int, remainder: int, m: int, v: int, g: int, grad_dtype: int, n: int,
    lr: float, b1: float, b2: float, eps: float, wd: float, t: int, scale: float,
    low_p: int, low_m: int, low_v: int, escapes: int, counts: int, new_scale: float, threads: int,
) -> None: ...  # fmt: skip
def split(p: int, weight: int, remainder: int, v: int, n: int, threads: int) -> None: ...
def join(weight: int, remainder: int, v: int, p: int, plain_v: int, n: int, threads: int) -> None: ...
def any_sign(x: int, n: int) -> bool: ...
def split_failures(first: int, count: int, threads: int) -> int: ...
def cast(src: int, src_dtype: int, dst: int, dst_dtype: int, n: int, threads: int) -> None: ...
def norm_partials(x: int, dtype: int, n: int, partials: int, threads: int) -> None: ...
def combine_partials(partials: int, n: int) -> float: ...

class CudaApi:
    ctx_set_current: int
    memcpy_htod_async: int
    event_record: int
    get_error_string: int
    context: int
    upload_stream: int
    stream_query: int
    download_stream: int
    launch_kernel: int
    cast_bf16: int
    cast_f16: int
    def __init__(self) -> None: ...

class BucketDesc:
    master: int
    exp_avg: int
    exp_avg_sq: int
    grad: int
    grad_dtype: int
    grad_cast: int
    out: int
    out_dtype: int
    out_separate: bool
    upload_from: int
    upload_to: int
    upload_bytes: int
    stage: int
    stage_numel: int
    def __init__(self) -> None: ...
    def set_events(self, parity: int, start: int, done: int) -> None: ...
    def add_segment(self, param: int, start: int, numel: int) -> None: ...

class StepDesc:
    sequence: int
    ticket: int
    ticket_value: int
    partials: int
    partial_count: int
    max_norm: float
    unscale: float
    active: int
    steps: int
    groups: int
    param_count: int
    order: list[int]
    def __init__(self) -> None: ...
    def add_group(self, lr: float, b1: float, b2: float, eps: float, wd: float) -> None: ...

class Worker:
    threads: int
    def __init__(self, threads: int, cuda: CudaApi) -> None: ...
    def set_buckets(self, buckets: list[BucketDesc]) -> None: ...
    def submit(self, step: StepDesc) -> None: ...
    def wait_verdict(self, sequence: int) -> None: ...
    def wait_bucket(self, bucket: int, sequence: int) -> None: ...
    def wait_idle(self) -> None: ...
    def verdict(self) -> tuple[int, float, float, bool, int]: ...
    def trace(self, on: bool) -> None: ...
    def take_spans(self) -> list[tuple[int, int, int, int, int]]: ...
    def set_delay_us(self, us: int) -> None: ...
    def close(self) -> None: ...

class Pool:
    threads: int
    cores: list[int]
    bind_error: int
    def __init__(self, threads: int, cores: list[int] = ...) -> None: ...
    def call_ns(self, tiles: int, calls: int, rest_us: int) -> list[int]: ...

def bind_cores(cores: list[int]) -> int: ...
def bind_memory(address: int, size: int, node: int) -> int: ...
def node_of_page(address: int) -> int: ...
def first_touch(address: int, size: int, threads: int, cores: list[int]) -> int: ...
