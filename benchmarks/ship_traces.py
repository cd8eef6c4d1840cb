"""Make the package's measured steps of the recorded ones: times to a tenth of a microsecond, gzipped JSON.

    python benchmarks/ship_traces.py            # writes superoffload/recorded/*.json.gz
    python benchmarks/ship_traces.py --check    # says what differs, and writes nothing

The newest file of each step counts. The same input gives the same JSON; how gzip packs it may differ from one version
of zlib to the next, so that what is compared is the JSON.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path
from typing import Any

from superoffload.measured_step import FOLDER, SUFFIX, MeasuredStep

RESULTS = Path(__file__).with_name("results")
DIGITS = 7
"""Of seconds: clocks of the GPU tick in half microseconds."""
LIMIT_BYTES = 1_000_000
"""For all steps together."""


def newest(folder: Path = RESULTS) -> dict[str, MeasuredStep]:
    """The last recorded step of each name."""
    found: dict[str, MeasuredStep] = {}
    for path in folder.glob("measured_step_*.json"):
        step = MeasuredStep.load(path)
        if step.name not in found or step.date > found[step.name].date:
            found[step.name] = step
    return dict(sorted(found.items()))


def shipped(step: MeasuredStep) -> str:
    """The JSON that the package holds of a step."""
    body = step.model_dump(mode="json")
    body["trace"] = _rounded(body["trace"])
    body["profile"]["blocks"] = _rounded(body["profile"]["blocks"])
    body["steps_s"] = _rounded(body["steps_s"])
    return MeasuredStep.from_dict(body).to_json(indent=None)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    wanted = {f"{name}{SUFFIX}": shipped(step) for name, step in newest().items()}
    there = {path.name: gzip.decompress(path.read_bytes()).decode() for path in FOLDER.glob(f"*{SUFFIX}")}
    differing = sorted({*wanted, *there} - {n for n in wanted if wanted[n] == there.get(n)})
    if args.check:
        if differing:
            sys.exit(f"not what benchmarks/results gives: {', '.join(differing)}; run python benchmarks/ship_traces.py")
        return
    FOLDER.mkdir(exist_ok=True)
    for name in differing:
        if name in wanted:
            (FOLDER / name).write_bytes(gzip.compress(wanted[name].encode(), compresslevel=9, mtime=0))
        else:
            (FOLDER / name).unlink()
    total = sum(path.stat().st_size for path in FOLDER.glob(f"*{SUFFIX}"))
    if total > LIMIT_BYTES:
        sys.exit(f"{total:,} bytes together, above {LIMIT_BYTES:,}")
    print(f"{len(wanted)} steps, {total:,} bytes; written: {', '.join(differing) or 'none'}")


if __name__ == "__main__":
    main()
