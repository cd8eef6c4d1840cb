"""Device casts fp32 to 16-bit as PTX text, for the native worker: it enqueues them through the CUDA driver, without
Python, a compiler or a runtime library. The driver compiles the text when the engine starts (sm_80 and newer)."""

from __future__ import annotations

_KERNEL = """
.visible .entry superoffload_cast_{name}(.param .u64 source, .param .u64 destination, .param .u64 count)
{{
    .reg .pred  %past;
    .reg .b16   %half;
    .reg .b32   %block, %width, %thread;
    .reg .f32   %value;
    .reg .b64   %from, %to, %n, %i, %offset;
    ld.param.u64 %from, [source];
    ld.param.u64 %to, [destination];
    ld.param.u64 %n, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    cvt.u64.u32 %i, %thread;
    mad.wide.u32 %i, %block, %width, %i;
    setp.ge.u64 %past, %i, %n;
    @%past bra DONE_{name};
    cvta.to.global.u64 %from, %from;
    cvta.to.global.u64 %to, %to;
    shl.b64 %offset, %i, 2;
    add.u64 %from, %from, %offset;
    ld.global.f32 %value, [%from];
    cvt.rn.{name}.f32 %half, %value;
    shl.b64 %offset, %i, 1;
    add.u64 %to, %to, %offset;
    st.global.b16 [%to], %half;
DONE_{name}:
    ret;
}}
"""

CAST_PTX = ".version 7.8\n.target sm_80\n.address_size 64\n" + "".join(
    _KERNEL.format(name=name) for name in ("bf16", "f16")
)
"""Kernels ``superoffload_cast_bf16`` and ``superoffload_cast_f16``: source (fp32), destination (16-bit), count."""
