"""A next-item model in a trainer: a call without modules and autograd has the bits of its modules."""

from dataclasses import dataclass, replace

import pytest
import torch

from tritonrec import ops
from tritonrec.kernels.hstu_layer import cpu_hstu_layer
from tritonrec.kernels.rows.numba_segment_sum import segment_sum_into
from tritonrec.kernels.sampled_softmax import cpu_by_sample
from tritonrec.nn import HSTU, GradientAccumulator, HSTUConfig, next_item_step
from tritonrec.nn.context import only_refuses, samples
from tritonrec.nn.next_item import NextItemModel
from tritonrec.nn.next_item_step import RowGradients

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


def by_modules(model, batch, rows, exactly=True):
    """Losses, the gradient of the rows, and the parameters' gradients or exact sums."""
    accumulator = GradientAccumulator(model, ops.FRACTION_BITS if exactly else None)
    rows = rows.clone().requires_grad_()
    with accumulator.active():
        losses = model(batch, {"item": rows}, SEED)
        losses.sum().backward()
    return {"losses": losses.detach(), "rows": rows.grad, **accumulator.take()}


def shuffled(rows):
    """The same rows in a matrix that has them in another order, with one that nobody takes."""
    generator = torch.Generator().manual_seed(len(rows))
    at = torch.randperm(len(rows) + 1, generator=generator)[: len(rows)]
    matrix = rows.new_full((len(rows) + 1, *rows.shape[1:]), torch.nan)
    matrix[at] = rows
    return ops.IndexedRows(matrix, at)


def by_occurrence(gradients):
    """The gradient of each occurrence, where a window's sums have every occurrence alone."""
    sums = torch.zeros(len(gradients.rows), gradients.values.shape[1])
    at = torch.arange(len(gradients.rows))
    RowGradients(at, gradients.values, gradients.hidden, gradients.slopes).add_in_order(sums)
    return sums


def plan_of(model, accumulator=None):
    with torch.no_grad():
        return next_item_step.plan(model, accumulator or GradientAccumulator(model))


def train(plan, batch, rows, accumulator):
    """Losses and the gradients of the rows; those of parameters go to the plan's accumulator."""
    with samples(plan.model, batch.sample_ids, batch.offsets, SEED):
        step = plan.step(batch, shuffled(rows), SEED)
        losses = step.forward()
        return losses, step.backward(accumulator, torch.ones_like(losses))[0]


def by_plan(model, batch, rows, exactly=True):
    """`by_modules` without them, None where they have to be called; the exact sums of rows are left out."""
    accumulator = GradientAccumulator(model, ops.FRACTION_BITS if exactly else None)
    item, found = shuffled(rows), []
    item = item._replace(values=item.values.requires_grad_())
    sums = torch.zeros(item.values.shape, dtype=torch.int64 if exactly else torch.float32)
    with (
        accumulator.active(),
        accumulator.rows([item.values], [sums], "item"),
        samples(model, batch.sample_ids, batch.offsets, SEED),
        pytest.MonkeyPatch.context() as patch,
    ):
        add = accumulator.add
        patch.setattr(accumulator, "add", lambda to, terms: add(to, terms) or found.append((to, terms)))
        patch.setattr(NextItemModel, "forward", lambda *arguments: None)
        losses = model(batch, {"item": item}, SEED)
        if losses is None:
            return None
        losses.sum().backward()
        (gradients,) = (terms for to, terms in found if to is item.values)
        own = by_occurrence(gradients)
    want = torch.zeros_like(sums)
    options = {"consistency": "batch" if exactly else "window", "out": want}
    ops.segment_sum(own, item.rows, len(want), **options)
    assert torch.equal(sums, want)
    return {"losses": losses.detach(), "rows": own, **accumulator.take()}


def assert_same_bits(*arguments):
    got, want = by_plan(*arguments), by_modules(*arguments)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    return got


@pytest.mark.if_changed
@pytest.mark.parametrize("changes", [{}, {"relative_bias": True}, {"recompute": ()}, {"layers": 0}], ids=str)
@pytest.mark.parametrize("exactly", [False, True])
def test_bits_are_those_of_the_modules(changes, exactly):
    got = assert_same_bits(make_model(**changes), *make_batch(), exactly)
    assert all(value.any() for value in got.values())


@pytest.mark.parametrize("exactly", [False, True])
def test_bits_in_ranges_of_samples_and_with_weights_that_are_not_trained(exactly, monkeypatch):
    model, (batch, rows) = make_model(), make_batch()
    for parameter in (model.layers[1].gate.weight, model.norm.bias, model.positions.weight):
        parameter.requires_grad_(False)
    want = by_modules(model, batch, rows, exactly)
    for module in (cpu_hstu_layer, cpu_by_sample):
        monkeypatch.setattr(module, "over_ranges", lambda run, count, cost: [run(0, 2), run(2, count)])
    monkeypatch.setattr(cpu_hstu_layer.Bound, "is_small", lambda self: False)
    got = by_plan(model, batch, rows, exactly)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("case", [([1], 0), ([0, 0, 5], 3), ([9] * 8, 1)], ids=["one", "empty_first", "full"])
