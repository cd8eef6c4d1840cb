"""Machines known by name. Every number has an entry in `sources` that begins with one of four words:

`published` (the vendor or the SuperOffload paper, arXiv 2509.21271), `reported` (others measured it and wrote it
down), `measured` (this project measured it) or `assumed` (derived or guessed; the entry says from what).
"""

from __future__ import annotations

from collections.abc import Callable

from superoffload.hardware import Cpu, Curve, Gpu, Hardware, Link

HOPPER_MATMUL = 773.0
"""bf16 8192³ product measured on an H200; the other Hoppers have the same die and the same 990 TFLOP/s peak."""
HOPPER_PEAK = 990.0
HBM_SHARE = 4.23 / 4.8
"""Share of the HBM datasheet figure that a copy reaches, as measured on an H200 (4.23 of 4.8 TB/s)."""

_H200_MEASURED = "measured: on a PCIe 5 machine with one H200 and 16 cores of a Sapphire-Rapids-class Xeon"
_VENDOR = "published: vendor datasheet"
_SAME_DIE = "assumed: 773 TFLOP/s as measured on an H200 (8192³ bf16), the same die and peak"
_HBM = "assumed: datasheet times 0.88, the share that a copy reaches on an H200"
_GRACE_ADAM = (
    "published: GraceAdam 1B/2B/4B/8B in 0.082/0.160/0.316/0.608 s (SuperOffload paper), mean 353 GB/s at 28 B per "
    "parameter; assumed: reached with the paper's 65 threads (cores 7-71), proportionally less with fewer"
)


def _all_sources(gpu: str, matmul: str, hbm: str, cpu: str, dram: str, adam: str, cast: str, dma: str, down: str,
                 up: str, both: str) -> dict[str, str]:  # fmt: skip
    """Spread the given origins over the dotted names of all numeric fields."""
    return {
        "gpu.memory_gb": gpu,
        "gpu.peak_bf16_tflops": gpu,
        "gpu.matmul_bf16_tflops": matmul,
        "gpu.hbm_gb_per_s": hbm,
        "cpu.cores": cpu,
        "cpu.memory_gb": cpu,
        "cpu.dram_gb_per_s": dram,
        "cpu.adam_gb_per_s": adam,
        "cpu.cast_gb_per_s": cast,
        "cpu.dma_write_cost": dma,
        "link.down": down,
        "link.up": up,
        "link.both_gb_per_s": both,
    }


def _c2c(gb_per_s: float) -> Curve:
    """NVLink-C2C over sizes, scaled to a plateau.

    Only plateaus are reported. Below them the shape is assumed: about 2 µs to start a transfer, so that 1 MB
    reaches 60 % and 64 MB, the paper's saturation point, 98 %.
    """
    shares = ((1.0, 0.60), (4.0, 0.83), (16.0, 0.94), (64.0, 0.98), (1024.0, 1.0))
    return Curve(size_mb=tuple(s for s, _ in shares), gb_per_s=tuple(round(gb_per_s * f, 1) for _, f in shares))


def _grace(memory_gb: float = 480.0, dram: float = 486.0) -> Cpu:
    return Cpu(
        name="NVIDIA Grace (72 Neoverse V2 cores)",
        cores=72,
        memory_gb=memory_gb,
        dram_gb_per_s=dram,
        adam_threads=(65,),
        adam_gb_per_s=(353.0,),
        cast_gb_per_s=353.0,
    )


def _grace_hopper(
    name: str, *, memory_gb: float, hbm_tb: float, up: float, down: float, both: float, link: dict[str, str]
) -> Hardware:
    return Hardware(
        name=name,
        source="preset",
        gpu=Gpu(
            name=f"Hopper of a GH200 ({memory_gb:.0f} GB)",
            memory_gb=memory_gb,
            peak_bf16_tflops=HOPPER_PEAK,
            matmul_bf16_tflops=HOPPER_MATMUL,
            hbm_gb_per_s=round(hbm_tb * 1000 * HBM_SHARE),
        ),
        cpu=_grace(),
        link=Link(down=_c2c(down), up=_c2c(up), both_gb_per_s=both),
        sources=_all_sources(
            gpu=_VENDOR,
            matmul=_SAME_DIE,
            hbm=f"{_HBM} ({hbm_tb} TB/s here)",
            cpu="published: SuperOffload paper, 72 cores and 480 GB LPDDR5X",
            dram="reported: 486 GB/s measured by others, 500 nominal",
            adam=_GRACE_ADAM,
            cast="assumed: a cast pass streams at GraceAdam's rate",
            dma="assumed: a C2C write costs the memory what a read costs",
            **link,
        ),
    )


