"""`tritonrec doctor` passes here, and fails where a matmul breaks the promise."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from tritonrec import ops
from tritonrec.harness.doctor import doctor, first_variance


def exact(x, weight, bias):
    """Invariant by construction: one row at a time, reduced column by column."""
    return (x.double().unsqueeze(1) * weight.double()).cumsum(2)[..., -1].float() + bias


def by_rows(x, weight, bias):
    """Another reduction when the batch is small, as BLAS libraries do."""
    y = exact(x, weight, bias)
    return y if len(x) > 4 else torch.nextafter(y, torch.tensor(torch.inf))


def by_threads(x, weight, bias):
    y = exact(x, weight, bias)
    return y if torch.get_num_threads() == 1 else y * (1 + 2**-23)


def test_an_invariant_matmul_passes(two_threads):
    assert first_variance(exact, [1, 2]) is None
    assert torch.get_num_threads() == 2


def test_a_matmul_that_looks_at_its_batch_is_found():
    assert "differs when computed in a batch of 1 rows with 1 threads" in first_variance(by_rows, [1])


def test_a_matmul_that_looks_at_its_threads_is_found(two_threads):
    assert "with 2 threads" in first_variance(by_threads, [1, 2])


def test_this_machine_passes():
    console = Console(file=io.StringIO(), width=160)
    assert doctor(console) == 0
    text = console.file.getvalue()
    assert torch.__version__ in text and "gloo" in text and "rows keep their bits in any batch" in text


def test_a_broken_machine_fails(monkeypatch):
    monkeypatch.setattr(ops, "linear", lambda x, weight, bias, impl: by_rows(x, weight, bias))
    console = Console(file=io.StringIO(), width=160)
    assert doctor(console) == 1
    assert "broken: row 0" in console.file.getvalue()
