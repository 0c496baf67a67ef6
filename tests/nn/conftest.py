"""Tests of models share the rule for float errors with those of kernels, and single ops with ci."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "kernels"), str(ROOT / "ci" / "benchmarks")]
