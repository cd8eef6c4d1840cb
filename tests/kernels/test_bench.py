"""The benchmark's own arithmetic and keys; its figures are for quiet machines."""

import json
import subprocess
import sys


def test_bench_adam_prints_the_promised_keys():
    command = [sys.executable, "-m", "superoffload", "bench", "adam", "--params", "200000", "--rounds", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    result = json.loads(done.stdout)
    assert {"vs_torch_fused", "path_vs_torch", "ceiling_fraction", "undo_overhead"} <= set(result)
    assert result["status"] == "measured" and result["machine"]["cpu"]
    for row in result["threads"]:
        seconds, ratios = row["seconds"], row["ratios"]
        assert all(t > 0 for t in seconds.values())
        assert {"ours_undo_redo", "torch_path", "stream"} <= set(seconds)
        assert ratios["path_vs_torch"] > 0
    top = result["threads"][-1]
    assert result["path_vs_torch"] == top["ratios"]["path_vs_torch"]
