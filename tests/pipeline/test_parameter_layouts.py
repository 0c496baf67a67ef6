"""Promise: parameters are trained, saved and restored alike in whatever order they lie in memory."""

import pytest
import torch
from trainer_parts import DIM, EVERY, Ranker, batches, parts, same, trained, trainer

from tritonrec.kernels.gradients import current, sum_terms
from tritonrec.kernels.row_terms import RowTerms
from tritonrec.pipeline import DenseModel


def reversed_order(values):
    dims = tuple(reversed(range(values.dim())))
    return values.permute(dims).contiguous().permute(dims)


def channels_last(values):
    if values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    return values.movedim(0, -1).contiguous().movedim(-1, 0) if values.dim() else values


ORDERS = {
    "contiguous": torch.Tensor.contiguous,
    "reversed": reversed_order,
    "channels_last": channels_last,
    "gaps": lambda values: torch.stack([values, values], -1)[..., 0],
}
SHAPES = [(), (5,), (3, 4), (2, 3, 4), (2, 3, 4, 5), (0, 4), (4, 0), (1, 1, 3)]


class One(torch.nn.Module):
    """One parameter."""

    def __init__(self, values):
        super().__init__()
        self.p = torch.nn.Parameter(values)


def dense_of(values, **options):
    model = One(values)
    return model.p, DenseModel(model, torch.optim.Adam(model.parameters(), lr=0.25, **options))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_update_and_a_load_reach_the_parameter_in_any_order_of_memory(shape, order, fused):
    random = torch.Generator().manual_seed(3)
    values, first, second = (torch.randn(shape, generator=random) for _ in range(3))
    fused &= values.dim() == 0 or order is not ORDERS["gaps"]
    plain, expected = dense_of(values.clone(), fused=fused)
    parameter, dense = dense_of(order(values.clone()), fused=fused)
    strides = parameter.stride()
    for gradient in (first, second):
        expected.step({"p": gradient})
        dense.step({"p": order(gradient)})
        assert same(list(dense.tensors().values()), list(expected.tensors().values()))
    assert not values.numel() or not torch.equal(parameter, values)
    fresh, again = dense_of(order(values.clone()), fused=fused)
    again.load_state_dict(dense.state_dict())
    assert torch.equal(fresh, plain)
    assert same(list(again.tensors().values()), list(expected.tensors().values()))
    assert parameter.stride() == fresh.stride() == strides


class _Scale(torch.autograd.Function):
    """Rows (L, 6) times a parameter of shape (1, 2, 3), whose gradient an accumulator adds up."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.accumulator, ctx.weight = current(), weight
        return x * weight.reshape(1, -1)

    @staticmethod
    def backward(ctx, dy):
        terms = (dy * ctx.saved_tensors[0]).view(-1, 1, 2, 3)
        return dy * ctx.weight.detach().reshape(1, -1), sum_terms(
            ctx.accumulator, ctx.weight, RowTerms(terms)
        )


class Ordered(Ranker):
    """Has a parameter of three dimensions and a transposed matrix."""

    def __init__(self, order):
        super().__init__()
        self.scale = torch.nn.Parameter(order(torch.linspace(0.5, 1.5, 6).view(1, 2, 3)))
        self.mix.weight = torch.nn.Parameter(order(self.mix.weight.detach().clone()))

    def hidden(self, batch, rows):
        return _Scale.apply(super().hidden(batch, rows), self.scale)


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
@pytest.mark.parametrize("order", [ORDERS["reversed"], ORDERS["gaps"]], ids=["reversed", "gaps"])
def test_a_model_trains_alike_in_any_order_of_memory(mode, consistency, order):
    expected, _ = trained(parts(lambda: Ordered(ORDERS["contiguous"])), mode, consistency, batches(2))
    made = parts(lambda: Ordered(order))
    before = made[0].scale.detach().clone()
    assert not made[0].mix.weight.is_contiguous()
    assert same(trained(made, mode, consistency, batches(2))[0], expected)
    assert bool((made[0].scale != before).all())


class Convolved(Ranker):
    """torch's Conv2d in channels_last order: kernels (6, 3, 1, 2)."""

    def __init__(self, memory_format):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, DIM, (1, 2)).to(memory_format=memory_format)

    def hidden(self, batch, rows):
        images = super().hidden(batch, rows).view(-1, 3, 1, 2)
        return self.conv(images.contiguous()).view(-1, DIM)


@pytest.mark.parametrize("mode", ["sequential", "nestpipe"])
def test_a_channels_last_convolution_is_trained_saved_and_restored(mode, tmp_path):
    made = parts(lambda: Convolved(torch.channels_last))
    kernel = made[0].conv.weight
    before = kernel.detach().clone()
    assert not kernel.is_contiguous()
    with trainer(made, mode, "window") as training:
        list(training.run(batches(2)))
        assert bool((kernel != before).any())
        training.save(tmp_path)
        list(training.run(batches(4)[2:]))
    again = parts(lambda: Convolved(torch.channels_last))
    with trainer(again, mode, "window") as training:
        training.load(tmp_path)
    assert same(trained(again, mode, "window", batches(4)[2:])[0], trained(made, mode, "window", [])[0])
    assert torch.equal(again[0].conv.weight, kernel) and again[0].conv.weight.stride() == kernel.stride()
