"""Tests of models share the rule for float errors with those of kernels, and single ops with ci."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tritonrec import ops
from tritonrec.nn import GradientAccumulator

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "kernels"), str(ROOT / "ci" / "benchmarks")]


@pytest.fixture
def accumulate():
    """``accumulate(model)``: its exact gradient sums by name, active until the next call; None ends it."""
    with ExitStack() as stack:

        def start(model, fraction_bits=ops.FRACTION_BITS):
            stack.close()
            if model is None:
                return {}
            accumulator = GradientAccumulator(model, fraction_bits)
            stack.enter_context(accumulator.active())
            return accumulator.sums

        yield start
