"""HSTU and its modules: exact gradients of any split; `test_fuxi` has what all next-item models promise."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint

from tritonrec import nn, ops
from tritonrec.data import JaggedBatch
from tritonrec.nn import (
    HSTU,
    GatedNorm,
    GradientAccumulator,
    HSTUConfig,
    HSTULayer,
    LayerNorm,
    Linear,
    PositionalEmbedding,
    sum_by_sample,
)

pytestmark = pytest.mark.smoke

CONFIG = HSTUConfig(dim=12, layers=2, heads=2, qk_dim=5, v_dim=7, max_seq_len=9, dropout=0.3)
LENGTHS = [5, 0, 1, 9, 3, 0, 7]
NEGATIVES = 4
SEED = 77


def make_model(config=CONFIG):
    torch.manual_seed(0)
    model = HSTU(config)
    for parameter in model.parameters():  # no bias at zero, no weight at one
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def make_batch(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    ids, labels = torch.randint(0, 50, (2, tokens), generator=generator)
    return JaggedBatch.from_sequences(
        step=0,
        sample_ids=torch.arange(len(lengths)) * 1000 - 5,
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        ids=ids,
        timestamps=torch.zeros(tokens, dtype=torch.int64),
        labels=labels,
        negatives=torch.randint(0, 50, (tokens, NEGATIVES), generator=generator),
    ).validate()


TABLE = torch.randn(50, CONFIG.dim, generator=torch.Generator().manual_seed(2))


def rows_of(batch):
    return TABLE[batch.lookups()["item"].ids].requires_grad_()


def exact_sums(model, batch, micro_batches):
    accumulator = GradientAccumulator(model)
    with accumulator.active():
        for members in micro_batches:
            part = batch.select(torch.tensor(members, dtype=torch.int64))
            model(part, {"item": rows_of(part)}, SEED).sum().backward()
    return accumulator.take()


def test_exact_gradients_are_those_of_autograd():
    model, batch = make_model(), make_batch()
    sums = exact_sums(model, batch, [range(7)])
    model(batch, {"item": rows_of(batch)}, SEED).sum().backward()
    for name, parameter in model.named_parameters():
        exact = ops.from_fixed_point(sums[name])
        torch.testing.assert_close(
            parameter.grad, exact, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_autograd_agrees_with_finite_differences():
    """The whole model's gradient along a random direction, against a central difference of its losses."""
    model, batch = make_model(), make_batch()
    rows = rows_of(batch)
    model(batch, {"item": rows}, SEED).sum().backward()
    generator = torch.Generator().manual_seed(3)
    leaves = [rows, *model.parameters()]
    directions = [torch.randn(leaf.shape, generator=generator) for leaf in leaves]
    slope = sum((leaf.grad * way).sum().double() for leaf, way in zip(leaves, directions, strict=True))

    def loss_at(step):
        with torch.no_grad():
            for leaf, way in zip(leaves, directions, strict=True):
                leaf += step * way
            total = model(batch, {"item": rows}, SEED).double().sum()
            for leaf, way in zip(leaves, directions, strict=True):
                leaf -= step * way
        return total

    difference = (loss_at(2e-4) - loss_at(-2e-4)) / 4e-4
    assert abs(difference - slope) < 0.01 * abs(slope) + 0.1, (difference, slope)


def test_arguments_are_checked_where_gradients_are_summed_too():
    refused = pytest.raises(ValueError, match=r"source must be \(R, D\), got shape \(3,\)")
    with GradientAccumulator(torch.nn.Linear(2, 2)).active(), refused:
        ops.gather_rows(torch.zeros(3), torch.arange(2))


def test_sums_are_on_the_device_of_the_parameters():
    accumulator = GradientAccumulator(torch.nn.Linear(3, 2, device="meta"))
    assert {each.device.type for each in accumulator.sums.values()} == {"meta"}


def test_sums_start_from_zero_and_nothing_hangs_on_the_parameters():
    model, batch = make_model(), make_batch()
    accumulator = GradientAccumulator(model)
    for _ in range(2):
        with accumulator.active():
            model(batch, {"item": rows_of(batch)}, SEED).sum().backward()
        sums = accumulator.take()
        assert not any(left.any() for left in accumulator.sums.values())
        for name, parameter in model.named_parameters():
            assert sums[name].dtype == torch.int64 and sums[name].shape == parameter.shape
            assert sums[name].any() and parameter.grad is None and not vars(parameter)


