#!/usr/bin/env bash
# Puts TorchRec and the CPU build of FBGEMM under out/torchrec, beside the environment's own torch, and runs
# what needs them: the example's tests, or with `bench` as first argument the training step beside TorchRec's.
# Their own requirements name CUDA builds, so every package is taken without dependencies.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
if [ ! -d out/torchrec/torchrec ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target out/torchrec \
        torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict pyre-extensions torchmetrics lightning-utilities \
        iopath typing-inspect mypy-extensions portalocker cloudpickle orjson tqdm pyvers
fi
if [ "${1:-}" = bench ]; then
    shift
    exec "$python" ci/benchmarks/bench_torchrec.py "$@"
fi
PYTHONPATH=$PWD/out/torchrec "$python" -m pytest -q tests/examples/test_examples.py "$@"
