#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in stages of under ten minutes each: no network, torch >= 2.11 and
# Triton >= 3.6 installed, a checkout of this repository.
#
#   ci/gpu/run.sh first         kernels at sizes of work: device and host time, share of the roof, error, a peer
#   ci/gpu/run.sh correctness   kernel tests with Triton on the GPU; memcheck and racecheck of every launch
#   ci/gpu/run.sh bench         every kernel beside its peers and a copy; then the ratios
#   ci/gpu/run.sh tune          times the candidates of ci/compile/tune.py, one kernel after another, until time is up
#   ci/gpu/run.sh pipeline      NestPipe steps: dense model on the GPU, tables on the host, on the GPU, cached there
#   ci/gpu/run.sh verify        `tritonrec verify --quick --device cuda`: every mode and storage, one rank
#   ci/gpu/run.sh profile       torch.profiler over the kernels: a Chrome trace and a table of device times
#   ci/gpu/run.sh all           one after another
#   ci/gpu/run.sh --rehearse [STAGE ...]   the same stages without a GPU: Triton in the interpreter, tiny shapes
#
#   OUT      where JSON and traces go (default: out/gpu)
#   PYTHON   interpreter (default: .venv/bin/python if there is one, else python3)
#   PEERS    folder with sources of peers: its bench_*.py run beside ours, its folders can be imported
set -uo pipefail
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || PYTHON=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
OUT=$(mkdir -p "${OUT:-out/gpu}" && cd "${OUT:-out/gpu}" && pwd)
export PYTHONPATH=.:ci/compile:${PEERS:-}${PYTHONPATH:+:$PYTHONPATH}
LIMIT=570  # seconds of a stage

rehearse=false
if [ "${1:-}" = "--rehearse" ]; then
    rehearse=true
    shift
    export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=
elif ! "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    echo "ci/gpu/run.sh: torch sees no GPU; ci/gpu/run.sh --rehearse runs the stages without one" >&2
    exit 2
fi

within() { # seconds that are left of the stage, then the command
    local left=$((LIMIT - (SECONDS - began)))
    timeout --kill-after=10 $((left > 5 ? left : 5)) "$@"
}

correctness() {
    local code=0 processes=$(($(nproc) > 2 ? $(nproc) - 2 : 1))
    if $rehearse; then
        within "$PYTHON" -m pytest -q -m interpreter -k "bits_of_the_cpu" tests/kernels/test_silu.py \
            --junit-xml "$OUT/tests.xml" || return 1
    else
        within "$PYTHON" -m pytest -q -n "$processes" --dist worksteal -m "gpu and not slow" \
            --most-cases 6 tests/kernels --junit-xml "$OUT/tests.xml" 2>&1 | tee "$OUT/tests.log"
        code=${PIPESTATUS[0]}
    fi
    local sanitizer
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
    if $rehearse || [ -z "$sanitizer" ]; then
        echo "no compute-sanitizer: the launches run without it, races are not looked for"
        within "$PYTHON" ci/gpu/launch_all.py --json "$OUT/launches.json" $($rehearse && echo --only silu) || code=1
        return $code
    fi
    # racecheck sees races in shared memory; those between blocks in global memory no tool here sees
    local tool
    for tool in memcheck racecheck; do
        within "$sanitizer" --tool "$tool" --error-exitcode 9 --log-file "$OUT/$tool.log" \
            "$PYTHON" ci/gpu/launch_all.py --json "$OUT/launches_$tool.json" || code=1
    done
    return $code  # the sanitizers ran whatever came before
}

first() {
    within "$PYTHON" ci/gpu/first.py --json "$OUT/first.json" $($rehearse && echo --device cpu)
}

bench() {
    if $rehearse; then
        within "$PYTHON" -m pytest -q ci/benchmarks/bench_kernels.py -k "murmur or silu" --benchmark-max-time=0.02 \
            --benchmark-min-rounds=2 --benchmark-json "$OUT/bench.json" || return 1
    else
        within "$PYTHON" -m pytest -q -m gpu ci/benchmarks/bench_*.py $(ls "${PEERS:-/none}"/bench_*.py 2>/dev/null) \
            --benchmark-max-time=0.3 --benchmark-json "$OUT/bench.json" || return 1
    fi
    "$PYTHON" -m tritonrec.harness.bench "$OUT/bench.json" > "$OUT/bench.txt" && grep "ratios are wins" "$OUT/bench.txt"
}

tune() {
    $rehearse && { within "$PYTHON" ci/compile/tune.py --help > /dev/null; return; }
    within "$PYTHON" ci/compile/tune.py --json "$OUT/tune.json" | tee "$OUT/tune.txt"
    return "${PIPESTATUS[0]}"
}

pipeline() {
    local size=()
    $rehearse && size=(--steps 3 --batch-size 8 --device cpu)
    within "$PYTHON" ci/gpu/pipeline.py --json "$OUT/pipeline.json" --trace "$OUT/pipeline.pftrace" "${size[@]}"
}

verify() { # the modes side by side: each case compiles kernels of its own, on one core
    local code=0 mode modes=(dbp fwp nestpipe) size=(--device cuda)
    $rehearse && modes=(nestpipe) size=(--micro-batches 2 --steps 2)
    for mode in "${modes[@]}"; do
        TRITON_INTERPRET= within "$PYTHON" -m tritonrec verify --quick --world-size 1 --data zipf --modes "$mode" \
            --json "$OUT/verify_$mode.json" "${size[@]}" > "$OUT/verify_$mode.log" 2>&1 &
    done
    for mode in "${modes[@]}"; do
        wait -n || code=1
    done
    tail -n 4 "$OUT"/verify_*.log
    return $code
}

profile() {
    local size=()
    $rehearse && size=(--only silu)
    within "$PYTHON" ci/gpu/launch_all.py --profile "$OUT/kernels.trace.json" --json "$OUT/profile.json" "${size[@]}"
}

stages=("${@:-all}")
[ "${stages[0]}" = all ] && stages=(first correctness bench tune pipeline verify profile)
failed=()
for stage in "${stages[@]}"; do
    case $stage in
        first | correctness | bench | tune | pipeline | verify | profile) ;;
        *) echo "ci/gpu/run.sh: no stage $stage (see the head of this file)" >&2; exit 2 ;;
    esac
    echo "== $stage"
    began=$SECONDS
    "$stage" || failed+=("$stage")
    echo "== $stage: $((SECONDS - began)) s"
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
