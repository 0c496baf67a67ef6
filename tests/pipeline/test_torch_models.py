"""Promise: models of torch's modules, converted, train in every mode as in the reference run, bit for bit."""

import pytest
import torch
from speeds import slow_except
from torch.utils.checkpoint import checkpoint
from trainer_parts import DIM, batches, parts, same, state, trained, trainer

from tritonrec import nn
from tritonrec.data import NextItemLoader, load
from tritonrec.distributed import Communicators
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import NotBatchInvariantError

tnn = torch.nn
LONGEST = 9


class SASRec(tnn.Module):
    """Kang and McAuley, "Self-attentive sequential recommendation", ICDM 2018, as its torch port has it."""

    def __init__(self):
        super().__init__()
        self.positions, self.drop = tnn.Embedding(LONGEST, DIM), tnn.Dropout(0.2)
        self.norms = tnn.ModuleList(tnn.LayerNorm(DIM, eps=1e-8) for _ in range(4))
        self.attention = tnn.ModuleList(tnn.MultiheadAttention(DIM, 2, 0.1) for _ in range(2))
        self.feed_forward = tnn.ModuleList(
            tnn.Sequential(
                tnn.Conv1d(DIM, DIM, 1),
                tnn.Dropout(0.2),
                tnn.ReLU(),
                tnn.Conv1d(DIM, DIM, 1),
                tnn.Dropout(0.2),
            )
            for _ in range(2)
        )

    def forward(self, x, hidden):
        x = self.drop(x * DIM**0.5 + self.positions(torch.arange(x.shape[1])[None]))
        seen = ~hidden[..., None]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for layer in range(2):
            x = (x * seen).transpose(0, 1)
            q = self.norms[2 * layer](x)
            x = (q + self.attention[layer](q, x, x, attn_mask=later)[0]).transpose(0, 1)
            x = self.norms[2 * layer + 1](x)
            x = x + self.feed_forward[layer](x.transpose(1, 2)).transpose(1, 2)
        return x * seen


class BERT4Rec(tnn.Module):
    """Two encoder layers of torch's over left-padded rows."""

    def __init__(self):
        super().__init__()
        layer = tnn.TransformerEncoderLayer(DIM, 2, 12, 0.1, "gelu", batch_first=True)
        self.encoder = tnn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, hidden):
        return self.encoder(x, src_key_padding_mask=hidden)


class GRU4Rec(tnn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.gru = tnn.Dropout(0.1), tnn.GRU(DIM, 7, 2, batch_first=True, dropout=0.2)
        self.out = tnn.Linear(7, DIM)

    def forward(self, x, hidden):
        return self.out(self.gru(self.drop(x))[0])


class Jagged(tnn.Module):
    """No padding at all: an encoder layer over the tokens (L, d) as they lie."""

    def __init__(self):
        super().__init__()
        self.layer = tnn.TransformerEncoderLayer(DIM, 2, 12, 0.1, batch_first=True, norm_first=True)
        self.mix = tnn.Sequential(tnn.RMSNorm(DIM), tnn.Linear(DIM, DIM), tnn.SiLU())

    def forward(self, batch, rows, seed):
        tokens = batch.num_tokens
        hidden = self.mix(self.layer(rows["item"][:tokens], is_causal=True))
        score = (hidden * rows["item"][tokens : 2 * tokens]).sum(1)
        return nn.sum_by_sample(1 - torch.tanh(score), batch.offsets)


MODELS = {
    "sasrec": lambda: nn.PaddedNextItem(SASRec(), LONGEST, loss="bce", dim=DIM),
    "bert4rec": lambda: nn.PaddedNextItem(BERT4Rec(), LONGEST),
    "gru4rec": lambda: nn.PaddedNextItem(GRU4Rec(), LONGEST, side="right"),
    "jagged": Jagged,
}


def converted(name):
    torch.manual_seed(8)
    model = MODELS[name]()
    assert nn.convert(model).left == {}
    return model


def reference(name):
    return trained(parts(lambda: converted(name)), "reference", "batch", batches(3))


@pytest.mark.parametrize(
    ("name", "mode", "count"),
    slow_except(
        [
            ("sasrec", "nestpipe", 4),
            ("bert4rec", "nestpipe", 4),
            ("gru4rec", "fwp", 3),
            ("jagged", "nestpipe", 4),
        ],
        [(name, mode, count) for name in MODELS for mode in ("nestpipe", "fwp") for count in (1, 3, 4)],
    ),
)
def test_any_cut_trains_as_the_reference_does(name, mode, count):
    expected, losses = reference(name)
    made = parts(lambda: converted(name))
    got, results = trained(made, mode, "batch", batches(3), micro_batches=count)
    assert same(got, expected)
    for one, other in zip(losses, results, strict=True):
        assert torch.equal(one.losses, other.losses) and one.losses.isfinite().all()
    pairs = zip(made[0].parameters(), converted(name).parameters(), strict=True)
    assert all(bool((one != other).any()) for one, other in pairs), "a parameter rests"


def test_dropout_is_repeated_where_backward_computes_again():
    def build(again):
        model = converted("jagged")
        if again:
            forward = model.layer.forward
            model.layer.forward = lambda x, **options: checkpoint(forward, x, use_reentrant=False, **options)
        return model

    kept, again = (
        trained(parts(lambda again=again: build(again)), "nestpipe", "batch", batches(2))[0]
        for again in (False, True)
    )
    assert same(kept, again)


def dense_after(communicators, name, model=None):
    """Parameters and losses by sample after training on this rank's shares of three global batches."""
    made = parts(lambda: model or converted(name))
    rank, world = communicators.rank, communicators.world_size
    loader, losses = NextItemLoader(load("zipf:users=60,items=80,seed=1"), 8, 9, 1, 3, rank, world), {}
    shares = (loader.batch(step) if world > 1 else loader.global_batch(step) for step in range(3))
    with trainer(made, "nestpipe", "batch", communicators, micro_batches=4) as training:
        for result in training.run(shares):
            numbers = [(result.step, sample) for sample in result.sample_ids.tolist()]
            losses |= dict(zip(numbers, result.losses.tolist(), strict=True))
    return [parameter.detach() for parameter in made[0].parameters()], losses


@pytest.mark.parametrize("name", slow_except(["sasrec"], MODELS))
def test_two_ranks_train_as_one(name):
    models = [converted(name), converted(name)]  # threads share the generator that draws parameters
    ranks = run_ranks(2, lambda ranks: dense_after(ranks, name, models[ranks.rank]))
    whole, losses = dense_after(Communicators.local(), name)
    assert {**ranks[0][1], **ranks[1][1]} == losses and len(losses) == 24
    for parameters, _ in ranks:
        assert same(parameters, whole)


def test_what_was_not_converted_is_refused_by_name():
    with pytest.raises(NotBatchInvariantError, match=r"take tritonrec\.nn\.Dropout") as refused:
        trained(parts(MODELS["gru4rec"]), "reference", "batch", batches(1))
    assert refused.value.module.startswith("body.encoder.")


def test_as_it_is_at_window_consistency():

    def built():
        torch.manual_seed(8)
        return MODELS["bert4rec"]().eval()

    one, _ = trained(parts(built), "sequential", "window", batches(3))
    other, _ = trained(parts(built), "nestpipe", "window", batches(3))
    assert same(one, other) and not same(one, state(parts(built)))
