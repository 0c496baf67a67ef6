"""A next-item model in a trainer: one step of autograd has the bits of its modules one by one."""

from dataclasses import dataclass, replace

import pytest
import torch

from tritonrec import ops
from tritonrec.kernels.hstu_layer import cpu_hstu_layer
from tritonrec.kernels.sampled_softmax import cpu_by_sample
from tritonrec.kernels.token_rows.cpu_token_rows import place_rows
from tritonrec.nn import HSTU, GradientAccumulator, HSTUConfig, next_item_step
from tritonrec.nn.context import only_refuses

CONFIG = HSTUConfig(
    dim=7, layers=2, heads=2, qk_dim=3, v_dim=5, max_seq_len=9, dropout=0.3, time_buckets=6, temperature=0.5
)
LENGTHS, NEGATIVES, SEED = [3, 0, 9, 1, 0, 4], 2, 77


@dataclass
class Batch:
    sample_ids: torch.Tensor
    offsets: torch.Tensor
    timestamps: torch.Tensor
    labels: torch.Tensor
    negatives: torch.Tensor


def make_model(cls=HSTU, **changes):
    torch.manual_seed(0)
    model = cls(replace(CONFIG, **changes))
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5 + 0.2 * torch.randn_like(parameter)
    return model


def make_batch(lengths=LENGTHS, negatives=NEGATIVES):
    generator = torch.Generator().manual_seed(1)
    tokens = sum(lengths)
    labels = torch.randint(0, 5, (tokens,), generator=generator)
    batch = Batch(
        torch.arange(len(lengths)) * 1000 - 5,
        torch.tensor([0, *lengths]).cumsum(0),
        (torch.randint(0, 5, (tokens,), generator=generator) ** 2).cumsum(0),
        labels,
        torch.randint(0, 5, (tokens, negatives), generator=generator),
    )
    return batch, 2 * torch.randn(tokens * (2 + negatives), CONFIG.dim, generator=generator)


@pytest.fixture
def steps(monkeypatch):
    """The steps that were bound."""
    made, bind = [], next_item_step.bind

    def counted(*arguments):
        step = bind(*arguments)
        made.extend([] if step is None else [step])
        return step

    monkeypatch.setattr(next_item_step, "bind", counted)
    return made


def run(model, batch, rows, exactly=True):
    """Losses, the gradient of the rows, and the parameters' gradients or exact sums."""
    accumulator = GradientAccumulator(model, ops.FRACTION_BITS if exactly else None)
    rows = rows.clone().requires_grad_()
    with accumulator.active():
        losses = model(batch, {"item": rows}, SEED)
        losses.backward(torch.linspace(0.5, 2, len(losses)))
    named = accumulator.take()
    model.zero_grad(set_to_none=True)
    return {"losses": losses.detach(), "rows": rows.grad, **named}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def one_by_one(monkeypatch):
    monkeypatch.setattr(next_item_step, "bind", lambda *arguments: None)


@pytest.mark.parametrize("changes", [{}, {"relative_bias": True}, {"recompute": ()}, {"layers": 0}], ids=str)
@pytest.mark.parametrize("exactly", [False, True])
def test_bits_are_those_of_the_modules(changes, exactly, steps, monkeypatch):
    model, (batch, rows) = make_model(**changes), make_batch()
    got = run(model, batch, rows, exactly)
    assert len(steps) == 1
    assert all(value.any() for value in got.values())
    one_by_one(monkeypatch)
    assert_equal(got, run(model, batch, rows, exactly))


@pytest.mark.parametrize("exactly", [False, True])
def test_bits_in_ranges_of_samples_and_with_weights_that_are_not_trained(exactly, steps, monkeypatch):
    model, (batch, rows) = make_model(), make_batch()
    for parameter in (model.layers[1].gate.weight, model.norm.bias, model.positions.weight):
        parameter.requires_grad_(False)
    for module in (cpu_hstu_layer, cpu_by_sample):
        monkeypatch.setattr(module, "over_ranges", lambda run, count, cost: [run(0, 2), run(2, count)])
    monkeypatch.setattr(cpu_hstu_layer.Bound, "is_small", lambda self: False)
    got = run(model, batch, rows, exactly)
    assert len(steps) == 1
    monkeypatch.undo()
    one_by_one(monkeypatch)
    assert_equal(got, run(model, batch, rows, exactly))


@pytest.mark.parametrize("case", [([1], 0), ([0, 0, 5], 3), ([9] * 8, 1)], ids=["one", "empty_first", "full"])
def test_bits_of_other_batches(case, steps, monkeypatch):
    model, (batch, rows) = make_model(relative_bias=True), make_batch(*case)
    got = run(model, batch, rows)
    assert len(steps) == 1
    one_by_one(monkeypatch)
    assert_equal(got, run(model, batch, rows))


