#!/usr/bin/env bash
# Build, test and time on a GPU machine whose Python already has torch; wheels of what it lacks may lie in .whl/.
# Usage: benchmarks/on_gpu.sh OUT_FOLDER [tests | step:TOKENS:MODES | adam:PARAMS:THREADS ...]  (a + in MODES stands for a colon)
set -u
out=$1
shift
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
[ -d .whl ] && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade .whl/*.whl
python3 -m pip install -q --no-build-isolation --no-deps -e . || exit 1
python3 -c 'from superoffload.kernels import capabilities; print(capabilities())'
for what in "$@"; do
  case $what in
    tests) timeout 280 python3 -m pytest tests/gpu -q 2>&1 | tee "$out/tests.log" | tail -n 40 ;;
    step:*)
      IFS=: read -r _ tokens modes <<<"$what"
      python3 benchmarks/bench_step.py --tokens "$tokens" --modes "${modes//+/:}" --trace "$out/traces" --out "$out/step_$tokens.json" ;;
    adam:*)
      IFS=: read -r _ params threads <<<"$what"
      python3 benchmarks/bench_adam.py --params "$params" --threads "$threads" --rounds 5 --out "$out/adam.json" ;;
    *) echo "unknown: $what" >&2; exit 2 ;;
  esac
done
