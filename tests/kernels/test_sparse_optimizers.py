"""Fused sparse updates: the same bits in all implementations, touched rows only, any row stride."""

import pytest
import torch
from impls import GPU, IMPLS, TRITON, on

from tritonrec import ops
from tritonrec.kernels.sparse_optimizers.op import (
    sparse_adam,
    sparse_lazy_decay,
    sparse_sgd,
)

STATES = {  # of the tables weight, wide, wide, narrow
    "sgd": [],
    "momentum_sgd": [1],
    "nesterov_sgd": [1],
    "adagrad": [2],
    "rowwise_adagrad": [3],
    "adam": [1, 2],
    "adamw": [1, 2],
    "rowwise_adam": [1, 3],
    "lamb": [1, 2],
    "rowwise_lamb": [1, 3],
    "rowwise_adagradw": [3],
    "ftrl": [1, 2],
    "lars_sgd": [1],
}
OPTIMIZERS = list(STATES)
WITH_EPS = OPTIMIZERS[3:-1]
WITH_STEP = OPTIMIZERS[5:10]


def update(optimizer, tables, indices, grad, step, impl, lr=0.1, eps=1e-8, weight_decay=0.0):
    """One step on (weight, first moment, second moment, one of a row), of which each rule uses its own."""
    given = {"weight_decay": weight_decay, "impl": impl}
    given |= {"eps": eps} if optimizer in WITH_EPS else {}
    given |= {"step": step} if optimizer in WITH_STEP else {}
    given |= {"l1": 0.1} if optimizer == "ftrl" else {}
    given |= {"nesterov": True} if optimizer == "nesterov_sgd" else {}
    states = [tables[state] for state in STATES[optimizer]]
    function = getattr(ops, f"sparse_{optimizer.replace('nesterov', 'momentum')}")
    function(tables[0], *states, indices, grad, lr, **given)


def run(optimizer, impl, rows, dim, touched, steps=3, pad=0, seed=0, **numbers):
    """A (R, 3D + 1 + pad) buffer after some steps, beside the buffer before and the touched rows."""
    device = "cuda" if impl == "triton" and GPU else "cpu"
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(rows, 3 * dim + 1 + pad, generator=generator)
    before[:, 2 * dim :] = before[:, 2 * dim :].square()
    if pad:
        before[:, -pad:] = float("nan")
    after = before.to(device, copy=True)
    tables = after[:, : 3 * dim + 1].split([dim, dim, dim, 1], 1)
    indices = torch.randperm(rows, generator=generator)[:touched].to(device)
    for step in range(1, steps + 1):
        wide = torch.randn(touched, dim + pad, generator=generator) * 10.0 ** (step - 2)
        update(optimizer, tables, indices, wide.to(device)[:, :dim], step, impl, **numbers)
    return after.cpu(), before, indices.cpu()


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


WIDTHS = [{"rows": 40, "dim": d, "touched": 19, "pad": 3} for d in (1, 2, 7, 15, 16, 17, 33, 64, 128, 129)]
AROUND_A_TILE = [{"rows": 33, "dim": 32, "touched": t, "steps": 1} for t in (0, 1, 31, 32, 33)]


