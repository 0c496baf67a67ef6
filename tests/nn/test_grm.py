"""GRM: context, history and exposed items in one sequence; a sample's bits depend on that sample alone."""

from dataclasses import replace

import formulas
import pytest
import torch

from tritonrec.data import ImpressionBatch, KeyedJaggedTensor, Lookup
from tritonrec.nn import GRM, GRMConfig

CONFIG = GRMConfig(
    dim=10, context_dim=6, context=("age", "city"), tasks=("click", "conversion"), experts=3, top_k=2,
    layers=2, heads=2, qk_dim=5, v_dim=7, max_seq_len=23, dropout=0.3, genres=True,
)  # fmt: skip
HISTORY = [5, 0, 0, 17, 3, 1]
EXPOSED = [3, 2, 0, 4, 0, 1]
SEED = 77


def make_model(config=CONFIG):
    torch.manual_seed(0)
    model = GRM(config)
    for parameter in model.parameters():  # large enough for SiLU not to be a line, no bias at zero
        parameter.data = parameter.data * 1.5 + 0.2 * torch.randn_like(parameter)
    return model


def make_batch(history=HISTORY, exposed=EXPOSED, config=CONFIG, seed=1):
    """A batch and its rows by feature."""
    generator = torch.Generator().manual_seed(seed)
    samples, old, new = len(history), sum(history), sum(exposed)
    draw = lambda rows, dim: torch.randn(rows, dim, generator=generator) * 0.7 + 0.1  # noqa: E731
    ids = lambda count: torch.randint(0, 50, (count,), generator=generator)  # noqa: E731
    bags = torch.randint(0, 4, (old + new,), generator=generator)
    batch = ImpressionBatch(
        step=0,
        features=KeyedJaggedTensor.from_dict(
            {
                "history": Lookup(ids(old), torch.tensor([0, *history]).cumsum(0)),
                "exposed": Lookup(ids(new), torch.tensor([0, *exposed]).cumsum(0)),
            }
            | {name: Lookup(ids(samples)) for name in config.context}
        ),
        history_actions=ids(old),
        timestamps=ids(old + new),
        genres=KeyedJaggedTensor(("genre",), ids(int(bags.sum())), torch.tensor([0, *bags]).cumsum(0))
        if config.genres
        else None,
        sample_ids=torch.arange(samples) * 1000 - 5,
        labels=torch.randint(0, 2, (new, len(config.tasks)), generator=generator),
        tasks=config.tasks,
    ).validate()
    rows = {"item": draw(old + new, config.dim), "action": draw(old, config.dim)}
    if config.genres:
        rows["genre"] = draw(old + new, config.dim)
    return batch, rows | {name: draw(samples, config.context_dim) for name in config.context}


def places(batch, b):
    """Which history and exposed rows are sample b's."""
    spans = ((o[b].item(), o[b + 1].item()) for o in (batch.history_offsets, batch.exposed_offsets))
    return [torch.arange(*span) for span in spans]


def rows_of(batch, rows, samples):
    """The rows of some samples, in their order."""
    none = [torch.arange(0)] * 2
    old, new = map(torch.cat, zip(none, *(places(batch, b) for b in samples), strict=True))
    pairs = torch.cat([old, new + batch.history_offsets[-1]])
    by_feature = {"item": pairs, "genre": pairs, "action": old}
    return {
        name: part[by_feature[name] if name in by_feature else torch.tensor(samples, dtype=torch.int64)]
        for name, part in rows.items()
    }


def select(batch, rows, samples):
    part = batch.select(torch.tensor(samples, dtype=torch.int64))
    return part, rows_of(batch, rows, samples)


def run(model, batch, rows):
    """Losses, logits and the rows' gradients."""
    leaves = {name: part.clone().requires_grad_() for name, part in rows.items()}
    losses = model(batch, leaves, SEED)
    losses.sum().backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return losses.detach(), model.logits(batch, rows, SEED).detach(), gradients


def oracle(model, batch, rows):
    """Losses (B,) and logits (Le, T) sample by sample, without dropout."""
    config, losses, logits = model.config, [], []
    for b in range(batch.num_samples):
        old, new = places(batch, b)
        shown = new + batch.history_offsets[-1]
        tokens = [
            formulas.linear(rows[name][b : b + 1], project)
            for name, project in zip(config.context, model.context, strict=True)
        ]
        tokens.append(rows["item"][old] + rows["action"][old] + (rows["genre"][old] if config.genres else 0))
        tokens.append(rows["item"][shown] + (rows["genre"][shown] if config.genres else 0))
        x = torch.cat(tokens)
        x = x * config.dim**0.5 + model.positions.weight[: len(x)]
        ages = [torch.tensor([-(2**63)] * len(config.context), dtype=torch.int64)]
        times = torch.cat([*ages, batch.timestamps[old], batch.timestamps[shown]])
        for layer in model.layers:
            x = formulas.hstu_layer(x, layer, len(new), times, times)
        z = formulas.mmoe(formulas.layer_norm(x[len(x) - len(new) :], model.norm), model.head)
        y = batch.labels[new].to(z.dtype)
        p = torch.sigmoid(z)
        losses.append(-(y * torch.log(p) + (1 - y) * torch.log(1 - p)).sum())
        logits.append(z)
    return torch.stack(losses), torch.cat(logits)


CONFIGS = {
    "full": CONFIG,
    "bare": replace(CONFIG, context=(), genres=False, tasks=("click",)),
    "biased": replace(CONFIG, relative_bias=True, time_buckets=5, recompute=("norm", "silu")),
    "product": replace(CONFIG, norm_product=True, recompute=("attention", "gate")),
    "deep": replace(CONFIG, context=("age",), layers=3, experts=4, top_k=4),
}