def gh200() -> Hardware:
    """GH200 with 96 GB HBM3 and 480 GB LPDDR5X, link as reported for a single GH200."""
    link = {
        "up": "reported: 346 GB/s by copy engine on one GH200 480GB (NVIDIA/nvbandwidth issue 23); below 64 MB assumed",
        "down": "reported: about 15 % less than up (same issue), so 294 GB/s; below 64 MB assumed",
        "both": "assumed: 486 GB/s, what the LPDDR5X gives; nobody reports both at once",
    }
    return _grace_hopper("gh200", memory_gb=96, hbm_tb=4.0, up=346, down=294, both=486, link=link)


def gh200_144gb() -> Hardware:
    """GH200 with 144 GB HBM3e; the CPU side and the link are those of `gh200`."""
    link = {
        "up": "assumed: as reported for the 96 GB GH200, 346 GB/s (NVIDIA/nvbandwidth issue 23)",
        "down": "assumed: as reported for the 96 GB GH200, about 15 % less than up",
        "both": "assumed: 486 GB/s, what the LPDDR5X gives; nobody reports both at once",
    }
    return _grace_hopper("gh200-144gb", memory_gb=144, hbm_tb=4.9, up=346, down=294, both=486, link=link)


def gh200_quad() -> Hardware:
    """One chip of a board with four GH200, where the way down is reported to be much slower."""
    link = {
        "up": "reported: 411-421 GB/s on four-chip boards (NVIDIA/Megatron-LM issue 6491), middle taken; below 64 MB "
        "assumed",
        "down": "reported: 170 GB/s on four-chip boards (150 seen in training; same issue); below 64 MB assumed",
        "both": "assumed: 486 GB/s, what the LPDDR5X gives; nobody reports both at once",
    }
    return _grace_hopper("gh200-quad", memory_gb=96, hbm_tb=4.0, up=416, down=170, both=486, link=link)


def gh200_datasheet() -> Hardware:
    """GH200 as the datasheet says, for comparing with the paper; nobody reports 450 GB/s each way."""
    link = {
        "up": "published: NVLink-C2C 900 GB/s both ways together, 450 each; not reached in any public report",
        "down": "published: NVLink-C2C 900 GB/s both ways together, 450 each; not reached in any public report",
        "both": "published: NVLink-C2C 900 GB/s",
    }
    hw = _grace_hopper("gh200-datasheet", memory_gb=96, hbm_tb=4.0, up=450, down=450, both=900, link=link)
    sources = {**hw.sources, "cpu.dram_gb_per_s": "published: 500 GB/s (SuperOffload paper)"}
    return hw.replace(cpu=_grace(dram=500.0), sources=sources)


def gb200() -> Hardware:
    """One GPU of a GB200 with half of the Grace that two GPUs share."""
    return Hardware(
        name="gb200",
        source="preset",
        gpu=Gpu(
            name="Blackwell of a GB200 (186 GB)",
            memory_gb=186,
            peak_bf16_tflops=2500,
            matmul_bf16_tflops=round(2500 * HOPPER_MATMUL / HOPPER_PEAK),
            hbm_gb_per_s=round(8000 * HBM_SHARE),
        ),
        cpu=Cpu(
            name="NVIDIA Grace, half (36 of 72 Neoverse V2 cores)",
            cores=36,
            memory_gb=240,
            dram_gb_per_s=243,
            adam_threads=(32,),
            adam_gb_per_s=(174.0,),
            cast_gb_per_s=174.0,
        ),
        link=Link(down=_c2c(297), up=_c2c(375), both_gb_per_s=486),
        sources=_all_sources(
            gpu="published: vendor datasheet of GB200 (one of its two GPUs: 186 GB, 8 TB/s, 2,500 TFLOP/s dense bf16)",
            matmul="assumed: datasheet times 0.78, the share that an H200 reaches",
            hbm=f"{_HBM} (8 TB/s here)",
            cpu="published: one Grace of 72 cores and 480 GB serves two GPUs; half of it is counted",
            dram="assumed: half of the 486 GB/s reported for Grace, since both GPUs load it alike",
            adam="assumed: GraceAdam of the SuperOffload paper, 353 GB/s on 65 threads, at 32 threads",
            cast="assumed: a cast pass streams at Adam's rate",
            dma="assumed: a C2C write costs the memory what a read costs",
            down="reported: 297 GB/s on GB200 (AsymGEMM); below 64 MB assumed",
            up="reported: 375 GB/s on GB200 (AsymGEMM); below 64 MB assumed",
            both="assumed: 486 GB/s, what the whole LPDDR5X gives",
        ),
    )


