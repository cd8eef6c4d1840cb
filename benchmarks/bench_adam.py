"""CPU Adam against torch's fused AdamW, DeepSpeed's CPU Adam and the memory system; see superoffload/kernels/bench.py.

python benchmarks/bench_adam.py --params 64000000 --threads 1,2 --out benchmarks/results/adam_<hardware>_<date>.json
"""

from __future__ import annotations

import argparse
import json
import sys

from superoffload.kernels import bench
from superoffload.record import write_atomic

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--params", type=int, default=64_000_000)
parser.add_argument("--threads", default="", help="comma-separated; default: one and all cores")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--out", default="")
args = parser.parse_args()
counts = [int(t) for t in args.threads.split(",") if t]
result = bench.bench_adam(
    params=args.params, threads=counts or None, rounds=args.rounds, progress=lambda s: print(s, file=sys.stderr)
)
if args.out:
    write_atomic(args.out, json.dumps(result, indent=1) + "\n")
print(bench.as_table(result))