@pytest.mark.parametrize("bits", [36, None])
def test_sums_of_some_parameters_are_taken_and_positions_have_their_names(bits):
    model, batch = make_model(), make_batch()
    accumulator, parameters = GradientAccumulator(model, bits), dict(model.named_parameters())
    with accumulator.active():
        model(batch, {"item": rows_of(batch)}, SEED).sum().backward()
    whole = {name: part.clone() for name, part in accumulator.views(accumulator.so_far()).items()}
    first, second, *_ = some = list(parameters)[1::2]
    taken = accumulator.take_flat(some)
    assert torch.equal(taken, torch.cat([whole[name].flatten() for name in some])) and taken.any()
    for name, left in accumulator.views(accumulator.so_far()).items():
        assert torch.equal(left, whole[name] * (name not in some)), name
    assert accumulator.take_flat([]).numel() == 0
    size, last = parameters[first].numel(), parameters[second].numel() - 1
    place = tuple(each - 1 for each in parameters[second].shape)
    assert accumulator.name_at(size + last, some) == f"{second}: gradient at {place}"
    with pytest.raises(IndexError, match=f"position {taken.numel()} is behind the last parameter"):
        accumulator.name_at(taken.numel(), some)


def test_no_gradient_stays_on_a_parameter_that_was_frozen():
    layer = torch.nn.Linear(3, 2)
    layer.bias.grad = torch.ones(2)
    layer.bias.requires_grad_(False)
    assert GradientAccumulator(layer, None).take_flat().numel() == 6
    assert layer.bias.grad is None


def test_a_step_beside_an_accumulator_is_an_ordinary_one():
    model, batch = make_model(), make_batch()
    accumulator = GradientAccumulator(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    with accumulator.empty_gradients():
        with accumulator.active():
            model(batch, {"item": rows_of(batch)}, SEED).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    before = {name: sums.clone() for name, sums in accumulator.sums.items()}
    assert all(bool((parameter.grad == 3).all()) for parameter in model.parameters())
    model(batch, {"item": rows_of(batch)}, SEED).sum().backward()
    assert all(bool((parameter.grad != 3).any()) for parameter in model.parameters())
    assert all(torch.equal(accumulator.sums[name], sums) for name, sums in before.items())


def test_an_accumulator_belongs_to_the_thread_that_entered_it():
    model, batch = make_model(), make_batch()
    accumulator = GradientAccumulator(model)

    def step():
        model(batch, {"item": rows_of(batch)}, SEED).sum().backward()

    with accumulator.active():
        with ThreadPoolExecutor(1) as other:
            other.submit(step).result()
        assert all(parameter.grad.any() for parameter in model.parameters())
        assert not any(sums.any() for sums in accumulator.sums.values())


def test_an_ordinary_gradient_beside_an_exact_one_is_refused():
    layer = Linear(3, 2)
    accumulator = GradientAccumulator(layer)
    with accumulator.active():
        (layer.weight * 2).sum().backward()
    with pytest.raises(TypeError, match="parameter weight got an ordinary float32 gradient"):
        accumulator.take()


def test_a_checkpointed_part_of_a_model_is_summed_exactly():
    """Its forward is computed again in backward, on whatever thread that runs."""
    layer, x, offsets = Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 4])
    found = []
    for reentrant in (None, False, True):
        accumulator, leaf = GradientAccumulator(layer), x.clone().requires_grad_()
        with accumulator.active():
            if reentrant is None:
                out = layer(leaf, offsets)
            else:
                out = torch.utils.checkpoint.checkpoint(layer, leaf, offsets, use_reentrant=reentrant)
            out.square().sum().backward()
        found.append(accumulator.take())
    for sums in found[1:]:
        assert all(sums[name].any() and torch.equal(sums[name], found[0][name]) for name in found[0])


def test_fewer_bits_mean_coarser_sums():
    layer = Linear(3, 2)
    x, offsets = torch.randn(4, 3), torch.tensor([0, 4])
    values = []
    for bits in (36, 20):
        accumulator = GradientAccumulator(layer, bits)
        with accumulator.active():
            layer(x, offsets).square().sum().backward()
        values.append(
            [ops.from_fixed_point(sums, fraction_bits=bits) for sums in accumulator.take().values()]
        )
    for fine, coarse in zip(*values, strict=True):
        torch.testing.assert_close(fine, coarse, rtol=0, atol=4 * 2.0**-20)
        assert not torch.equal(fine, coarse)


def test_what_has_no_exact_sum_names_its_parameter(accumulate):
    model, batch = make_model(), make_batch()
    accumulate(model)
    with pytest.raises(ops.ExactSumError, match=r"norm\.weight"):
        (model(batch, {"item": rows_of(batch)}, SEED) * 1e30).sum().backward()


def test_eval_mode_has_no_dropout():
    model, batch = make_model(), make_batch()
    rows = TABLE[batch.ids]
    train = [model.encode(batch, rows, seed) for seed in (1, 1, 2)]
    assert torch.equal(train[0], train[1]) and not torch.equal(train[0], train[2])
    model.eval()
    calm = [model.encode(batch, rows, seed) for seed in (1, 2)]
    assert torch.equal(*calm) and not torch.equal(calm[0], train[0])


