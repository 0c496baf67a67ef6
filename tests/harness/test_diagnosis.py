"""Promise: `verify` proves a user's own model, and names the module that breaks bits and the reason."""

import pytest
import torch
import torch.nn.functional as F
from speeds import slow_except

from tritonrec import nn, verify
from tritonrec.data import NextItemLoader, load
from tritonrec.embedding import FeatureConfig
from tritonrec.harness.verify import thread_ranks
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.harness.verify.user_model import ModelReport
from tritonrec.pipeline.diagnosis import MOST_ALONE, diagnose

tnn = torch.nn
DIM, LONGEST = 6, 8
FEATURES = [FeatureConfig("item", DIM)]


class Model(tnn.Module):
    """A score for each token, of `body`'s hidden states; all modules are ours."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.make()

    def make(self):
        pass

    def body(self, batch, x):
        return x

    def forward(self, batch, rows, seed):
        rows, tokens = rows["item"], batch.num_tokens
        hidden = self.mix(self.body(batch, self.norm(rows[:tokens])))
        return nn.sum_by_sample(torch.exp(-(hidden * rows[tokens : 2 * tokens]).sum(1)), batch.offsets)


class Centre(tnn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Centred(Model):
    def make(self):
        self.centre = Centre()

    def body(self, batch, x):
        return self.centre(x)


class CentredByItself(Model):
    def body(self, batch, x):
        return x - x.mean(0)


class Normed(Model):
    def make(self):
        self.bn = tnn.BatchNorm1d(DIM)

    def body(self, batch, x):
        return self.bn(x)


class Plain(Model):
    def make(self):
        self.plain = tnn.Linear(DIM, DIM)

    def body(self, batch, x):
        return self.plain(x)


class Dropped(Model):
    def make(self):
        self.drop = tnn.Dropout(0.3)

    def body(self, batch, x):
        return self.drop(x)


class DroppedByFunction(Model):
    def body(self, batch, x):
        return F.dropout(x, 0.3)


class Curve(tnn.Module):
    """Five features are no whole number of vectors on any processor; of four curves one differs in a bit."""

    def forward(self, x):
        return torch.cat([x[:, :1], sum(F.softplus(n * x[:, 1:]) for n in range(1, 5))], 1)


class Curved(Model):
    def make(self):
        self.curve = Curve()

    def body(self, batch, x):
        return self.curve(x)


class FailsAlone(Model):
    def body(self, batch, x):
        if batch.num_samples == 1:
            raise ValueError("one sample has no neighbour")
        return x


class Scaled(Model):
    def make(self):
        self.scale = tnn.Parameter(torch.ones(DIM))

    def body(self, batch, x):
        return x * self.scale


class Broadcast(Model):
    """One row for all tokens: its gradient is summed over them before a module of ours sees it."""

    def make(self):
        self.table = nn.PositionalEmbedding(3, DIM)

    def body(self, batch, x):
        return x + self.table(torch.tensor([1]))


# model, module to blame, reason
BLAMED = {
    "a mean over the batch": (Centred, "centre", "values of other samples: a mean"),
    "a mean in own code": (CentredByItself, "CentredByItself", "code of CentredByItself before it calls mix"),
    "batch norm": (Normed, "bn", "batch norm, which mixes"),
    "torch's linear": (Plain, "plain", r"BLAS|parameter plain.weight gets an ordinary"),
    "torch's dropout": (Dropped, "drop", "draws from torch's global generator: take tritonrec.nn.Dropout"),
    "dropout by function": (
        DroppedByFunction, "DroppedByFunction",
        r"global generator of .*, in the code of DroppedByFunction before it calls mix \(Linear\)",
    ),
    "softplus": (Curved, "curve", "last bits only: .* softplus"),
    "neighbours needed": (
        FailsAlone, "FailsAlone", "it fails for one sample alone.*one sample has no neighbour"
    ),
    "a bare parameter": (Scaled, "Scaled", "parameter scale gets an ordinary float32 .* nn.expand"),
    "one row for all": (Broadcast, "table", "changes with the cut, .* a broadcast of one row"),
}  # fmt: skip


@pytest.fixture(scope="module")
def batches():
    loader = NextItemLoader(load("zipf:users=40,items=50,seed=2"), 9, LONGEST, 2, seed=0)
    return [loader.batch(step) for step in range(2)]


@pytest.mark.parametrize("what", BLAMED)
def test_the_module_to_blame_is_named_with_its_reason(batches, what):
    build, module, reason = BLAMED[what]
    found = diagnose(build(), batches[0], FEATURES)
    assert found.error is None and found.module == module
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.reason)


def test_nobody_is_blamed_in_a_sound_model(batches):
    class Dropping(Model):
        def make(self):
            self.drop, self.act = nn.Dropout(0.3), tnn.ReLU()

        def body(self, batch, x):
            return self.act(self.drop(x))

    for build in (Model, Dropping):
        found = diagnose(build(), batches[0], FEATURES)
        assert (found.error, found.module, found.reason) == (None, None, None)


def test_a_sound_model_passes(batches):
    report = verify(Model, batches, FEATURES, modes=("nestpipe", "dbp"), micro_batches=(1, 3))
    assert report.passed and len(report.cases) == 4 and "identical" in str(report), str(report)
    assert not ModelReport([], None).passed  # a report without a case proves nothing


@pytest.mark.parametrize("precision", slow_except(["bf16"], ["bf16", "fp16"]))
def test_a_model_is_proved_in_16_bits(batches, precision):
    options = {"modes": ("nestpipe",), "micro_batches": (3,), "world_sizes": (2,), "precision": precision}
    report = verify(Model, batches, FEATURES, **options)
    assert report.passed, str(report)
    unsound = verify(Plain, batches, FEATURES, **options)
    assert unsound.not_invariant == "plain" and "parameter plain" in str(unsound)


def test_bad_batches_are_refused(batches):
    with pytest.raises(ValueError, match="at least one batch"):
        verify(Model, [], FEATURES)
    with pytest.raises(ValueError, match=r"batches\[0\].step must be 0, got 1"):
        verify(Model, batches[1:], FEATURES)


def test_a_report_prints_the_reason(batches):
    report = verify(Centred, batches, FEATURES, modes=("nestpipe",), micro_batches=(2,))
    assert not report.passed
    assert "first module that is not batch-invariant: centre\nreason: it depends on the values" in str(report)


class Failing(Model):
    def make(self):
        self.wrong = tnn.Sequential(nn.Linear(DIM + 1, DIM))

    def body(self, batch, x):
        return self.wrong(x)


class Scalar(Model):
    def forward(self, *given):
        return super().forward(*given).sum()


class Misplaced(Model):
    """Padded rows without saying so."""

    def body(self, batch, x):
        wide, _ = nn.pad(x, batch.offsets, LONGEST)
        return nn.unpad(self.norm(self.mix(wide)), batch.offsets, len(x))


ERRORS = {
    "a layer of another size": (Failing, r"in wrong.0 \(Linear\): x must be \(L, in\)"),
    "a scalar": (Scalar, r"the model must return one loss per sample.* it returned shape \(\)"),
    "padded rows": (
        Misplaced, r"in .*: mix \(Linear\) got rows \(\d+, 8\) of a batch .* enter nn.padded\(\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_of_the_model_ends_in_the_report(batches, what):
    build, message = ERRORS[what]
    report = verify(build, batches, FEATURES, modes=("nestpipe",), micro_batches=(2,))
    assert not report.passed and len(report.cases) == 1 and report.not_invariant is None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(str(report))


class ToTheLongest(Model):
    """Left-padded to the longest sample of the batch, so that positions depend on it."""

    def make(self):
        self.table = nn.Embedding(LONGEST, DIM)

    def body(self, batch, x):
        longest = int(batch.offsets.diff().max())
        wide, _ = nn.pad(x, batch.offsets, longest)
        with nn.padded():
            wide = wide + self.table(torch.arange(longest)[None])
        return nn.unpad(wide, batch.offsets, len(x))


def test_padding_to_the_longest_sample_is_named_from_whatever_batch_shows_it():
    loader = NextItemLoader(load("zipf:users=40,items=50,seed=2"), 3, LONGEST, 2, seed=0)
    given = [loader.batch(step) for step in range(2)]
    alike, others = (batch.offsets.diff().unique().numel() == 1 for batch in given)
    assert alike and not others
    assert diagnose(ToTheLongest(), given[0], FEATURES).module is None
    report = verify(ToTheLongest, given, FEATURES, modes=("nestpipe",), micro_batches=(3,))
    assert report.not_invariant == "ToTheLongest" and "padding to the longest sample" in str(report)


class CentredWhereMany(Model):
    def body(self, batch, x):
        return x - x.mean(0) if batch.num_samples > MOST_ALONE else x


def test_a_module_that_mixes_only_more_samples_than_are_tried_alone_is_named():
    loader = NextItemLoader(load("zipf:users=60,items=50,seed=2"), MOST_ALONE + 5, LONGEST, 2, seed=0)
    found = diagnose(CentredWhereMany(), loader.batch(0), FEATURES)
    assert found.module == "CentredWhereMany" and "values of other samples" in found.reason
    assert diagnose(Model(), loader.batch(0), FEATURES).module is None


class Encoder(tnn.Module):
    """Of torch's modules, with dropout."""

    def __init__(self):
        super().__init__()
        self.positions = tnn.Embedding(LONGEST, DIM)
        layer = tnn.TransformerEncoderLayer(DIM, 2, 8, 0.2, batch_first=True)
        self.encoder = tnn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x, hidden):
        x = x + self.positions(torch.arange(LONGEST)[None])
        return self.encoder(x, torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1)) * ~hidden[..., None]


