#!/usr/bin/env bash
# Puts TorchRec and the CPU build of FBGEMM under out/torchrec, beside the environment's own torch, and runs
# what needs them: the example's tests, with `bench` as first argument the training step beside TorchRec's, or
# with `own-tests CLONE` TorchRec's own tests with our classes in place of TorchRec's.
# Their own requirements name CUDA builds, so every package is taken without dependencies.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
if [ ! -d out/torchrec/torchrec ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target out/torchrec \
        torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict pyre-extensions torchmetrics lightning-utilities \
        iopath typing-inspect mypy-extensions portalocker cloudpickle orjson tqdm pyvers parameterized
fi
if [ "${1:-}" = bench ]; then
    shift
    exec "$python" ci/benchmarks/bench_torchrec.py "$@"
fi
if [ "${1:-}" = own-tests ]; then
    shift
    PYTHONPATH=$PWD:$PWD/out/torchrec exec "$python" ci/torchrec_tests.py "$@"
fi
PYTHONPATH=$PWD/out/torchrec "$python" -m pytest -q tests/examples/test_examples.py "$@"
