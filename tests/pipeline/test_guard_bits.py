"""Promise: the guard compares every bit: of losses, of all gradients, of batches and of buffers."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from guard_models import Backward
from trainer_parts import DIM, NoParameters, batches, parts, trainer

from tritonrec import nn
from tritonrec.data import JaggedBatch
from tritonrec.data.batch import per_sample
from tritonrec.pipeline import NotBatchInvariantError, attributes
from tritonrec.pipeline.guard import KnownRows


class LastBit(NoParameters):
    """The loss of a sample that has company is the next number above."""

    def forward(self, batch, rows, seed):
        losses = super().forward(batch, rows, seed)
        plain = losses.detach()
        return losses + (torch.nextafter(plain, plain + 1) - plain) * (batch.num_samples > 1)


def test_the_last_bit_of_a_loss_counts():
    with (
        trainer(parts(LastBit), "sequential", micro_batches=1) as training,
        pytest.raises(NotBatchInvariantError, match="whose loss of sample"),
    ):
        list(training.run(batches(1)))


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


def test_a_batch_with_nan_is_no_edited_one():
    with trainer(parts(OfPrice), "sequential", micro_batches=1) as training:
        assert len(list(training.run(priced(float("nan"))))) == 2
        assert training.guard.checks > 0


def test_a_zero_whose_sign_is_turned_is_edited():
    with (
        trainer(parts(TurnsPrices), "sequential", micro_batches=1) as training,
        pytest.raises(NotBatchInvariantError, match="changes its batch in place: give it a copy"),
    ):
        list(training.run(priced(0.0)))


class SignedBuffer(NoParameters):
    """A buffer of zero, whose sign each call turns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sign", torch.zeros(1, dtype=torch.float32))

    def forward(self, batch, rows, seed):
        self.sign.neg_()
        return super().forward(batch, rows, seed)


def test_a_buffer_whose_sign_each_call_turns_is_state():
    made = parts(SignedBuffer)
    with (
        trainer(made, "sequential", micro_batches=1) as training,
        pytest.raises(NotBatchInvariantError, match="whose calls change buffer sign"),
    ):
        list(training.run(batches(1)))
    assert not made[0].sign.signbit().any()  # as it was


class OwnNoise(NoParameters):
    """The same noise in each call, of a generator of its own."""

    def forward(self, batch, rows, seed):
        noise = torch.rand(1, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
        return super().forward(batch, rows, seed) * (1 + noise)


def test_a_generator_of_ones_own_is_not_torchs():
    with trainer(parts(OwnNoise), "sequential", micro_batches=1) as training:
        assert len(list(training.run(batches(2)))) == 2 and training.guard.checks > 0


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


@pytest.mark.parametrize(
    ("model", "what"),
    [(ParametersByCut, r"gradient of mix\.\w+ depends"), (RowsByCut, "gradients of rows of")],
)
def test_gradients_of_parameters_or_rows_alone_are_compared(model, what):
    with (
        trainer(parts(model), "sequential", micro_batches=1) as training,
        pytest.raises(NotBatchInvariantError, match=f"whose {what}.* on the cut"),
    ):
        list(training.run(batches(1)))


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


@pytest.mark.parametrize(
    ("model", "what"), [(WritesParameter, "parameter large"), (WritesBuffer, "buffer table")]
)
def test_a_write_to_one_large_value_is_found(model, what):
    with (
        trainer(parts(model), "sequential", micro_batches=1) as training,
        pytest.raises(NotBatchInvariantError, match=f"whose calls change {what}"),
    ):
        list(training.run(batches(1)))


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