@pytest.mark.parametrize("given", [*WIDTHS, *AROUND_A_TILE], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_equals_the_reference(impl, optimizer, given):
    assert same_bits(run(optimizer, impl, **given)[0], run(optimizer, "reference", **given)[0])


@pytest.mark.parametrize(
    ("optimizer", "name", "number", "other"),
    [*((o, "weight_decay", 0.3, 0.2) for o in OPTIMIZERS), *((o, "eps", 0.5, 0.4) for o in WITH_EPS)],
)
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_a_number_counts(impl, optimizer, name, number, other):
    """Beside states of order 1 the default eps of 1e-8 rounds away."""
    given = {"rows": 12, "dim": 18, "touched": 9, "pad": 1}
    got, _, _ = run(optimizer, impl, **{name: number}, **given)
    assert same_bits(got, run(optimizer, "reference", **{name: number}, **given)[0])
    assert not same_bits(got, run(optimizer, "reference", **{name: other}, **given)[0])


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_zero_gradient_without_eps_is_the_references_nan():
    tables = [torch.zeros(2, width) for width in (3, 3, 3, 1)]
    for optimizer in WITH_EPS:
        results = []
        for impl in ("reference", "cpu"):
            copies = [table.clone() for table in tables]
            update(optimizer, copies, torch.tensor([1]), torch.zeros(1, 3), 1, impl, eps=0.0)
            results.append(copies[0])
        assert results[0][1].isnan().all() and torch.equal(results[0].isnan(), results[1].isnan())


FAMILIES = {  # rule -> torch.optim's, of which each row is a parameter, since it keeps what got no gradient
    "momentum_sgd": lambda rows: torch.optim.SGD(rows, 0.01, momentum=0.9, weight_decay=0.1),
    "nesterov_sgd": lambda rows: torch.optim.SGD(rows, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda rows: torch.optim.Adagrad(rows, 0.01, weight_decay=0.1, eps=1e-2),
    "adamw": lambda rows: torch.optim.AdamW(rows, 0.01, weight_decay=0.1, eps=1e-2),
    "adam": lambda rows: torch.optim.Adam(rows, 0.01, weight_decay=0.1, eps=1e-8),
}


@pytest.mark.parametrize("optimizer", FAMILIES)
def test_a_row_touched_in_every_step_is_as_close_to_float64_as_torch(optimizer):
    generator = torch.Generator().manual_seed(8)
    start, eps = torch.randn(6, 16, generator=generator), 1e-8 if optimizer == "adam" else 1e-2
    ours = [start.clone(), torch.zeros(6, 16), torch.zeros(6, 16), torch.zeros(6, 1)]
    plain, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.double())
    theirs = [FAMILIES[optimizer]([parameter]) for parameter in (plain, exact)]
    for step in range(1, 21):
        grad = torch.randn(6, 16, generator=generator)
        update(optimizer, ours, torch.arange(6), grad, step, "auto", 0.01, eps, weight_decay=0.1)
        for parameter, rule in zip((plain, exact), theirs, strict=True):
            parameter.grad = grad.to(parameter.dtype)
            rule.step()
    error = (ours[0] - exact).abs()
    assert error.max() <= 2 * (plain - exact).abs().max(), f"worst element {divmod(int(error.argmax()), 16)}"


def in_float64(optimizer, w, m, v, g, step, lr=0.1, wd=0.2):
    """New weight and states of a row, as FBGEMM's generated code has them, FTRL as McMahan et al. have it."""
    if optimizer.startswith("rowwise_adagrad"):
        decoupled = optimizer.endswith("w")
        g = g if decoupled else g + wd * w
        v = v + g.square().mean()
        return (1 - lr * wd * decoupled) * w - lr / (v.sqrt() + 0.1) * g, m, v
    if optimizer == "lars_sgd":
        rate = lr * 0.5 * w.norm() / (g.norm() + wd * w.norm()) if w.norm() * g.norm() else lr
        m = 0.9 * m + rate * (g + wd * w)
        return w - m, m, v
    if optimizer == "ftrl":
        sigma, v = ((v + g * g).sqrt() - v.sqrt()) / lr, v + g * g
        m = m + g - sigma * w
        return torch.where(m.abs() <= 0.3, 0, -(m - 0.3 * m.sign()) / ((0.1 + v.sqrt()) / lr + wd)), m, v
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * (g.square().mean() if optimizer.startswith("rowwise") else g * g)
    change = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 0.1) + wd * w
    ratio = w.norm() / change.norm() if "lamb" in optimizer and w.norm() * change.norm() else 1
    return w - lr * ratio * change, m, v


FORMULAS = ["rowwise_adagrad", "rowwise_adagradw", "rowwise_adam", "lars_sgd", "ftrl", "lamb", "rowwise_lamb"]


