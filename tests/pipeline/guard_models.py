"""Models whose samples see each other, and what these are made of."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from trainer_parts import DIM, batches, parts, trainer

from tritonrec import nn, ops
from tritonrec.pipeline import NotBatchInvariantError

tnn = torch.nn


class Model(tnn.Module):
    """A loss per sample of `body`'s vector of each sample (B, d), `x`, and of its label's mean row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.mix = nn.Linear(DIM, DIM)
        self.make()

    def make(self):
        pass

    def body(self, batch, x):
        return x

    def loss(self, x, y):
        return 1 - torch.tanh((x * y).sum(1))

    def forward(self, batch, rows, seed):
        rows, tokens = rows["item"], batch.num_tokens
        owners = torch.repeat_interleave(torch.arange(batch.num_samples), batch.offsets.diff())
        x, y = (
            ops.segment_sum(part, owners, batch.num_samples)
            for part in (rows[:tokens], rows[tokens : 2 * tokens])
        )
        with nn.padded():
            return self.loss(self.body(batch, self.mix(x)), y)


def refuse(build, match, given=None, mode="sequential", **options):
    """The model that it builds is refused with these words, in one of the batches; the trainer's parts."""
    made = parts(build, **options.pop("parts", {}))
    with (
        trainer(made, mode, **{"micro_batches": 1, **options}) as training,
        pytest.raises(NotBatchInvariantError, match=match),
    ):
        list(training.run(batches(1) if given is None else given))
    return made


def model(**methods):
    """A `Model` with other methods; `parts` makes one."""
    return type("Own", (Model,), methods)


def part(name, make, **methods):
    """A `Model` with a module of this name in its body."""

    def add(self):
        torch.manual_seed(4)
        setattr(self, name, make())

    def body(self, batch, x):
        return getattr(self, name)(x)

    return model(make=add, **{"body": body, **methods})


class Function(tnn.Module):
    def __init__(self, of_batch):
        super().__init__()
        self.of_batch = of_batch

    def forward(self, x):
        return self.of_batch(x)


class FirstMean(tnn.Module):
    """Kept from the first call."""

    mean = None

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return x - self.mean


class FirstMeanInNestedContainers(FirstMean):
    def __init__(self):
        super().__init__()
        self.kept = OrderedDict(of=[{}])

    def forward(self, x):
        return x - self.kept["of"][0].setdefault("mean", x.detach().mean(0))


class FirstMeanInAParameter(tnn.Module):
    def __init__(self):
        super().__init__()
        self.mean = tnn.Parameter(torch.zeros(DIM), requires_grad=False)

    def forward(self, x):
        if not self.mean.any():
            self.mean.data.copy_(x.detach().mean(0))
        return x - self.mean


class Running(tnn.Module):
    """Divided by a running size."""

    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x):
        self.size.lerp_(x.detach().abs().mean(), 0.1)
        return x / 7.0


class Counter(tnn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x


class Backward(torch.autograd.Function):
    """Its gradient is the mean over the batch, and its value is not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx.mean(0).expand_as(dx)


def in_batch_softmax(self, x, y):
    return F.cross_entropy(x @ y.t(), torch.arange(len(x)), reduction="none")


def two_towers():
    """With in-batch negatives; torch's modules, converted."""

    class Towers(Model):
        def make(self):
            self.user, self.item = (
                tnn.Sequential(tnn.Linear(DIM, DIM), tnn.GELU(), tnn.Linear(DIM, DIM)) for _ in range(2)
            )

        def loss(self, x, y):
            x, y = F.normalize(self.user(x)), F.normalize(self.item(y))
            return in_batch_softmax(self, x * 4, y)

    made = Towers()
    assert not nn.convert(made).left
    return made


def edits(self, batch, x):
    batch.timestamps.sub_(batch.timestamps.max())
    return x * batch.timestamps.float().mean()


def edits_through_numpy(self, batch, x):
    batch.labels.numpy()[:] = 0
    return x
