"""FuXi, HSTU and SASRec: the formulas in float64, and a sample's bits depend on that sample alone."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import formulas
import pytest
import torch

from tritonrec import FeatureConfig, ops, verify
from tritonrec.data import JaggedBatch, NextItemLoader, load
from tritonrec.nn import (
    HSTU,
    FuXi,
    FuXiConfig,
    FuXiLayer,
    HSTUConfig,
    RelativeAggregate,
    SASRec,
    SASRecConfig,
    SASRecLayer,
    Tokens,
)

SIZES = {
    "dim": 10, "layers": 2, "heads": 2, "qk_dim": 5, "v_dim": 7, "max_seq_len": 21, "dropout": 0.3,
    "temperature": 0.7,
}  # fmt: skip
CONFIG = FuXiConfig(**SIZES, ffn_dim=13, time_buckets=8)  # times further apart than 2**7 share a bucket
PUBLISHED = replace(CONFIG, norm="rms")
MODELS = {
    "fuxi": (FuXi, CONFIG), "fuxi-rms": (FuXi, PUBLISHED), "hstu": (HSTU, HSTUConfig(**SIZES)),
    "sasrec": (SASRec, SASRecConfig(**SIZES, ffn_dim=13)),
}  # fmt: skip
LENGTHS = [5, 0, 1, 21, 3, 0, 7]
CASES, DISTINCT, EMPTY = MODELS, 1 + sum(length > 0 for length in LENGTHS), [[], [0], [0, 0, 0]]
SUBSETS = [[3], [1], [2, 4], [6, 5, 4, 3, 2, 1, 0], [4, 0, 1], [3, 6]]
SPLIT = [[3, 1], [], [0, 6], [5, 2, 4]]
NEGATIVES = 4
SEED = 77


def make_model(name="fuxi"):
    torch.manual_seed(0)
    build, config = MODELS[name]
    model = build(config)
    for parameter in model.parameters():  # large enough for SiLU not to be a line, no bias at zero
        parameter.data = parameter.data * 1.5 + 0.2 * torch.randn_like(parameter)
    return model


def make_batch(lengths=LENGTHS, seed=1):
    """A batch, and the rows of its items, labels and negatives."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    ids, labels, gaps = torch.randint(0, 9, (3, tokens), generator=generator)
    batch = JaggedBatch.from_sequences(
        step=0,
        sample_ids=torch.arange(len(lengths)) * 1000 - 5,
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        ids=ids,
        timestamps=(gaps**2).cumsum(0) - 50,
        labels=labels,
        negatives=torch.randint(0, 9, (tokens, NEGATIVES), generator=generator),
    ).validate()
    return batch, torch.randn(tokens * (2 + NEGATIVES), CONFIG.dim, generator=generator) * 0.7 + 0.1


def parts_of(batch, rows):
    """Rows of items, labels and negatives, token by token: (L, 2 + K, d)."""
    tokens = batch.num_tokens
    items, labels, sampled = rows.split([tokens, tokens, tokens * NEGATIVES])
    return torch.cat([items[:, None], labels[:, None], sampled.unflatten(0, (tokens, NEGATIVES))], 1)


def rows_of(parts):
    return torch.cat([parts[:, 0], parts[:, 1], parts[:, 2:].flatten(0, 1)])


def tokens_of(batch, samples):
    spans = list(pairwise(batch.offsets.tolist()))
    return torch.cat([torch.arange(0), *(torch.arange(*spans[b]) for b in samples)])


def select(batch, rows, samples):
    parts = parts_of(batch, rows)[tokens_of(batch, samples)]
    return batch.select(torch.tensor(samples, dtype=torch.int64)), rows_of(parts)


def run(model, batch, rows):
    """Losses, hidden states, and the rows' gradient token by token."""
    leaf = rows.clone().requires_grad_()
    losses = model(batch, {"item": leaf}, SEED)
    losses.sum().backward()
    hidden = model.encode(batch, rows[: batch.num_tokens], SEED)
    return losses.detach(), hidden.detach(), parts_of(batch, leaf.grad)


