"""Faults injected in the Triton kernels: the ordinary checks of each op find every one of them."""

import mutants_of_dense_layers
import mutants_of_keys
import pytest
import test_sparse_optimizers
import torch
from mutate import mutated, red
from poison import poisoned_memory
from speeds import slow_except

from tritonrec.kernels import dispatch
from tritonrec.kernels.sparse_optimizers import numba_sparse_optimizers

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # a mutant may take the root of a negative number
    pytest.mark.skipif(
        torch.cuda.is_available() or dispatch.emulated is not None,
        reason="checks are sized for the interpreter's tiles",
    ),
]
CHECKS = mutants_of_keys.CHECKS | mutants_of_dense_layers.CHECKS
MUTANTS = mutants_of_keys.MUTANTS | mutants_of_dense_layers.MUTANTS
SPECIAL = mutants_of_keys.SPECIAL | mutants_of_dense_layers.SPECIAL
PAIRS = [(module, name) for module, mutants in MUTANTS.items() for name in mutants]
QUICK = [(module, next(iter(mutants))) for module, mutants in MUTANTS.items()]


@pytest.mark.parametrize("module", slow_except(["unique.triton_unique", "silu.triton_silu"], CHECKS))
def test_the_kernel_itself_passes(module, tmp_path):
    """Loaded as a mutant is, with nothing edited."""
    with mutated(module, [], tmp_path), poisoned_memory():
        for check in CHECKS[module]:
            check()


@pytest.mark.parametrize(("module", "name"), slow_except(QUICK, PAIRS))
def test_a_mutant_is_found_out(module, name, tmp_path):
    with mutated(module, MUTANTS[module][name], tmp_path):
        assert red(CHECKS[module]), f"{name} of {module} survives"


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIAL)
def test_an_edit_with_a_check_of_its_own_is_found_out(name, tmp_path):
    module, edits, check = SPECIAL[name]
    with mutated(module, edits, tmp_path):
        assert red([check]), f"{name} survives"


@pytest.mark.slow
def test_long_attention_passes():
    mutants_of_dense_layers.long_attention()


def test_an_edit_that_no_longer_fits_is_named(tmp_path):
    with (
        pytest.raises(AssertionError, match="has no 'no such text' any more"),
        mutated("silu.triton_silu", [("no such text", "")], tmp_path),
    ):
        pass


def test_a_step_off_by_one_is_found_out(monkeypatch):
    """Adam's bias correction is computed on the host, for all implementations."""
    scalars = numba_sparse_optimizers.scalars

    def later(*arguments):
        return scalars(*arguments[:-1], arguments[-1] + 1)

    check = test_sparse_optimizers.test_adam_is_as_close_to_float64_as_torch_sparse_adam
    check()
    monkeypatch.setattr(numba_sparse_optimizers, "scalars", later)
    assert red([check])
