"""`tritonrec doctor` passes here, and fails where a matmul breaks the promise."""

import io

import pytest
import torch
from rich.console import Console

from tritonrec import ops
from tritonrec.harness import doctor as doctor_module
from tritonrec.harness.doctor import _movielens, doctor, first_variance, thread_counts


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


def by_sign(x, weight, bias):
    """Zeros whose sign depends on the size of the batch: equal values, other bits."""
    zeros = torch.zeros(len(x), len(weight), dtype=torch.float32)
    return zeros if len(x) > 4 else -zeros


def test_an_invariant_matmul_passes(two_threads):
    assert first_variance(exact, [2, 1]) is None
    assert torch.get_num_threads() == 2


def test_a_matmul_that_looks_at_its_batch_is_found():
    assert "differs when computed in a batch of 1 rows with 1 threads" in first_variance(by_rows, [1])


def test_zeros_of_another_sign_are_other_bits():
    assert "row 0 of x" in first_variance(by_sign, [1])


def test_a_matmul_that_looks_at_its_threads_is_found(two_threads):
    assert "with 2 threads" in first_variance(by_threads, [1, 2])


def test_thread_counts_are_powers_of_two_and_the_present_one(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert thread_counts() == [1, 2, 4, 6]


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


@pytest.mark.parametrize("cache", ["memory://x", "~nobody-at-all"])
def test_a_cache_that_cannot_be_is_a_line_of_the_table(cache, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", cache)
    assert "TRITONREC_CACHE" in _movielens()


@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_without_triton_its_kernels_run_nowhere(monkeypatch, interpreted):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert "not installed" not in doctor_module._triton_mode()
    monkeypatch.setattr(doctor_module, "find_spec", lambda name: None)
    assert "not installed (pip install 'tritonrec[triton]')" in doctor_module._triton_mode()
    monkeypatch.setattr(doctor_module, "first_variance", lambda linear, counts: None)
    console = Console(record=True, width=200, file=io.StringIO())
    doctor_module.doctor(console)
    assert "pip install 'tritonrec[triton]'" in console.export_text()