CASES, DISTINCT = CONFIGS, 1 + sum(count > 0 for count in EXPOSED)
EMPTY = [[], [(0, 0)], [(0, 0), (0, 0)], [(3, 0), (0, 0)]]
SUBSETS = [[3], [2], [1, 4], [5, 4, 3, 2, 1, 0], [0, 3], [2, 5, 1]]
SPLIT = [[5, 1, 3], [], [4, 0, 2]]


LENGTHS = [*zip(HISTORY, EXPOSED, strict=True)]


def make(case, lengths=LENGTHS):
    history, exposed = ([pair[part] for pair in lengths] for part in (0, 1))
    return make_model(CONFIGS[case]), make_batch(history, exposed, CONFIGS[case])


def of_samples(args, found, samples):
    shown = torch.cat([torch.arange(0), *(places(args[0], b)[1] for b in samples)])
    return [found[0][samples], found[1][shown], *rows_of(args[0], found[2], samples).values()]


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_forward_and_gradients_are_the_formula(accumulate, config, exactly):
    model = make_model(config).eval()
    attached = accumulate(model) if exactly else {}
    batch, rows = make_batch(config=config)
    losses, logits, gradients = run(model, batch, rows)
    exact = make_model(config).double()
    leaves = {name: part.double().requires_grad_() for name, part in rows.items()}
    expected = oracle(exact, batch, leaves)
    expected[0].sum().backward()
    results = {"losses": (losses, expected[0]), "logits": (logits, expected[1])}
    results |= {f"rows of {name}": (gradients[name], leaf.grad) for name, leaf in leaves.items()}
    formulas.assert_same(results, model, exact, attached)


def changed_logits(history, exposed, feature, row):
    """Which logits of one sample change with a row of a feature."""
    model, (batch, rows) = make_model().eval(), make_batch([history], [exposed])
    before = model.logits(batch, rows, 0)
    rows[feature][row, 0] += 1  # not all columns: a layer norm takes a common shift away
    return (model.logits(batch, rows, 0) != before).any(1).tolist()


def test_exposed_items_see_context_and_history_and_not_each_other():
    for row in range(3):
        assert changed_logits(4, 3, "item", 4 + row) == [at == row for at in range(3)]
        assert changed_logits(4, 3, "genre", 4 + row) == [at == row for at in range(3)]
    for feature in ("item", "action", "genre"):
        for row in range(4):
            assert all(changed_logits(4, 3, feature, row)), (feature, row)
    for feature in CONFIG.context:
        assert all(changed_logits(4, 3, feature, 0)) and all(changed_logits(0, 1, feature, 0))


def test_probabilities_are_without_dropout_and_leave_the_mode():
    model, (batch, rows) = make_model(), make_batch()
    exact = torch.sigmoid(oracle(make_model().double(), batch, {n: r.double() for n, r in rows.items()})[1])
    for mode in (True, False):
        model.train(mode)
        got = model.predict(batch, {name: part.clone().requires_grad_() for name, part in rows.items()})
        torch.testing.assert_close(got.double(), exact.detach(), rtol=0, atol=1e-4)
        assert model.training is mode and not got.requires_grad
    model.train()
    one, two, other = (model(batch, rows, seed) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_dropout_of_the_input_is_drawn_from_the_seed():
    model = make_model(replace(CONFIG, dropout=0.0, input_dropout=0.4))
    one, same, other = (model.logits(*make_batch(), seed) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    plain = make_model(replace(CONFIG, dropout=0.0)).eval().logits(*make_batch(), 1)
    assert torch.equal(model.eval().logits(*make_batch(), 1), plain)


def test_layers_draw_masks_of_their_own():
    model, seeds = make_model(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, given, out: seeds.append(given[2]))
    model(*make_batch(), SEED)
    assert len(seeds) == len(set(seeds)) == CONFIG.layers


def test_rows_are_those_of_the_lookups():
    """Names and numbers of rows as the batch asks for them."""
    for config in CONFIGS.values():
        batch, rows = make_batch(config=config)
        asked = {
            name: len(lookup.ids) if lookup.offsets is None else len(lookup.offsets) - 1
            for name, lookup in batch.lookups().items()
        }
        assert {name: len(part) for name, part in rows.items()} == asked


def test_one_exposed_item_and_nothing_else():
    model, (batch, rows) = make_model(CONFIGS["bare"]).eval(), make_batch([0], [1], CONFIGS["bare"])
    exact = oracle(make_model(CONFIGS["bare"]).double(), batch, {n: r.double() for n, r in rows.items()})
    torch.testing.assert_close(model(batch, rows, 0).double(), exact[0], rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
    model = make_model()
    model(*make_batch([18], [3]), SEED)
    with pytest.raises(ValueError, match="a sample has 24 tokens, the model takes 23"):
        model(*make_batch([2, 18], [1, 4]), SEED)
    batch, rows = make_batch()
    with pytest.raises(ValueError, match=r"the batch has tasks \('click',\), the model \('click', 'conv"):
        model(replace(batch, tasks=("click",), labels=batch.labels[:, :1]), rows, SEED)
    with pytest.raises(ValueError, match=r"context may not be named like a feature of tokens: \['item'\]"):
        GRM(replace(CONFIG, context=("item", "age")))


def test_without_an_accumulator_gradients_are_ordinary(accumulate):
    model, (batch, rows) = make_model(), make_batch()
    accumulate(model)
    accumulate(None)
    run(model, batch, rows)
    assert all(parameter.grad.any() for parameter in model.parameters())