@pytest.mark.parametrize("optimizer", FORMULAS)
def test_rules_of_fbgemm_and_ftrl_are_their_formulas(optimizer):
    """Row 0 begins at 0, row 1 has gradients of 0, row 3 none."""
    generator, at = torch.Generator().manual_seed(9), STATES[optimizer]
    tables = [torch.randn(4, 9, generator=generator), *(torch.zeros(4, each) for each in (9, 9, 1))]
    tables[0][0] = 0
    exact = [table.double() for table in tables]
    second = 3 if 3 in at else 2
    given = {"weight_decay": 0.2, "eps": 0.1}
    given |= {"ftrl": {"l1": 0.3}, "lars_sgd": {"eta": 0.5}}.get(optimizer, {})
    if optimizer == "lars_sgd":
        del given["eps"]
    for step in range(1, 9):
        grad = torch.randn(3, 9, generator=generator)
        grad[1] = 0
        number = {"step": step} if optimizer in WITH_STEP else {}
        function = getattr(ops, f"sparse_{optimizer}")
        function(tables[0], *(tables[each] for each in at), torch.arange(3), grad, 0.1, **given, **number)
        for row, g in enumerate(grad.double()):
            places = (0, 1, second)
            new = in_float64(optimizer, *(exact[place][row] for place in places), g, step)
            for place, value in zip(places, new, strict=True):
                exact[place][row] = value
    for table, meant in zip(tables, exact, strict=True):
        torch.testing.assert_close(table.double(), meant, rtol=1e-4, atol=1e-5)
    zeros = exact[0][:3] == 0
    assert torch.equal(tables[0][:3] == 0, zeros) and (zeros.sum() > 9) == (optimizer == "ftrl")


@pytest.mark.parametrize("optimizer", ["lamb", "rowwise_lamb", "lars_sgd"])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_change_of_norm_zero_is_no_division_by_it(impl, optimizer):
    tables = [on(impl, torch.full((3, 5), 0.5)), *(on(impl, torch.zeros(3, each)) for each in (5, 5, 1))]
    update(optimizer, tables, on(impl, torch.tensor([2, 0])), on(impl, torch.zeros(2, 5)), 1, impl)
    assert all((table == value).all() for table, value in zip(tables, (0.5, 0, 0, 0), strict=True))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_extreme_gradients_end_as_in_the_reference(impl, optimizer):
    grad = torch.randn(6, 20, generator=torch.Generator().manual_seed(5))
    for row, value in enumerate([0.0, -0.0, float("inf"), float("nan"), 1e30]):
        grad[row, row:] = value
    results = []
    for each in ("reference", impl):
        tables = [on(each, torch.full((7, width), 0.5)) for width in (20, 20, 20, 1)]
        update(optimizer, tables, on(each, torch.arange(6)), on(each, grad), 2, each, weight_decay=0.1)
        results.append([table.cpu() for table in tables])
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected.isnan(), got.isnan())
        assert same_bits(expected.nan_to_num(nan=7.0), got.nan_to_num(nan=7.0))


def test_sgd_by_hand():
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sparse_sgd(weight, torch.tensor([2, 0]), torch.tensor([[1.0, -2.0], [4.0, 8.0]]), 0.5)
    assert weight.tolist() == [[-1.0, -2.0], [3.0, 4.0], [4.5, 7.0]]


def test_without_a_step_the_first_one_is_taken():
    draw, states = torch.Generator().manual_seed(4), []
    weight, grad = torch.randn(3, 2, generator=draw), torch.randn(2, 2, generator=draw)
    for options in ({}, {"step": 1}, {"step": 2}):
        state = [weight.clone(), torch.zeros(3, 2), torch.zeros(3, 2)]
        sparse_adam(*state, torch.tensor([0, 2]), grad, 0.1, **options)
        states.append(state[0])
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_lazy_decay_needs_a_number_for_each_step():
    weight = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="one for each of the 4 updates"):
        sparse_lazy_decay(weight, weight[:, :1], torch.tensor([1, 2]), torch.zeros(3), 4)
