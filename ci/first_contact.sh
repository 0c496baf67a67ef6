#!/usr/bin/env bash
# Somebody's first ten minutes, in a temporary folder: ci/first_contact.sh [WHEEL]. A fresh virtual environment, the
# wheel (without one, a plain wheel of this checkout), the README's lines pasted, a model trained, exported, loaded
# again and queried. Prints the seconds of each part, and fails where a part does, where the README's lines print other
# digits, beyond ten minutes in all, and where a kernel is compiled that WHEEL should have brought (`make wheel`).
#
# PYTHON=python3.12 chooses the interpreter. CONSTRAINTS=file bounds versions, constraints.txt by default.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
constraints=$(realpath "${CONSTRAINTS:-$root/constraints.txt}")
given=${1:+$(realpath "$1")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH # the wheel is what is tried
export NUMBA_CACHE_DIR=$work/kernels # what is compiled
mkdir kernels
started=$(date +%s%N)

milliseconds() { echo $((($(date +%s%N) - started) / 1000000)); }

part() { # what it is, and its command, in which && joins steps: bash ends no condition at a failure
    local before log=$work/part.log
    before=$(milliseconds)
    if ! "${@:2}" >"$log" 2>&1; then
        cat "$log"
        echo "FAILED  $1"
        exit 1
    fi
    awk -v title="$1" -v spent=$(($(milliseconds) - before)) 'BEGIN { printf "%7.1f s  %s\n", spent / 1000, title }'
}

wheel() {
    if [[ $given ]]; then
        mkdir wheels && cp "$given" wheels
    else
        PYTHON=venv/bin/python "$root/ci/wheel.sh" wheels
    fi
}

install() { venv/bin/pip install -c "$constraints" wheels/tritonrec-*.whl; }

readme() { # its first block of Python, whose output is the block behind it
    awk '/^```/ { number += !open; open = !open; language = substr($0, 4); next }
         open && language == "python" && !code { code = number }
         open && code && number == code { print > "pasted.py" }
         open && code && number == code + 1 { print > "expected.txt" }' "$root/README.md" &&
    venv/bin/python pasted.py | tee printed.txt &&
    diff expected.txt printed.txt
}

train() {
    venv/bin/tritonrec train --data zipf:users=300,items=500,seed=3 --dim 16 --steps 20 --checkpoint run
}

export_model() { venv/bin/tritonrec export run model; }

query() {
    venv/bin/python - <<'PYTHON'
import torch
from tritonrec.serving import Predictor

items, scores = Predictor.load("model").retrieve(torch.tensor([3, 7, 12]), k=5)
assert items.shape == scores.shape == (1, 5) and bool(scores.isfinite().all()), (items, scores)
PYTHON
}

part "virtual environment" "${PYTHON:-python3}" -m venv venv
part "wheel" wheel
part "pip install, downloads included" install
part "the README's lines, pasted" readme
part "tritonrec train" train
part "tritonrec export" export_model
part "loaded again and queried" query
compiled=$(find kernels -name '*.nbc' | wc -l)
echo "$compiled kernels compiled"
if [[ $given ]] && ((compiled > 0)); then
    find kernels -name '*.nbc' -printf '%f\n'
    echo "FAILED  the wheel brings no kernels for these calls, this Python, its numba or this processor"
    exit 1
fi
total=$(milliseconds)
awk -v spent="$total" 'BEGIN { printf "%7.1f s  in all\n", spent / 1000 }'
if ((total > 600000)); then
    echo "FAILED  a first contact takes ten minutes at most"
    exit 1
fi
