"""Instructions per vector in the main loops of the Arm kernels, from the disassembly; docs/kernels.md has the table.

``python tests/kernels/count_instructions.py`` compiles adam_sve.cpp and adam_neon.cpp with the shipped flags
(aarch64-linux-gnu-g++ and aarch64-linux-gnu-objdump) and prints one line per loop, gradient and weight dtype.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-tree-vectorize")
ISAS = {"sve": ("-march=armv8.2-a+sve", "-DSO_HAVE_SVE=1"), "neon": ("-DSO_HAVE_NEON=1",)}
NAMES = ("f32", "bf16", "f16")
VECTORS = 2  # in one turn of the main loop

Instruction = tuple[int, str, str]


def disassembly(isa: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/{isa}.o"
        source = str(CSRC / f"adam_{isa}.cpp")
        subprocess.run(["aarch64-linux-gnu-g++", *FLAGS, *ISAS[isa], "-c", source, "-o", target], check=True)
        command = ["aarch64-linux-gnu-objdump", "-d", "-C", "--no-show-raw-insn", target]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def kind(name: str, operands: str) -> str:
    if name in ("fsqrt", "fdiv", "fdivr"):
        return "sqrt/div"
    if name.startswith("ld"):
        return "load"
    if name.startswith("st"):
        return "store"
    if not re.search(r"\b[zv]\d+\.", operands):
        return "address/branch"
    return "float" if name.startswith(("f", "bfcvt")) else "integer"


def main_loop(body: str, roots_of_vectors: int = VECTORS) -> list[Instruction]:
    """The loop around exactly so many square roots of whole vectors."""
    found = re.findall(r"^[ \t]*([0-9a-f]+):[ \t]+(\S+)[ \t]*(.*)$", body, re.MULTILINE)
    instructions = [(int(address, 16), name, operands) for address, name, operands in found]
    for end, name, operands in instructions:
        target = re.search(r"\b([0-9a-f]+) <", operands)
        if name.startswith(("b.", "cb", "tb")) or name == "b":
            if not target or int(target[1], 16) >= end:
                continue
            loop = [i for i in instructions if int(target[1], 16) <= i[0] <= end]
            roots = [i for i in loop if i[1] == "fsqrt" and re.search(r"\b[zv]\d+\.", i[2])]
            if len(roots) == roots_of_vectors:
                return loop
    raise LookupError("no loop with two vectors of square roots: has the kernel's main loop changed?")


LOOPS = {
    "step": (r"adam_loop<\S+::Vector, (\d), false, \S+::PlainMaster<(\d)> >\(", 1),
    "record": (r"record_loop<\S+::Vector, (\d), false, \S+::PlainMaster<(\d)> >\(", 1),
    "undo": (r"undo_loop<\S+::Vector, (\d), false, false, \S+::PlainMaster<(\d)> >\(", 1),
    "undo-redo": (r"undo_loop<\S+::Vector, (\d), false, true, \S+::PlainMaster<(\d)> >\(", 2),
}
"""Loops by the names of their functions, and square roots for one vector."""


def main() -> None:
    for isa in ISAS:
        for block in disassembly(isa).split("\n\n"):
            for name, (pattern, roots) in LOOPS.items():
                head = re.match(r"\s*[0-9a-f]+ <.*" + pattern, block.replace("(anonymous namespace)", "anonymous"))
                if head:
                    loop = main_loop(block, roots * VECTORS)
                    kinds = Counter(kind(mnemonic, operands) for _, mnemonic, operands in loop)
                    each = ", ".join(f"{k} {n / VECTORS:g}" for k, n in sorted(kinds.items()))
                    dtypes = f"{NAMES[int(head[1])]:>5} -> {NAMES[int(head[2])]:5}"
                    print(f"{isa:5}{name:10}{dtypes}{len(loop) / VECTORS:5g}  ({each})")


if __name__ == "__main__":
    main()