def test_dropout_of_the_input_goes_by_sample_and_position(monkeypatch):
    """Masks of the first layer's input are drawn apart from the layers', the same in any batch."""
    config = replace(CONFIG, dropout=0.0, input_dropout=0.4)
    model, batch = make_model(config), make_batch()
    inputs, layer = [], HSTULayer.forward
    monkeypatch.setattr(
        HSTULayer, "forward", lambda self, x, *rest: inputs.append(x) or layer(self, x, *rest)
    )
    encoded = [model.encode(batch, TABLE[batch.ids], seed) for seed in (1, 1, 2)]
    assert torch.equal(encoded[0], encoded[1]) and not torch.equal(encoded[0], encoded[2])
    kept = inputs[0] != 0
    assert 0.45 < kept.float().mean() < 0.75
    plain = make_model(replace(config, input_dropout=0.0))
    plain.encode(batch, TABLE[batch.ids], 1)
    torch.testing.assert_close(inputs[0][kept], inputs[-2][kept] / 0.6)
    for sample in range(len(LENGTHS)):
        first, last = batch.offsets[sample : sample + 2].tolist()
        one = batch.select(torch.tensor([sample]))
        assert torch.equal(model.encode(one, TABLE[one.ids], 1), encoded[0][first:last]), sample
    assert torch.equal(
        model.eval().encode(batch, TABLE[batch.ids], 1), plain.eval().encode(batch, TABLE[batch.ids], 2)
    )


@pytest.mark.parametrize("config", [HSTUConfig, nn.SASRecConfig, nn.FuXiConfig])
def test_a_temperature_of_zero_is_refused(config):
    with pytest.raises(ValueError, match=r"temperature must lie in \(0, inf\), got 0"):
        config(temperature=0.0)


def test_an_exact_linear_without_offsets_has_one_sum_for_any_batch(accumulate):
    layer, x = Linear(3, 2), torch.randn(4, 3)
    whole = accumulate(layer)
    layer(x).square().sum().backward()
    parts = accumulate(layer)
    for rows in (x[3:], x[:1], x[1:3]):
        layer(rows).square().sum().backward()
    assert whole["weight"].any() and all(torch.equal(parts[name], whole[name]) for name in whole)


def test_modules_are_their_formulas():
    torch.manual_seed(4)
    x, u = torch.randn(2, 5, 6)
    linear, plain, norm, gate, table = (
        Linear(6, 3), Linear(6, 3, bias=False), LayerNorm(6, eps=1e-6), GatedNorm(6, 0.5),
        PositionalEmbedding(7, 6),
    )  # fmt: skip
    close = torch.testing.assert_close
    normed = torch.nn.functional.layer_norm(x, (6,), eps=1e-6)
    close(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))
    close(plain(x), x @ plain.weight.t())
    close(norm(x), normed)
    sites = torch.arange(5), torch.arange(5)
    close(gate.eval()(x, u, 0, *sites), u * normed)
    dropped = gate.train()(x, u, 0, *sites)
    close(dropped, torch.where(dropped == 0, 0.0, 2 * u * normed))
    assert (dropped == 0).any() and (dropped != 0).any()
    positions = torch.tensor([3, 0, 3])
    assert torch.equal(table(positions), table.weight[positions])


@pytest.mark.parametrize("exactly", [False, True])
def test_repeated_positions_add_up(accumulate, exactly):
    table = PositionalEmbedding(4, 2)
    sums = accumulate(table) if exactly else {}
    (table(torch.tensor([3, 0, 3])) * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
    gradient = ops.from_fixed_point(sums["weight"]) if exactly else table.weight.grad
    assert gradient.tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0], [5.0, 5.0]]


def test_sums_by_sample():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    sums = sum_by_sample(values, torch.tensor([0, 0, 3, 3, 4]))
    assert sums.tolist() == [0.0, 7.0, 0.0, 8.0]
    sums.backward(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert values.grad.tolist() == [2.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1,)])
@pytest.mark.parametrize("lengths", [[0, 3, 0, 1], [0, 0]])
def test_sums_by_sample_of_rows(shape, lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(int(offsets[-1]), *shape, requires_grad=True)
    sums, weights = sum_by_sample(values, offsets), torch.randn(len(lengths), *shape)
    columns = [sum_by_sample(column.contiguous(), offsets) for column in values.detach().flatten(1).unbind(1)]
    assert torch.equal(sums, torch.stack(columns, 1).view_as(weights))
    sums.backward(weights)
    assert torch.equal(values.grad, weights.repeat_interleave(torch.tensor(lengths), 0))