def make(case, lengths=LENGTHS):
    return make_model(case), make_batch(lengths)


def of_samples(args, found, samples):
    tokens = tokens_of(args[0], samples)
    return [found[0][samples], found[1][tokens], found[2][tokens]]


def oracle(model, batch, rows):
    """Losses (B,) sample by sample, without dropout."""
    config, losses = model.config, []
    parts, valid = parts_of(batch, rows), batch.negatives != batch.labels[:, None]
    for start, stop in pairwise(batch.offsets.tolist()):
        own, times = parts[start:stop], batch.timestamps[start:stop]
        x = own[:, 0] * config.dim**0.5 + model.positions.weight[: stop - start]
        for layer in model.layers:
            formula = formulas.hstu_layer
            if isinstance(layer, FuXiLayer):
                formula = partial(formulas.fuxi_layer, times=times)
            elif isinstance(layer, SASRecLayer):
                formula = formulas.sasrec_layer
            x = formula(x, layer)
        hidden = formulas.layer_norm(x, model.norm)
        losses.append(
            formulas.sampled_softmax(
                hidden, own[:, 1], own[:, 2:], valid[start:stop], config.temperature
            ).sum()
        )
    return torch.stack(losses)


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_gradients_are_the_formula(accumulate, name, exactly):
    model, (batch, rows) = make_model(name).eval(), make_batch()
    attached = accumulate(model) if exactly else {}
    losses, _, gradient = run(model, batch, rows)
    exact, leaf = make_model(name).double(), rows.double().requires_grad_()
    expected = oracle(exact, batch, leaf)
    expected.sum().backward()
    results = {"losses": (losses, expected), "rows": (gradient, parts_of(batch, leaf.grad))}
    formulas.assert_same(results, model, exact, attached)


@pytest.mark.parametrize("name", ["fuxi", "hstu", "sasrec"])
def test_a_token_sees_no_later_token_nor_its_time(name):
    model, (batch, rows) = make_model(name), make_batch([6])
    rows = rows[:6]
    before = model.encode(batch, rows, SEED)
    changed = rows.clone()
    changed[4, 0] += 1
    times = batch.timestamps.clone()
    times[4:] += 300
    later = [model.encode(batch, changed, SEED)]
    if name == "fuxi":
        later.append(model.encode(replace(batch, timestamps=times), rows, SEED))
    for after in later:
        assert torch.equal(before[:4], after[:4]) and (before[4:] != after[4:]).any(1).all()


def test_the_parts_of_a_sasrec_layer_draw_masks_of_their_own():
    layer, (batch, _) = make_model("sasrec").layers[0], make_batch([7])
    x, masks = torch.randn(7, CONFIG.dim), []
    layer.drop.register_forward_hook(lambda module, given, out: masks.append(out == 0))
    layer(x, Tokens.place(batch.offsets, batch.sample_ids, 21), SEED)
    assert len(masks) == 2 and not torch.equal(*masks) and all(0 < each.sum() < 70 for each in masks)


def test_only_differences_of_times_matter():
    model, (batch, rows) = make_model(), make_batch()
    later = replace(batch, timestamps=batch.timestamps + 10**15)
    assert torch.equal(run(model, batch, rows)[0], run(model, later, rows)[0])
    beyond = batch.timestamps.clone()
    beyond[26] += 2**40  # the last token of sample 3 is past the last bucket for all before it, and stays so
    far = beyond.clone()
    far[26] += 2**41
    one, two = (run(model, replace(batch, timestamps=times), rows)[0] for times in (beyond, far))
    assert torch.equal(one, two) and not torch.equal(one, run(model, batch, rows)[0])


@pytest.mark.parametrize("name", ["fuxi", "hstu", "sasrec"])
def test_layers_draw_masks_of_their_own(name):
    model, (batch, rows) = make_model(name), make_batch()
    one, two, other = (model(batch, {"item": rows}, seed) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    seeds = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, given, out: seeds.append(given[2]))
    model(batch, {"item": rows}, SEED)
    assert len(seeds) == len(set(seeds)) == CONFIG.layers


