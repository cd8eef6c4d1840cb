#!/usr/bin/env bash
# Build, test and time on a GPU machine whose Python already has torch; wheels of what it lacks may lie in .whl/.
# Usage: benchmarks/on_gpu.sh OUT_FOLDER [tests | sanitize | step:TOKENS:MODES | adam[:PARAMS[:THREADS]] | busy | probe ...]
# STEPS=N times N steps.
# (a + in MODES stands for a colon; adam's default is 128 million parameters on 1, 2, 4, 8 and 16 threads)
set -u
out=$1
shift
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Where pip puts ninja, which torch looks for on the PATH.
PATH=$(python3 -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
if compgen -G '.whl/*.whl' >/dev/null; then
  # The second way leaves alone what the system's own packages brought: pip cannot remove those.
  wheels=(python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir)
  "${wheels[@]}" --upgrade .whl/*.whl || "${wheels[@]}" --ignore-installed .whl/*.whl || exit 1
fi
python3 -m pip install -q --no-build-isolation --no-deps -e . || exit 1
python3 -c 'from superoffload.kernels import capabilities; print(capabilities())'

# DeepSpeed compiles its CPU Adam when it is first used; the benchmark then says why it does not take part.
peer_tools() {
  command -v g++ >/dev/null || echo "no g++: DeepSpeed's CPU Adam cannot be built here"
  command -v ninja >/dev/null || echo "no ninja: DeepSpeed's CPU Adam cannot be built here"
  python3 -c 'import importlib.util as u; exit(u.find_spec("deepspeed") is None)' || echo "no deepspeed in this Python"
}

for what in "$@"; do
  case $what in
    tests) # one process a file: device time is dear, and they are far from filling the device; what is timed goes alone
      alone=(tests/gpu/test_measuring_gpu.py tests/gpu/test_gauges_gpu.py)
      for file in tests/gpu/test_*.py; do
        [[ " ${alone[*]} " == *" $file "* ]] && continue
        timeout 280 python3 -m pytest "$file" -q >"$out/$(basename "$file" .py).log" 2>&1 &
      done
      wait
      for file in "${alone[@]}"; do
        timeout 120 python3 -m pytest "$file" -q >"$out/$(basename "$file" .py).log" 2>&1
      done
      for log in "$out"/test_*_gpu.log; do
        echo "== $(basename "$log" .log)"
        grep -E '^(FAILED|ERROR)|passed|failed|error' "$log" | tail -n 12
      done ;;
    step:*)
      IFS=: read -r _ tokens modes <<<"$what"
      python3 benchmarks/bench_step.py ${STEPS:+--steps "$STEPS"} --tokens "$tokens" --modes "${modes//+/:}" --trace "$out/traces" --out "$out/step_$tokens.json" ;;
    adam | adam:*)
      IFS=: read -r _ params threads <<<"$what"
      peer_tools
      python3 benchmarks/bench_adam.py --params "${params:-128000000}" --threads "${threads:-1,2,4,8,16}" --rounds 5 \
        --out "$out/adam.json" 2>&1 | tee "$out/adam.log" ;;
    sanitize) # torch's own check of what Python shows it: streams, events, tensors
      TORCH_CUDA_SANITIZER=1 timeout 200 python3 -m pytest tests/gpu/test_speculation_gpu.py tests/gpu/test_engine_gpu.py -q \
        -k "changes_no_bit or late_verdict or accumulation or zero_grad" 2>&1 | tee "$out/sanitize.log" | tail -n 30 ;;
    busy) # beside a thread that never lets go of Python's lock; at Python's own 5 ms a step takes 18 s and more
      engine=engine:50:speculate=on:loss=0.05
      python3 benchmarks/bench_step.py --size 3b-4-layers --tokens 8192 --steps 4 --warmup 2 --mode-timeout 120 \
        --modes "limit,$engine,limit:busy=1:interval_ms=0.02,$engine:busy=1:trace=0,$engine:busy=1" \
        --trace "$out/traces" --out "$out/step_busy.json"
      python3 benchmarks/bench_step.py --tokens 8192 --steps 4 --warmup 2 --mode-timeout 120 \
        --modes "limit,$engine,limit:busy=1:interval_ms=0.02,$engine:busy=1:trace=0" --out "$out/step_busy_26_layers.json"
      engine=engine:10:speculate=on:loss=0.05
      python3 benchmarks/bench_step.py --tokens 32768 --steps 4 --warmup 2 --mode-timeout 120 \
        --modes "limit,limit:busy=1:interval_ms=0.02,$engine:busy=1:trace=0" --out "$out/step_busy_32k.json" ;;
    probe) python3 -m superoffload probe --refresh --out "$out/probe.json" ;;
    *) echo "unknown: $what" >&2; exit 2 ;;
  esac
done
