#!/usr/bin/env bash
# What `pip install WHEEL` brings, as a bill of materials (CycloneDX, JSON): ci/sbom.sh WHEEL OUT. PYTHON chooses the
# interpreter. Needs cyclonedx-py, of the package cyclonedx-bom.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv --without-pip "$place/venv"
"${PYTHON:-python3}" -m pip --python "$place/venv/bin/python" install --quiet "$1"
mkdir -p "$(dirname "$2")"
cyclonedx-py environment --pyproject "$root/pyproject.toml" --mc-type library --output-reproducible \
    --of JSON --output-file "$2" "$place/venv/bin/python"