def mi300a() -> Hardware:
    """MI300A: CPU and GPU share 128 GB of HBM, so that offloading saves no memory; for teaching."""
    return Hardware(
        name="mi300a",
        source="preset",
        gpu=Gpu(
            name="AMD MI300A (228 CUs)",
            memory_gb=128,
            peak_bf16_tflops=981,
            matmul_bf16_tflops=590,
            hbm_gb_per_s=3700,
        ),
        cpu=Cpu(
            name="AMD MI300A (24 Zen 4 cores)",
            cores=24,
            memory_gb=128,
            dram_gb_per_s=3700,
            adam_threads=(20,),
            adam_gb_per_s=(180.0,),
            cast_gb_per_s=180.0,
            dma_write_cost=2.0,
        ),
        link=Link(
            down=Curve(size_mb=(1, 16, 64), gb_per_s=(200, 700, 1000)),
            up=Curve(size_mb=(1, 16, 64), gb_per_s=(200, 700, 1000)),
            both_gb_per_s=1800,
        ),
        shared_memory=True,
        sources=_all_sources(
            gpu="published: vendor datasheet (128 GB shared, 981 TFLOP/s dense bf16)",
            matmul="assumed: 60 % of the peak",
            hbm="assumed: 70 % of the 5.3 TB/s datasheet figure",
            cpu="published: vendor datasheet (24 Zen 4 cores, the same 128 GB)",
            dram="assumed: CPU and GPU draw on the same HBM, 3.7 TB/s",
            adam="assumed: 9 GB/s per Zen 4 core, 4 cores left to PyTorch",
            cast="assumed: a cast pass streams at Adam's rate",
            dma="assumed: a copy within one memory reads and writes it",
            down="assumed: GPU copy within the shared HBM",
            up="assumed: GPU copy within the shared HBM",
            both="assumed: half of the HBM rate, since a copy reads and writes it",
        ),
    )


def _pcie5_host() -> tuple[Cpu, Link]:
    curve = Curve(size_mb=(1, 4, 16, 64, 1024), gb_per_s=(38.9, 45.5, 52.4, 54.8, 55.2))
    cpu = Cpu(
        name="Intel Xeon, Sapphire Rapids class, 16 cores (AVX-512)",
        cores=16,
        memory_gb=137.4,
        dram_gb_per_s=155,
        adam_threads=(1, 4, 8, 12, 16),
        adam_gb_per_s=(18, 62, 98, 118, 118),
        cast_gb_per_s=71,
        dma_write_cost=1.3,
    )
    return cpu, Link(down=curve, up=curve, both_gb_per_s=100)


_CONTENTION = "measured: derived from Adam beside DMA (116 GB/s falls to 82 beside a download, to 98 beside an upload)"


