#!/usr/bin/env bash
# Everything that runs without an accelerator: lint, tests, and the short contract table.
set -euo pipefail
cd "$(dirname "$0")/.."
make lint
make test-long
.venv/bin/tritonrec verify --quick --data zipf
