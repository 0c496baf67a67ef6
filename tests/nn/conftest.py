"""Tests of models share the rule for float errors with those of kernels, and single ops with ci."""

from contextlib import ExitStack

import pytest
import torch

from tritonrec import ops
from tritonrec.nn import GradientAccumulator


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


@pytest.fixture
def same_sums(accumulate):
    """Compares a model's exact sums over a batch with those over its parts, one by one."""

    def compare(model, train, whole, parts):
        found = []
        for batches in ([whole], parts):
            found.append(accumulate(model))
            for batch in batches:
                train(model, *batch)
        assert found[0].keys() == dict(model.named_parameters()).keys()
        for name, total in found[0].items():
            assert total.any() and torch.equal(found[1][name], total), name

    return compare