def h200_pcie5() -> Hardware:
    """The measured machine: one H200 (141 GB) on PCIe 5 x16 beside 16 Xeon cores and 128 GiB."""
    cpu, link = _pcie5_host()
    return Hardware(
        name="h200-pcie5",
        source="preset",
        gpu=Gpu(
            name="NVIDIA H200",
            memory_gb=141,
            peak_bf16_tflops=HOPPER_PEAK,
            matmul_bf16_tflops=HOPPER_MATMUL,
            hbm_gb_per_s=4230,
        ),
        cpu=cpu,
        link=link,
        sources=_all_sources(
            gpu=_VENDOR,
            matmul=f"{_H200_MEASURED}; 8192³ bf16",
            hbm=f"{_H200_MEASURED}; device copy, read and write counted",
            cpu=f"{_H200_MEASURED}; 128 GiB",
            dram=f"{_H200_MEASURED}; Adam and DMA together",
            adam=f"{_H200_MEASURED}; torch's fused AdamW in fp32 on 1/4/8/12/16 threads",
            cast=f"{_H200_MEASURED}; 16 threads",
            dma=_CONTENTION,
            down=f"{_H200_MEASURED}; pinned, 1/4/16/64/1024 MB",
            up=f"{_H200_MEASURED}; pinned, 1/4/16/64/1024 MB",
            both=f"{_H200_MEASURED}; both ways at once",
        ),
    )


def h100_pcie5() -> Hardware:
    """An H100 SXM (80 GB) on PCIe 5 x16, beside the host that was measured with the H200."""
    cpu, link = _pcie5_host()
    same = "assumed: as measured on the H200 machine, "
    return Hardware(
        name="h100-pcie5",
        source="preset",
        gpu=Gpu(
            name="NVIDIA H100 SXM",
            memory_gb=80,
            peak_bf16_tflops=HOPPER_PEAK,
            matmul_bf16_tflops=HOPPER_MATMUL,
            hbm_gb_per_s=round(3350 * HBM_SHARE),
        ),
        cpu=cpu,
        link=link,
        sources=_all_sources(
            gpu=_VENDOR,
            matmul=_SAME_DIE,
            hbm=f"{_HBM} (3.35 TB/s here)",
            cpu=same + "16 cores and 128 GiB",
            dram=same + "155 GB/s",
            adam=same + "118 GB/s on 12 threads",
            cast=same + "71 GB/s",
            dma=same + "1.3",
            down=same + "55 GB/s at best",
            up=same + "55 GB/s at best",
            both=same + "100 GB/s",
        ),
    )


def laptop() -> Hardware:
    """A laptop without a GPU for training: the CPU computes, "the link" is a memory copy, all memory is shared."""
    return Hardware(
        name="laptop",
        source="preset",
        gpu=Gpu(
            name="CPU of a laptop (8 cores)",
            memory_gb=16,
            peak_bf16_tflops=0,
            matmul_bf16_tflops=0.6,
            hbm_gb_per_s=40,
        ),
        cpu=Cpu(
            name="Laptop CPU (8 cores)",
            cores=8,
            memory_gb=16,
            dram_gb_per_s=50,
            adam_threads=(1, 2, 4, 8),
            adam_gb_per_s=(13, 25, 38, 40),
            cast_gb_per_s=30,
            dma_write_cost=2.0,
        ),
        link=Link(
            down=Curve(size_mb=(1, 64), gb_per_s=(15, 15)),
            up=Curve(size_mb=(1, 64), gb_per_s=(15, 15)),
            both_gb_per_s=20,
        ),
        shared_memory=True,
        sources=_all_sources(
            gpu="assumed: no GPU; the CPU computes and no peak is published",
            matmul="assumed: 8 cores with AVX2 at about 75 GFLOP/s each",
            hbm="assumed: dual-channel memory",
            cpu="assumed: 8 cores and 16 GB",
            dram="assumed: dual-channel memory, about 50 GB/s",
            adam="assumed: from 38 GB/s measured for an Adam-shaped stream on a 2-core desktop-class machine",
            cast="assumed: three quarters of Adam's rate",
            dma="assumed: a memory copy reads and writes it",
            down="assumed: memory copy, 18.7 GB/s measured alone on a 2-core machine",
            up="assumed: memory copy, 18.7 GB/s measured alone on a 2-core machine",
            both="assumed: memory copies share one memory",
        ),
    )


BUILDERS: dict[str, Callable[[], Hardware]] = {
    "gh200": gh200,
    "gh200-144gb": gh200_144gb,
    "gh200-quad": gh200_quad,
    "gh200-datasheet": gh200_datasheet,
    "gb200": gb200,
    "mi300a": mi300a,
    "h100-pcie5": h100_pcie5,
    "h200-pcie5": h200_pcie5,
    "laptop": laptop,
}