def test_bits_of_other_batches(case):
    assert_same_bits(make_model(relative_bias=True), *make_batch(*case))


def test_a_plan_serves_many_batches_and_every_value_of_the_parameters():
    model, accumulator = make_model(relative_bias=True), None
    accumulator = GradientAccumulator(model)
    plan = plan_of(model, accumulator)
    with torch.no_grad():
        for number, case in enumerate([(LENGTHS, 2), ([1], 3), ([9, 9], 1)]):
            batch, rows = make_batch(*case)
            with accumulator.active():
                losses, gradients = train(plan, batch, rows, accumulator)
            got = {"losses": losses, "rows": by_occurrence(gradients), **accumulator.take()}
            with torch.enable_grad():
                want = by_modules(model, batch, rows)
            assert all(torch.equal(got[name], want[name]) for name in want), number
            for parameter in model.parameters():
                parameter.mul_(0.9)
            assert plan.stands()


def test_a_plan_ends_with_the_memory_of_a_parameter():
    model = make_model(relative_bias=True)
    for parameter in model.parameters():
        plan = plan_of(model)
        assert plan.stands()
        parameter.data = parameter.data.clone()
        assert not plan.stands()


def test_a_plan_ends_with_a_hook_or_another_forward():
    model = make_model()
    plan = plan_of(model)
    everywhere = torch.nn.modules.module.register_module_forward_hook
    for part in (model, model.layers[0], model.norm, model.positions, model.drop):
        for add in (part.register_forward_hook, part.register_full_backward_hook, everywhere):
            handle = add(lambda *arguments: None)
            assert not plan.stands()
            assert by_plan(model, *make_batch()) is None
            handle.remove()
            assert plan.stands()
        part.forward = part.forward
        assert not plan.stands()
        del part.forward


@pytest.mark.parametrize(
    ("bad", "named"),
    [("nan", "gradient of norm.weight"), ("large", "gradient of norm.weight"), ("full", "norm.bias")],
)
def test_a_sum_of_the_norm_that_fails_is_named_as_by_the_modules(bad, named):
    model, (batch, rows) = make_model(layers=0), make_batch()
    errors = []
    for by in (by_plan, by_modules):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ops.ExactSumError) as caught:
            changed = rows.clone()
            if bad == "nan":
                changed[7, 3] = float("nan")
            if bad == "large":
                changed *= 1e9
            if bad == "full":
                init = GradientAccumulator.__init__

                def filled(self, *arguments, init=init):
                    init(self, *arguments)
                    self.sums["norm.bias"].fill_(2**63 - 1)

                patch.setattr(GradientAccumulator, "__init__", filled)
            by(model, batch, changed)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and named in errors[0]


def test_guards_of_a_trainer_change_nothing():
    @only_refuses
    def refuse(module, arguments):
        raise AssertionError

    model, (batch, rows) = make_model(), make_batch()
    model.norm.register_forward_pre_hook(refuse)
    assert by_plan(model, batch, rows) is not None


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
def test_models_with_parts_of_others_are_called_part_by_part(change):
    model = make_model()
    assert by_plan(model, *make_batch()) is not None
    change(model)
    assert by_plan(model, *make_batch()) is None


@pytest.mark.parametrize("make", [
    lambda: make_model(OtherModel), lambda: make_model(input_dropout=0.4),
    lambda: make_model(recompute=("gate",)), lambda: make_model().double(),
])  # fmt: skip
def test_models_of_other_kinds_are_called_part_by_part(make):
    assert by_plan(make(), *make_batch()) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 3, 3, 13, 13, 13, 17])}, "a sample has 10 tokens, the model takes 9"),
        ({"offsets": torch.tensor([0, 3, 2, 12, 13, 13, 17])}, "."),
        ({"offsets": torch.tensor([1, 3, 3, 12, 13, 13, 17])}, "."),
        ({"sample_ids": torch.arange(5)}, "."),
        ({"labels": torch.arange(16)}, "."),
    ],
)
def test_a_batch_that_does_not_fit_has_the_errors_of_the_modules(change, message):
    batch, rows = make_batch()
    for by in (by_plan, by_modules):
        if by is by_plan and "offsets" not in change:
            assert by(make_model(), replace(batch, **change), rows) is None
            continue
        with pytest.raises((ValueError, RuntimeError), match=message):
            by(make_model(), replace(batch, **change), rows)