def theirs():
    torch.manual_seed(3)
    return nn.PaddedNextItem(Encoder(), LONGEST)


def converted():
    model = theirs()
    nn.convert(model)
    return model


def test_torch_s_modules_are_blamed_until_they_are_converted(batches):
    assert "global generator" in diagnose(theirs(), batches[0], FEATURES).reason
    found = diagnose(theirs().eval(), batches[0], FEATURES)
    assert found.module.startswith("body.encoder") and "tritonrec.nn" in found.reason
    assert diagnose(converted(), batches[0], FEATURES).module is None


@pytest.mark.parametrize("most", slow_except([2], [2, 3]))
def test_several_ranks(batches, most):
    worlds = range(1, most + 1)
    options = {"modes": ("nestpipe",), "micro_batches": (2,), "world_sizes": worlds}
    report = verify(converted, batches, FEATURES, **options)
    assert report.passed, str(report)
    assert [case.world_size for case, _ in report.cases] == list(worlds)


def test_a_float_sum_shows_on_several_ranks(batches):
    report = verify(Plain, batches, FEATURES, modes=("nestpipe",), micro_batches=(1,), world_sizes=(2,))
    assert not report.passed and "parameter plain.weight" in str(report)


def test_any_model_passes_at_window_consistency(batches):
    for build in (theirs, Normed, Dropped):
        report = verify(
            build, batches, FEATURES, consistency="window", modes=("nestpipe",), micro_batches=(1, 2)
        )
        assert report.passed, str(report)
    report = verify(
        Centred, batches, FEATURES, consistency="window", modes=("nestpipe",), micro_batches=(2,),
        world_sizes=(2,),
    )  # fmt: skip
    assert report.passed, str(report)


def test_a_rank_that_waits_for_one_that_has_ended_is_told(monkeypatch):
    monkeypatch.setattr(thread_ranks, "TIMEOUT", 60.0)

    def rank(communicators):
        for _ in range(3 - communicators.control.rank):
            communicators.control.all_to_all_equal(torch.zeros(2, 1))

    with pytest.raises(RuntimeError, match="rank 1 has ended, and others wait for it: give"):
        run_ranks(2, rank)
