"""Promise: somebody's own model is proved like ours, and what breaks the promise in it is named."""

import pytest
import torch
from speeds import slow_except

from tritonrec import nn, verify
from tritonrec.data import NextItemLoader, load
from tritonrec.embedding import FeatureConfig
from tritonrec.pipeline.diagnosis import diagnose

DIM = 6
FEATURES = [FeatureConfig("item", DIM)]


class Sound(torch.nn.Module):
    """Two dots per token; every module of ours."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def body(self, batch, x):
        return self.mix(self.norm(x), batch.offsets)

    def forward(self, batch, rows, seed):
        rows = rows["item"]
        tokens = batch.num_tokens
        hidden = self.body(batch, rows[:tokens])
        hits = (hidden * rows[tokens : 2 * tokens]).sum(1)
        misses = (hidden[:, None] * rows[2 * tokens :].reshape(tokens, -1, DIM)).sum((1, 2))
        return nn.sum_by_sample(torch.exp(misses - hits), batch.offsets)


class MeanOverBatch(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Centred(Sound):
    """Subtracts the batch's mean: a sample's activations depend on its neighbours."""

    def __init__(self):
        super().__init__()
        self.centre = MeanOverBatch()

    def body(self, batch, x):
        return super().body(batch, self.centre(x))


class PlainLinear(Sound):
    """torch.nn.Linear: its weight gradient is a float sum over whatever is in the micro-batch."""

    def __init__(self):
        super().__init__()
        self.plain = torch.nn.Linear(DIM, DIM)

    def body(self, batch, x):
        return super().body(batch, self.plain(x))


@pytest.fixture(scope="module")
def batches():
    loader = NextItemLoader(load("zipf:users=40,items=50,seed=2"), 9, 8, 2, seed=0)
    return [loader.batch(step) for step in range(3)]


def test_a_sound_model_passes(batches):
    report = verify(Sound, batches, FEATURES, modes=("nestpipe", "dbp"), micro_batches=(1, 3))
    assert report.passed, str(report)
    assert len(report.cases) == 4
    assert "identical" in str(report)


class ByLongest(torch.nn.Module):
    def forward(self, x, offsets):
        return x + x * x / offsets.diff().max()


class Normed(Centred):
    def __init__(self):
        super().__init__()
        self.centre = ByLongest()

    def body(self, batch, x):
        return Sound.body(self, batch, self.centre(x, batch.offsets))


def test_a_module_that_the_first_batch_does_not_show_is_named_by_a_later_one(batches):
    lengths = batches[0].offsets.diff()
    alike = batches[0].select((lengths == lengths.mode().values).nonzero().squeeze(1))
    assert alike.num_samples > 1 and diagnose(Normed(), alike, FEATURES).module is None
    report = verify(Normed, [alike, *batches[1:]], FEATURES, modes=("dbp",), micro_batches=(9,))
    assert report.not_invariant == "centre"


def test_an_inexact_gradient_is_named(batches):
    report = verify(PlainLinear, batches, FEATURES, modes=("nestpipe",), micro_batches=(2,))
    assert not report.passed
    assert "parameter plain.weight" in str(report)


@pytest.mark.parametrize("precision", slow_except(["bf16"], ["bf16", "fp16"]))
def test_a_model_is_proved_in_16_bits(batches, precision):
    options = {"modes": ("nestpipe",), "micro_batches": (3,), "world_sizes": (2,), "precision": precision}
    report = verify(Sound, batches, FEATURES, **options)
    assert report.passed, str(report)
    unsound = verify(PlainLinear, batches, FEATURES, **options)
    assert unsound.not_invariant == "plain" and "parameter plain" in str(unsound)


def test_bad_batches_are_refused(batches):
    with pytest.raises(ValueError, match="at least one batch"):
        verify(Sound, [], FEATURES)
    with pytest.raises(ValueError, match=r"batches\[0\].step must be 0, got 1"):
        verify(Sound, batches[1:], FEATURES)
