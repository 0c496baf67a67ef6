#!/usr/bin/env bash
# A wheel of this checkout: ci/wheel.sh FOLDER [KERNELS]. With KERNELS, a folder that ci/compile/ahead.py has filled,
# the wheel brings these, and its first calls compile nothing. PYTHON chooses the interpreter, which needs pip alone.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source=$(mktemp -d) # a build leaves files beside the sources
trap 'rm -rf "$source"' EXIT
cp -r "$root"/{tritonrec,pyproject.toml,README.md,LICENSE} "$source"
if [[ ${2:-} ]]; then
    cp -r "$2" "$source/tritonrec/kernels/compiled"
fi
"${PYTHON:-python3}" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$1" "$source"
