"""Promise: the guard compares every bit: of losses, of all gradients, of batches and of buffers."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from guard_models import Backward, refuse
from trainer_parts import DIM, NoParameters, batches, parts, trainer

from tritonrec import nn
from tritonrec.data import JaggedBatch
from tritonrec.data.batch import per_sample
from tritonrec.pipeline import attributes
from tritonrec.pipeline.known_rows import KnownRows


class LastBit(NoParameters):
    """The loss of a sample that has company is the next number above."""

    def forward(self, batch, rows, seed):
        losses = super().forward(batch, rows, seed)
        plain = losses.detach()
        return losses + (torch.nextafter(plain, plain + 1) - plain) * (batch.num_samples > 1)


@dataclass(frozen=True)
class Priced(JaggedBatch):
    """With a price for each sample, NaN where nobody knows it."""

    price: torch.Tensor = field(metadata=per_sample(torch.float32))


def priced(price):
    """Batches whose samples all cost as much."""
    return [
        Priced(**vars(each), price=torch.full((each.num_samples,), price, dtype=torch.float32))
        for each in batches(2)
    ]


class OfPrice(NoParameters):
    def forward(self, batch, rows, seed):
        return super().forward(batch, rows, seed) * (1 + batch.price.nan_to_num(0.5))


class TurnsPrices(NoParameters):
    """Turns their signs where no version of a tensor tells, as of zeros no value does."""

    def forward(self, batch, rows, seed):
        batch.price.numpy()[:] *= -1
        return super().forward(batch, rows, seed)


class SignedBuffer(NoParameters):
    """A buffer of zero, whose sign each call turns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sign", torch.zeros(1, dtype=torch.float32))

    def forward(self, batch, rows, seed):
        self.sign.neg_()
        return super().forward(batch, rows, seed)


class OwnNoise(NoParameters):
    """The same noise in each call, of a generator of its own."""

    def forward(self, batch, rows, seed):
        noise = torch.rand(1, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
        return super().forward(batch, rows, seed) * (1 + noise)


class ParametersByCut(torch.nn.Module):
    """Losses and gradients of rows are those of a sample; parameters' gradients are means over the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, batch, rows, seed):
        rows, tokens = rows["item"], batch.num_tokens
        hidden = self.hidden(rows[:tokens], batch.offsets)
        return nn.sum_by_sample(1 - torch.tanh((hidden * rows[tokens : 2 * tokens]).sum(1)), batch.offsets)

    def hidden(self, rows, offsets):
        return Backward.apply(self.mix(rows.detach(), offsets))


class RowsByCut(ParametersByCut):
    """The other way: of all gradients those of rows alone are means over the batch."""

    def hidden(self, rows, offsets):
        return self.mix(Backward.apply(rows), offsets)


class Large(NoParameters):
    """A parameter and a buffer of 16 MiB; `write` is a write to either that counts no version."""

    write = staticmethod(lambda model: None)

    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(1 << 22, dtype=torch.float32))
        self.register_buffer("table", torch.zeros(1 << 22, dtype=torch.float32))

    def forward(self, batch, rows, seed):
        self.write(self)
        return super().forward(batch, rows, seed)


class WritesParameter(Large):
    write = staticmethod(lambda model: model.large.data[1000:1001].add_(1))


class WritesBuffer(Large):
    write = staticmethod(lambda model: model.table.data[1000:1001].add_(1))


SEEN = {
    "the last bit of a loss": (LastBit, "whose loss of sample"),
    "the sign of a zero in a batch": (TurnsPrices, "changes its batch in place: give it a copy"),
    "the sign of a zero in a buffer": (SignedBuffer, "whose calls change buffer sign"),
    "gradients of parameters alone": (ParametersByCut, r"whose gradient of mix\.\w+ depends.* on the cut"),
    "gradients of rows alone": (RowsByCut, "whose gradients of rows of.* on the cut"),
    "one value of a large parameter": (WritesParameter, "whose calls change parameter large"),
    "one value of a large buffer": (WritesBuffer, "whose calls change buffer table"),
}


@pytest.mark.parametrize("what", SEEN)
def test_every_bit_is_compared(what):
    model, words = SEEN[what]
    made = refuse(model, words, priced(0.0))
    assert model is not SignedBuffer or not made[0].sign.signbit().any()  # as it was


@pytest.mark.parametrize(("model", "price"), [(OfPrice, float("nan")), (OwnNoise, 0.0)])
def test_nan_in_a_batch_and_a_generator_of_ones_own_change_nothing(model, price):
    with trainer(parts(model), "sequential", micro_batches=1) as training:
        assert len(list(training.run(priced(price)))) == 2 and training.guard.checks > 0


def test_a_comparison_copies_no_large_parameter_and_a_buffer_once(monkeypatch):
    copied, clone = [], torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda self, **rest: copied.append(self.nbytes) or clone(self, **rest)
    )
    with trainer(parts(Large), "sequential", micro_batches=1) as training:
        list(training.run(batches(1)))
        assert training.guard.checks == 1
    training_takes = 8 << 22  # the exact sums of its gradients
    assert sum(copied) < training_takes + 1.1 * (4 << 22)


def test_small_tensors_are_put_back_and_large_ones_are_told():
    small, large = torch.ones(3, dtype=torch.float32), torch.ones(attributes.MOST_VALUES, dtype=torch.float32)
    contents = attributes.Contents({"large": large, "small": small})
    assert contents.put_back({"large": large, "small": small}) is None
    large.data[5] = -1
    assert contents.put_back({"large": large, "small": small}) == "large" and large[5] == -1
    small.data[1] = 7
    assert contents.put_back({"large": large, "small": small}) == "small" and small.tolist() == [1, 1, 1]


@pytest.mark.parametrize("known", [0, 1, 40])
def test_rows_of_keys_are_those_of_a_dictionary(known):
    draw = torch.Generator().manual_seed(known)
    distinct = torch.randperm(1000, generator=draw)[:known] - 500
    values = torch.randn(known, 3, generator=draw, dtype=torch.float32)
    inverse = torch.randint(0, max(known - 1, 1), (3 * known,), generator=draw)  # a row may have no key
    rows = KnownRows.of(distinct[inverse], values, inverse)
    expected = {int(distinct[at]): values[at].tolist() for at in inverse.unique()}
    assert dict(zip(rows.keys.tolist(), rows.values.tolist(), strict=True)) == expected
    assert rows.keys.tolist() == sorted(expected)
    wanted = torch.cat([torch.arange(-60, 60), distinct[:2], distinct[:2]])
    table = SimpleNamespace(dim=3, initial_rows=lambda keys: keys[:, None].expand(-1, 5).float())
    some = rows.restricted(wanted, table)
    assert some.keys.tolist() == sorted({*wanted.tolist()})
    assert some.values.tolist() == [expected.get(key, [float(key)] * 3) for key in some.keys.tolist()]