def test_both_norms_have_one_first_stage():
    """With the layer norm, the stage of single ops has the bits of the fused one."""
    model, (batch, rows) = make_model(), make_batch()
    fused = run(model, batch, rows)
    for layer in model.layers:
        layer.forward = partial(by_single_ops, layer)
    for got, want in zip(run(model, batch, rows), fused, strict=True):
        assert torch.equal(got, want)


def by_single_ops(layer, x, tokens, seed):
    y = layer.first_stage(x, tokens, seed)
    return y + layer.ffn(layer.ffn_norm(y), tokens.seq_offsets)


def test_training_with_the_published_norm_is_exact():
    def build():
        torch.manual_seed(0)
        return FuXi(FuXiConfig(dim=8, layers=1, heads=1, qk_dim=8, v_dim=8, max_seq_len=10, norm="rms"))

    loader = NextItemLoader(load("zipf:users=20,items=30"), 8, max_seq_len=10, num_negatives=2, seed=0)
    batches = [loader.batch(step) for step in range(2)]
    item = [FeatureConfig("item", 8)]
    report = verify(build, batches, item, modes=["nestpipe"], micro_batches=(3,), world_sizes=(1,))
    assert report.passed, str(report)


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="norm must be one of layer, rms, got 'root'"):
        FuXiConfig(norm="root")


def test_what_does_not_fit_is_refused():
    model, (batch, rows) = make_model(), make_batch([3, 22])
    with pytest.raises(ValueError, match="a sample has 22 tokens, the model takes 21"):
        model(batch, {"item": rows}, SEED)
    offsets, ids = torch.tensor([0, 2]), torch.tensor([5])
    targets = Tokens.place(offsets, ids, 9, torch.arange(2), torch.tensor([1]))
    for tokens in (Tokens.place(offsets, ids, 9), targets):
        with pytest.raises(ValueError, match="needs the tokens' timestamps and has no mask for targets"):
            model.layers[0](torch.ones(2, CONFIG.dim), tokens, SEED)


def test_where_tokens_stand():
    tokens = Tokens.place(torch.tensor([0, 2, 2, 5]), torch.tensor([70, 71, 72]), 3)
    assert tokens.positions.tolist() == [0, 1, 0, 1, 2]
    assert tokens.sample_ids.tolist() == [70, 70, 72, 72, 72]
    empty = Tokens.place(torch.tensor([0]), torch.tensor([], dtype=torch.int64), 3)
    assert len(empty.positions) == len(empty.sample_ids) == 0


@pytest.mark.parametrize("times", [None, torch.tensor([0, 1, 9, 2])])
def test_the_table_takes_each_samples_gradient_rounded_once(accumulate, times):
    module = RelativeAggregate(1, 3)
    v, dy = torch.tensor([0.02, 0.02, 5.0, 7.0]).reshape(4, 1, 1), torch.ones(4, 1, 1)
    sums = accumulate(module, 4)
    module(v, torch.tensor([0, 2, 4]), 2, times).backward(dy)
    gradient = ops.from_fixed_point(sums["weight"], fraction_bits=4)
    # 0.02 + 0.02 is nearer to 1/16 than to 0, each of them alone is not
    expected = [1 / 16 + 12, 0 + 5, 0] if times is None else [1 / 16 + 17, 0, 0]
    assert gradient.tolist() == [expected]
    accumulate(module)
    with pytest.raises(ops.ExactSumError, match=r"gradient of weight.*inf"):
        module(v * float("inf"), torch.tensor([0, 2, 4]), 2, times).backward(dy)


@pytest.mark.parametrize("width", [0, -3])
def test_an_inner_width_that_is_none_is_named(width):
    with pytest.raises(ValueError, match=f"ffn_dim must be at least 1, got {width}"):
        SASRecConfig(ffn_dim=width)