def test_hooks_of_others_are_called():
    model, (batch, rows) = make_model(), make_batch()
    seen = []
    for part in (model.layers[0], model.norm, model.positions):
        for add in (part.register_forward_hook, part.register_full_backward_hook):
            handle = add(lambda module, *rest: seen.append(module))
            run(model, batch, rows, exactly=False)
            assert seen.pop() is part and not seen
            handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *rest: seen.append(module))
    run(model, batch, rows)
    handle.remove()
    assert seen == [model.positions, model.drop, *model.layers, model.norm, model]


def test_guards_of_a_trainer_change_nothing(steps):
    @only_refuses
    def refuse(module, arguments):
        raise AssertionError

    model, (batch, rows) = make_model(), make_batch()
    model.norm.register_forward_pre_hook(refuse)
    run(model, batch, rows)
    assert len(steps) == 1


class Halved(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments):
        return self.inner(*arguments) / 2


class OtherModel(HSTU):
    def encode(self, *arguments):
        return super().encode(*arguments) / 2


def wrapped(model):
    model.layers[0] = Halved(model.layers[0])


def patched(model):
    model.norm.forward = lambda x: x


def encoded(model):
    model.encode = lambda batch, rows, seed: 2 * rows


def tied(model):
    model.layers[1] = model.layers[0]


@pytest.mark.parametrize("change", [wrapped, patched, encoded, tied])
def test_models_with_parts_of_others_are_called_part_by_part(change, steps):
    model, (batch, rows) = make_model(), make_batch()
    plain = run(model, batch, rows)
    change(model)
    assert not torch.equal(run(model, batch, rows)["losses"], plain["losses"])
    assert len(steps) == 1


@pytest.mark.parametrize("make", [
    lambda: make_model(OtherModel), lambda: make_model(input_dropout=0.4),
    lambda: make_model(recompute=("gate",)),
])  # fmt: skip
def test_models_of_other_kinds_are_called_part_by_part(make, steps):
    run(make(), *make_batch())
    assert not steps


def test_without_a_trainer_or_under_autocast_there_is_no_step(steps):
    model, (batch, rows) = make_model(), make_batch()
    model(batch, {"item": rows.requires_grad_()}, SEED)
    with GradientAccumulator(model).active():
        model(batch, {"item": rows.detach()}, SEED)
        with torch.no_grad():
            model(batch, {"item": rows}, SEED)
        with torch.autocast("cpu", torch.bfloat16):
            model(batch, {"item": rows}, SEED)
    assert not steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 3, 3, 13, 13, 13, 17])}, "a sample has 10 tokens, the model takes 9"),
        ({"offsets": torch.tensor([0, 3, 2, 12, 13, 13, 17])}, "."),
        ({"offsets": torch.tensor([1, 3, 3, 12, 13, 13, 17])}, "."),
        ({"sample_ids": torch.arange(5)}, "."),
    ],
)
def test_a_batch_that_does_not_fit_has_the_errors_of_the_modules(change, message, steps):
    batch, rows = make_batch()
    with pytest.raises((ValueError, RuntimeError), match=message):
        run(make_model(), replace(batch, **change), rows)
    assert not steps


@pytest.mark.parametrize("offsets", [[0, 9, 4], [0, 2, 1, 4], [1, 4], [0, 3], [0, 4, 5, 4]])
def test_offsets_that_cut_into_no_sequences_write_nothing(offsets):
    weight, ids = torch.ones(9, 2), torch.arange(len(offsets) - 1)
    rows = torch.ones(4 if offsets != [0, 3] else 2, 2)
    assert place_rows(rows, weight, 2.0, torch.tensor(offsets), ids, None) is None


def test_a_derivative_of_the_gradient_is_refused():
    model, (batch, rows) = make_model(), make_batch()
    rows.requires_grad_()
    with GradientAccumulator(model).active():
        losses = model(batch, {"item": rows}, SEED)
        with pytest.raises(RuntimeError, match="summed exactly and has no derivative"):
            torch.autograd.grad(losses.sum(), rows, create_graph=True)
    with GradientAccumulator(model, None).active():
        losses = model(batch, {"item": rows}, SEED)
        (gradient,) = torch.autograd.grad(losses.sum(), rows, create_graph=True)
        with pytest.raises(NotImplementedError, match="has no derivative"):
            (gradient * rows).sum().backward()


def test_a_parameter_that_was_changed_before_backward_is_noticed():
    model, (batch, rows) = make_model(), make_batch()
    with GradientAccumulator(model).active():
        losses = model(batch, {"item": rows.requires_grad_()}, SEED)
        with torch.no_grad():
            model.layers[0].uvqk.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses.sum().backward()
