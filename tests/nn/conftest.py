"""Tests of models take the rule for float errors from those of kernels."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
