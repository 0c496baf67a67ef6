"""MMoE: top-k of the gate with ties to the lower expert, and rows that depend on themselves alone."""

import formulas
import pytest
import torch

from tritonrec import ops
from tritonrec.nn import MMoE

DIM, TASKS, EXPERTS, TOP_K, HIDDEN = 7, 2, 5, 2, 9
LENGTHS = [4, 0, 1, 13, 0, 6]
CASES, DISTINCT, EMPTY = ("1", "3", "5"), TASKS * sum(LENGTHS), [[], [0], [0, 0]]
SUBSETS = [[3], [2], [1], [5, 4, 3, 2, 1, 0], [0, 3], [2, 5, 1]]
SPLIT = [[5, 1, 3], [], [4, 0, 2]]


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


OFFSETS = offsets_of(LENGTHS)


def make_model(**changes):
    torch.manual_seed(0)
    model = MMoE(
        **{"dim": DIM, "tasks": TASKS, "experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, **changes}
    )
    for parameter in model.parameters():  # large enough for the nonlinearities to matter, no bias at zero
        parameter.data = parameter.data * 1.5 + 0.3 * torch.randn_like(parameter)
    return model


def numbers(rows=int(OFFSETS[-1]), tasks=TASKS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, DIM, generator=generator) * 2 + 0.1
    return x, torch.randn(rows, tasks, generator=generator) + 0.2


def make(case, lengths=LENGTHS):
    x, dy = numbers(sum(lengths))
    return make_model(top_k=int(case)), (x, offsets_of(lengths), dy)


def rows_of(offsets, samples):
    return torch.cat([torch.arange(0), *(torch.arange(offsets[b], offsets[b + 1]) for b in samples)])


def select(x, offsets, dy, samples):
    rows = rows_of(offsets, samples)
    return x[rows], offsets_of([int(offsets[b + 1] - offsets[b]) for b in samples]), dy[rows]


def of_samples(args, found, samples):
    return [each[rows_of(args[1], samples)] for each in found]


def run(model, x, offsets, dy):
    leaf = x.clone().requires_grad_()
    logits = model(leaf, offsets)
    logits.backward(dy)
    return logits.detach(), leaf.grad


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_forward_and_gradients_are_the_formula(accumulate, top_k, exactly):
    model = make_model(top_k=top_k)
    attached = accumulate(model) if exactly else {}
    x, dy = numbers()
    logits, dx = run(model, x, OFFSETS, dy)
    got = {name: ops.from_fixed_point(total) for name, total in attached.items()} or {
        name: parameter.grad for name, parameter in model.named_parameters()
    }
    exact = make_model(top_k=top_k).double()
    leaf = x.double().requires_grad_()
    expected = formulas.mmoe(leaf, exact)
    expected.backward(dy.double())
    close = lambda a, b, what: torch.testing.assert_close(  # noqa: E731
        a.double(), b, rtol=2e-4, atol=2e-5, msg=lambda text: f"{what}: {text}"
    )
    close(logits, expected.detach(), "logits")
    close(dx, leaf.grad, "dx")
    assert got.keys() == dict(exact.named_parameters()).keys()
    for name, parameter in exact.named_parameters():
        assert got[name].any(), name
        close(got[name], parameter.grad, name)


def test_of_equal_scores_the_lower_expert_wins():
    scores = torch.tensor([
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [0.0, 2.0, 2.0, 2.0, 3.0],
        [3.0, -0.0, 0.0, -1.0, 0.0],
        [-200.0, -100.0, 5.0, -150.0, -120.0],  # all weights but one round to zero, the order is still known
        [float("-inf")] * 5,
    ])  # fmt: skip
    chosen, _ = make_model(top_k=2).choose(scores)
    assert chosen.tolist() == [[0, 1], [1, 4], [0, 1], [1, 2], [0, 1]]
    wide = torch.zeros(3, 300)
    wide[:, 200:] = 1
    assert make_model(experts=300, top_k=3).choose(wide)[0].tolist() == [[200, 201, 202]] * 3


def test_weights_are_those_of_the_softmax():
    scores = torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(3)) * 3
    chosen, weights = make_model(top_k=3).choose(scores)
    every = torch.softmax(scores.double(), 1)
    for row in range(50):
        best = sorted(sorted(range(EXPERTS), key=lambda e: -every[row, e])[:3])
        assert chosen[row].tolist() == best
        torch.testing.assert_close(weights[row].double(), every[row, best], rtol=1e-5, atol=1e-7)


def test_an_expert_that_nobody_chose_gets_no_gradient_and_sees_no_row(accumulate, monkeypatch):
    model, (x, dy) = make_model(), numbers()
    with torch.no_grad():
        for gate in model.gates:
            gate.weight.zero_()  # all scores equal: experts 0 and 1
    seen = []
    for expert in model.experts:
        forward = expert.forward
        monkeypatch.setattr(
            expert, "forward", lambda rows, offsets, f=forward: seen.append(len(rows)) or f(rows, offsets)
        )
    sums = accumulate(model)
    run(model, x, OFFSETS, dy)
    assert seen == [len(x), len(x), 0, 0, 0]
    assert {name for name, total in sums.items() if not total.any()} == {
        f"experts.{e}.{layer}.{part}"
        for e in (2, 3, 4)
        for layer in ("inner", "outer")
        for part in ("weight", "bias")
    }


def test_numbers_of_experts_that_do_not_fit_are_refused():
    for experts, top_k in ((3, 4), (3, 0)):
        with pytest.raises(ValueError, match=f"top_k must lie in \\[1, 3\\].*got {top_k}"):
            MMoE(4, 1, experts=experts, top_k=top_k)
    with pytest.raises(ValueError, match="tasks must be at least 1"):
        MMoE(4, 0)


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_compiled_mmoe_adds_the_gradients_of_gates_and_experts_in_the_same_order(accumulate, tasks):
    """torch cuts its graph between them, for how many rows an expert gets depends on values."""
    torch._dynamo.reset()
    model = make_model(tasks=tasks)
    accumulate(model)
    x, dy = numbers(tasks=tasks)
    plain = run(model, x, OFFSETS, dy)
    model.compile(backend="aot_eager")
    assert all(map(torch.equal, run(model, x, OFFSETS, dy), plain))
