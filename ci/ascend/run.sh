#!/usr/bin/env bash
# Lowers every Triton kernel to Linalg with triton-ascend, in an environment of its own: that package ships
# its own `triton`. Needs no NPU and no CANN. Arguments go to lower.py: --check, --update, --only, --dump.
#
#   ASCEND_ENV   where the environment lies (default: ~/.cache/tritonrec/ascend)
#   PYTHON       interpreter of the project, with torch (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/../.."
VERSION=3.2.0
PYTHON=${PYTHON:-.venv/bin/python}
ASCEND_ENV=${ASCEND_ENV:-$HOME/.cache/tritonrec/ascend}

if [ ! -x "$ASCEND_ENV/bin/python" ]; then
    "$PYTHON" -m venv "$ASCEND_ENV"
fi
if [ "$(cat "$ASCEND_ENV/version" 2>/dev/null || true)" != "$VERSION" ]; then
    # its wheel asks for versions of torch and numpy of its own, which lowering does not need
    if ! "$ASCEND_ENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        "triton-ascend==$VERSION" "pybind11>=2.13"; then
        echo "ci/ascend: triton-ascend==$VERSION is not installable here (Linux, CPython 3.9 to 3.11)" >&2
        exit 3
    fi
    # torch, numpy and tritonrec come from the project's environment, behind what is installed above
    "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        > "$("$ASCEND_ENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_project.pth"
    echo "$VERSION" > "$ASCEND_ENV/version"
fi
PYTHONPATH=.:ci/compile exec "$ASCEND_ENV/bin/python" ci/ascend/lower.py --wheel "$VERSION" "$@"
