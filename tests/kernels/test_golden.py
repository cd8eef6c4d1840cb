"""Every instruction set gives the bits of golden.json: the ones that this machine runs through the module and through
a program without Python, AVX-512 through SIMDe, NEON and SVE (128, 256 and 512 bits) under an emulator.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from superoffload import kernels
from superoffload.kernels import native, reference
from tests.kernels import make_golden

REPOSITORY = Path(__file__).resolve().parents[2]
CSRC = REPOSITORY / "csrc"
GOLDEN = make_golden.load()
COMPILED = kernels.capabilities()["compiled"]

_ISA_SOURCES = {
    "x86_64": ("adam_avx2.cpp", "adam_avx512.cpp"),
    "aarch64": ("adam_neon.cpp", "adam_sve.cpp"),
}
_DEFINITIONS = {
    "x86_64": ("-DSO_HAVE_AVX2=1", "-DSO_HAVE_AVX512=1"),
    "aarch64": ("-DSO_HAVE_NEON=1", "-DSO_HAVE_SVE=1"),
}
_COMMON_SOURCES = ("test_golden.cpp", "dispatch.cpp", "undo.cpp", "split.cpp", "adam_scalar.cpp")
# What CMakeLists.txt gives every file, but for -O1 in the emulated builds, which have no speed to show.
_FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi", f"-I{CSRC}")


def _file_flags(source: str) -> list[str]:
    """The flags that CMakeLists.txt gives this one file, so that what is tested is what is shipped."""
    text = (REPOSITORY / "CMakeLists.txt").read_text()
    found = re.search(rf'csrc/{re.escape(source)} PROPERTIES\s+COMPILE_OPTIONS "([^"]+)"', text)
    assert found, f"CMakeLists.txt names no flags for {source}"
    return found[1].split(";")


@dataclass(frozen=True)
class Report:
    isas: list[str]
    """What the dispatcher found, best first."""
    sve_bits: int
    hashes: dict[str, dict[str, str]]
    """Instruction set that ran -> case -> hash."""

    def differences(self) -> dict[str, list[str]]:
        return {isa: found for isa, got in self.hashes.items() if (found := _differences(got))}


@dataclass(frozen=True)
class Program:
    path: Path
    objects: dict[str, Path]

    def run(self, *isas: str, emulator: tuple[str, ...] = ()) -> Report:
        done = subprocess.run(
            [*emulator, str(self.path), *isas], check=False, capture_output=True, text=True, timeout=120
        )
        bad = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        assert not bad and done.returncode == 0, (done.returncode, bad[:5], done.stderr[-2000:])
        found, sve, *lines = (line.split() for line in done.stdout.splitlines())
        hashes: dict[str, dict[str, str]] = {}
        for isa, case, digest in lines:
            hashes.setdefault(isa, {})[case] = digest
        common = hashes.pop("any")
        assert list(hashes) == (list(isas) or found[1:])
        return Report(found[1:], int(sve[1]), {isa: {**of_isa, **common} for isa, of_isa in hashes.items()})


_objects: dict[tuple[str, ...], Path] = {}
"""Compiled in this session, by command."""


def _build(folder: Path, compiler: str, units: dict[str, list[str]], link: tuple[str, ...] = ()) -> Program:
    def compile_one(source: str) -> Path:
        command = (compiler, *_FLAGS, *units[source], "-c", str(CSRC / source))
        if command not in _objects:
            target = folder / f"{Path(source).stem}.o"
            done = subprocess.run(
                [*command, "-o", str(target)], check=False, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
            _objects[command] = target
        return _objects[command]

    with ThreadPoolExecutor(min(2, kernels.available_cores())) as pool:
        objects = dict(zip(units, pool.map(compile_one, units), strict=True))
    program = folder / "test_golden"
    subprocess.run([compiler, *map(str, objects.values()), *link, "-o", str(program)], check=True, timeout=120)
    return Program(program, objects)


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        pytest.skip("no C++ compiler (Debian: apt-get install g++)")
    return found


def _emulator(machine: str) -> str:
    found = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    if found is None:
        pytest.skip("no emulator (Debian: apt-get install qemu-user-static)")
    return found


def _differences(got: dict[str, str]) -> list[str]:
    return sorted(case for case in GOLDEN.keys() | got.keys() if GOLDEN.get(case) != got.get(case))


def _only_the_table_leaves(program: Program, source: str, nm: str) -> None:
    """An inline function that leaves a file compiled with wider instructions might replace the baseline's copy."""
    command = [nm, "-C", "--defined-only", "-g", str(program.objects[source])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    names = [line.split(maxsplit=2)[2] for line in done.stdout.splitlines()]
    assert names == [f"so::{source.removeprefix('adam_').removesuffix('.cpp')}_table()"]


def test_the_file_is_what_the_reference_gives():
    assert _differences(make_golden.hashes(reference)) == []


@pytest.mark.skipif(not COMPILED, reason="the kernels are not compiled: installed without a C++ compiler")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", kernels.capabilities()["isas"])
def test_module(isa: str, threads: int):
    with kernels.force_isa(isa):
        assert _differences(make_golden.hashes(native, threads)) == []


@pytest.mark.skipif(not COMPILED, reason="the kernels are not compiled: installed without a C++ compiler")
def test_a_changed_bit_is_noticed():
    """The cases are not blind: a step size one ulp larger changes the hash of every Adam case with a new weight."""
    lr = make_golden.HYPER[0]

    class OneUlp:
        @staticmethod
        def adam_step(arrays: tuple[int, ...], step: tuple[Any, ...], threads: int) -> None:
            native.adam_step(arrays, (lr * (1 + 2**-23), *step[1:]), threads)

    for grad in range(3):
        for n in (33, 4099):
            assert make_golden.run_adam(OneUlp, grad, 1, n) != make_golden.run_adam(native, grad, 1, n)


def test_the_undo_cases_hold_what_they_are_there_for(monkeypatch: pytest.MonkeyPatch):
    """Escapes in a list that is not full, beyond the first block, and a tile whose list is; and each hash sees a wrong
    byte of the record and a wrong entry."""
    counts: dict[int, tuple[int, int]] = {}
    taken = make_golden._Record.taken

    def noted(record: Any) -> list[bytes]:
        count = int(record.count[0])
        counts[record.bytes[0].size] = count, int(record.escapes[:count, 0].max(initial=0)) if count <= 640 else -1
        return taken(record)

    monkeypatch.setattr(make_golden._Record, "taken", noted)
    for grad in range(3):
        for n in make_golden.UNDO_SIZES:
            make_golden.run_undo(reference, grad, 1, n)
        assert 0 < counts[600][0] <= 640 and counts[600][1] >= 512 and counts[4099][0] == 0xFFFFFFFF, (grad, counts)

    class WrongByte:
        adam_step, adam_undo = staticmethod(reference.adam_step), staticmethod(reference.adam_undo)

        @staticmethod
        def adam_record(arrays: Any, step: Any, record: tuple[int, ...], threads: int) -> None:
            reference.adam_record(arrays, step, record, threads)
            reference._at(record[2], 97, "i1")[96] += 1

    assert make_golden.run_undo(WrongByte, 1, 1, 97) != make_golden.run_undo(reference, 1, 1, 97)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The stand-alone program for this machine."""
    machine = platform.machine()
    if machine not in _ISA_SOURCES:
        pytest.skip(f"no instruction set of its own for {machine}")
    common = ["-O3", *_DEFINITIONS[machine]]
    units = {source: [*common, *_file_flags(source)] for source in _ISA_SOURCES[machine]}
    units |= dict.fromkeys(_COMMON_SOURCES, common)
    return _build(tmp_path_factory.mktemp("native"), _compiler(), units)


def test_program_on_this_machine(program: Program):
    """Also unaligned starts, arrays that end at a page that must not be touched, and a caller's own modes."""
    report = program.run()
    if COMPILED:
        assert report.isas == kernels.capabilities()["isas"]
    assert report.differences() == {}
    if nm := shutil.which("nm"):
        for source in _ISA_SOURCES[platform.machine()]:
            _only_the_table_leaves(program, source, nm)


@pytest.mark.parametrize(("cpu", "isas"), [("Nehalem", ["scalar"]), ("max", ["avx2", "scalar"])])
def test_older_x86(program: Program, cpu: str, isas: list[str]):
    """The baseline has no instruction that an old CPU lacks, and the dispatcher leaves out what it lacks."""
    if platform.machine() != "x86_64":
        pytest.skip("an x86-64 program runs on x86-64 only")
    report = program.run(isas[0], emulator=(_emulator("x86_64"), "-cpu", cpu))
    assert [isa for isa in report.isas if isa != "avx512"] == isas  # a later emulator may have AVX-512
    assert report.differences() == {}


def test_avx512_through_simde(tmp_path: Path):
    if platform.machine() != "x86_64":
        pytest.skip("SIMDe stands in for AVX-512 on x86-64 only")
    if not any(Path(p, "simde/x86/avx512.h").exists() for p in ("/usr/include", "/usr/local/include")):
        pytest.skip("no SIMDe (Debian: apt-get install libsimde-dev)")
    if COMPILED and "avx2" not in kernels.capabilities()["isas"]:
        pytest.skip("this CPU has no AVX2")
    emulated = ["-O1", "-DSO_HAVE_AVX512=1", "-DSO_AVX512_SIMDE=1"]
    units = {
        "adam_avx512.cpp": [*emulated, f"-I{Path(__file__).parent}", *_file_flags("adam_avx2.cpp")],
        **{source: ["-O1"] for source in _COMMON_SOURCES},
        "test_golden.cpp": emulated,
    }
    report = _build(tmp_path, _compiler(), units).run("avx512")
    assert report.differences() == {}


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """Runs the program for aarch64 on an emulated CPU."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no cross compiler (Debian: apt-get install g++-aarch64-linux-gnu)")
    emulator = _emulator("aarch64")
    # GCC 12 would make vectors of its own out of the baseline's loops; the point here is the code as it is written.
    common = ["-O1", "-fno-tree-vectorize", *_DEFINITIONS["aarch64"]]
    units = {source: [*common, *_file_flags(source)] for source in _ISA_SOURCES["aarch64"]}
    units |= dict.fromkeys(_COMMON_SOURCES, common)
    program = _build(tmp_path_factory.mktemp("aarch64"), compiler, units, link=("-static",))
    if nm := shutil.which("aarch64-linux-gnu-nm"):
        for source in _ISA_SOURCES["aarch64"]:
            _only_the_table_leaves(program, source, nm)
    return lambda cpu, *isas: program.run(*isas, emulator=(emulator, "-cpu", cpu))


@pytest.mark.parametrize(
    ("cpu", "bits", "runs"),
    [
        ("max,sve128=on", 128, ["sve", "neon", "scalar"]),
        ("max,sve256=on", 256, ["sve"]),
        ("max,sve384=on", 384, ["sve"]),  # the norm's lanes do not divide into such vectors
        ("max,sve512=on", 512, ["sve"]),
        ("max,sve2048=on,sve-default-vector-length=256", 2048, ["sve"]),  # all lanes fit in a part of the registers
        ("a64fx", 512, ["sve"]),  # SVE without SVE2 and BF16
        ("neoverse-n1", 0, ["neon"]),  # no SVE
    ],
)
def test_arm(arm: Callable[..., Report], cpu: str, bits: int, runs: list[str]):
    report = arm(cpu, *runs)
    assert report.isas == (["sve", "neon", "scalar"] if bits else ["neon", "scalar"])
    assert report.sve_bits == bits
    assert report.differences() == {}
