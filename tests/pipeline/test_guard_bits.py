"""Promise: the guard compares every bit: of losses, of all gradients, of batches and of buffers."""

from dataclasses import dataclass, field

import pytest
import torch
from trainer_parts import DIM, NoParameters, batches, parts, trainer

from tritonrec import nn
from tritonrec.data import JaggedBatch
from tritonrec.data.batch import per_sample
from tritonrec.pipeline import NotBatchInvariantError


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


class MeanGradient(torch.autograd.Function):
    """Its value is the argument, its gradient the mean over the batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx.mean(0).expand_as(dx)


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
        return MeanGradient.apply(self.mix(rows.detach(), offsets))


class RowsByCut(ParametersByCut):
    """The other way: of all gradients those of rows alone are means over the batch."""

    def hidden(self, rows, offsets):
        return self.mix(MeanGradient.apply(rows), offsets)


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