@pytest.mark.parametrize("rows", [
    lambda item: item._replace(rows=item.rows[:-1]), lambda item: item._replace(values=item.values.double()),
    lambda item: item._replace(values=item.values.t().contiguous().t()),
    lambda item: item._replace(values=item.values[:, :5].contiguous()),
    lambda item: item._replace(values=item.values.view(-1)),
    lambda item: item._replace(rows=item.rows.repeat_interleave(2)[::2]),
])  # fmt: skip
def test_rows_that_do_not_fit_are_left_to_the_modules(rows):
    model, (batch, whole) = make_model(), make_batch()
    plan = plan_of(model)
    assert plan.step(batch, shuffled(whole), SEED) is not None
    assert plan.step(batch, rows(shuffled(whole)), SEED) is None


@pytest.mark.parametrize("at", [0, 2 * 17 - 1])
@pytest.mark.parametrize("number", [-1, 17 * 4 + 1])
def test_numbers_of_rows_outside_of_the_matrix_are_refused(at, number):
    model, (batch, rows) = make_model(), make_batch()
    item = shuffled(rows)
    item.rows[at] = number
    assert len(item.values) == 17 * 4 + 1
    with pytest.raises(IndexError):
        plan_of(model).step(batch, item, SEED)


def test_a_plan_ends_with_a_mode_and_with_what_is_trained():
    model = make_model()
    plan = plan_of(model)
    for module in (model, model.layers[1].gate, model.norm):
        module.train(False)
        assert not plan.stands()
        module.train(True)
        assert plan.stands()
    for parameter in (model.positions.weight, model.layers[0].uvqk.weight):
        parameter.requires_grad_(False)
        assert not plan.stands()
        parameter.requires_grad_(True)
        assert plan.stands()


@pytest.mark.parametrize("exactly", [False, True])
def test_a_second_derivative_is_refused(exactly):
    model, (batch, rows) = make_model(), make_batch()
    accumulator = GradientAccumulator(model, ops.FRACTION_BITS if exactly else None)
    item = shuffled(rows)
    item.values.requires_grad_()
    sums = torch.zeros(item.values.shape, dtype=torch.int64 if exactly else torch.float32)
    with accumulator.active(), accumulator.rows([item.values], [sums], "item"):
        losses = model(batch, {"item": item}, SEED)
        with pytest.raises(RuntimeError, match="no second derivative: leave create_graph out"):
            losses.sum().backward(create_graph=True)


def test_a_plan_ends_with_its_accumulator():
    model, (batch, rows) = make_model(), make_batch()
    before = len(next_item_step._plans)
    for _ in range(3):
        by_plan(model, batch, rows)
    assert len(next_item_step._plans) == before


@pytest.mark.parametrize("name", ["labels", "negatives", "offsets", "sample_ids", "timestamps"])
@pytest.mark.parametrize("change", [torch.Tensor.int, lambda each: each.repeat_interleave(2, -1)[..., ::2]])
def test_lists_of_other_kinds_are_left_to_the_modules(name, change):
    model, (batch, rows) = make_model(relative_bias=True), make_batch()
    plan = plan_of(model)
    assert plan.step(batch, shuffled(rows), SEED) is not None
    assert plan.step(replace(batch, **{name: change(getattr(batch, name))}), shuffled(rows), SEED) is None


@pytest.mark.parametrize("bad", ["label", "negative", "full"])
def test_a_row_without_an_exact_sum_is_named_by_its_occurrence(bad):
    """As if the gradients of all occurrences were added one after the other."""
    model, (batch, rows) = make_model(), make_batch()
    with torch.no_grad(), (accumulator := GradientAccumulator(model)).active():
        _, found = train(next_item_step.plan(model, accumulator), batch, rows, accumulator)
    sums = torch.zeros(len(rows) + 1, CONFIG.dim, dtype=torch.int64)
    if bad == "label":
        found.values[20, 3] = torch.inf
    elif bad == "negative":
        found.slopes[5] *= 1e30
    apart, errors = by_occurrence(found), []
    if bad == "full":
        at = 2 * 17 + int(apart[2 * 17 :].ne(0).all(1).nonzero()[3])
        sums[found.rows[at]] = torch.where(apart[at] > 0, 2**63 - 1, -(2**63))
    for add in (
        lambda sums: found.add_to(sums, 36, "item"),
        lambda sums: segment_sum_into(
            sums, apart, found.rows, len(sums), "batch", 36, "gradient of item", None, None
        ),
    ):
        with pytest.raises(ops.ExactSumError) as caught:
            add(sums.clone())
        errors.append((str(caught.value), caught.value.index))
    assert errors[0] == errors[1] and (bad == "label" or errors[0][1][0] >= 2 * 17)
