"""Promise: an error that is put off is raised by the next check, the first one first, and by nobody else."""

import threading

import pytest
import torch

from tritonrec import ops
from tritonrec.kernels.deferred import NONE, DeferredErrors


def add(row, column, name, impl="triton"):
    """An exact sum of 200 rows, of which one value is not a number."""
    values = torch.randn(200, 3, generator=torch.Generator().manual_seed(row))
    values[row, column] = torch.nan
    segments = torch.arange(200) % 4
    return ops.segment_sum(values, segments, 4, consistency="batch", name=name, impl=impl)


@pytest.mark.interpreter
def test_the_first_of_several_errors_is_raised_by_the_check_and_once():
    errors = DeferredErrors()
    with errors.active():
        ops.segment_sum(torch.ones(5, 3), torch.zeros(5).long(), 1, consistency="batch", impl="triton")
        add(150, 2, "first")
        add(3, 0, "second")
    with pytest.raises(ops.ExactSumError, match=r"^first\[150, 2\]") as raised:
        errors.check()
    assert raised.value.value is None
    errors.check()


@pytest.mark.interpreter
def test_without_a_bad_value_the_check_is_silent():
    errors = DeferredErrors()
    with errors.active():
        ops.segment_sum(torch.ones(5, 3), torch.zeros(5).long(), 2, consistency="batch", impl="triton")
        ops.to_fixed_point(torch.ones(7), impl="triton")
    errors.check()


@pytest.mark.interpreter
def test_outside_and_on_other_threads_errors_are_raised_at_once():
    errors, raised = DeferredErrors(), []

    def elsewhere():
        try:
            add(1, 1, "elsewhere")
        except ops.ExactSumError as error:
            raised.append(error.name)

    with errors.active():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert raised == ["elsewhere"]
    with pytest.raises(ops.ExactSumError, match=r"^here\[7, 2\] = nan"):
        add(7, 2, "here")
    errors.check()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_an_implementation_that_knows_the_value_raises_it_at_once(impl):
    with DeferredErrors().active(), pytest.raises(ops.ExactSumError, match=r"^here\[7, 2\] = nan"):
        add(7, 2, "here", impl)


def test_errors_that_are_dropped_are_told_of_once_and_others_are_kept():
    errors = DeferredErrors(drops=True)
    fine, bad = torch.full((3,), NONE), torch.tensor([NONE, 4, NONE])
    errors.add(fine, ArithmeticError)
    assert not errors.dropped(torch.device("cpu"))
    errors.add(bad, ArithmeticError)
    errors.add(bad, KeyError)
    assert errors.dropped(torch.device("cpu")) and not errors.dropped(torch.device("cpu"))
    with pytest.raises(KeyError):
        errors.check()
    with pytest.raises(ValueError):
        errors.refuse(ValueError())
    errors.refuse(ArithmeticError())
    errors.add(fine, ArithmeticError)
    assert errors.dropped(torch.device("cpu")) and not errors.dropped(torch.device("cpu"))


def test_errors_are_put_off_again_by_what_the_positions_are_now():
    made, positions = DeferredErrors(), torch.full((3,), NONE)
    made.add(positions, KeyError)
    positions[1] = 7
    again = DeferredErrors()
    with again.active():
        made.repeat()
    positions.fill_(NONE)
    made.check()
    with pytest.raises(KeyError, match="8"):
        again.check()
