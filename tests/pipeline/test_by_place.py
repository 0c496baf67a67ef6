"""Promise: functions whose last bits depend on where a value stands are refused where no sample shows it."""

import pytest
import torch
from guard_models import refuse
from trainer_parts import NoParameters, batches, parts, trainer

from tritonrec.pipeline import by_place
from tritonrec.pipeline.by_place import Call, differs, first_by_place

SIGMOID = torch.ops.aten.sigmoid.default
ANY = ((0, None),)


class Scored(NoParameters):
    """Its loss calls `function` for a value of each sample that is the same for all: no sample differs."""

    function = staticmethod(torch.sigmoid)

    def forward(self, batch, rows, seed):
        losses = super().forward(batch, rows, seed)
        return losses + self.function(losses * 0.0)


class Entropy(Scored):
    """Whose backward pass calls sigmoid."""

    @staticmethod
    def function(x):
        return torch.nn.functional.binary_cross_entropy_with_logits(x, x + 1, reduction="none")


class OfOne(Scored):
    """Of one value, whatever the batch."""

    @staticmethod
    def function(x):
        return x * torch.sigmoid(torch.tensor(0.3, dtype=torch.float32))


@pytest.mark.parametrize(("kind", "where"), [(Scored, "torch's sigmoid"), (Entropy, "in its backward pass")])
@pytest.mark.parametrize("count", [1, 3])
def test_a_function_by_place_is_refused_though_no_sample_shows_it(monkeypatch, kind, where, count):
    monkeypatch.setattr(by_place, "differs", lambda *call: True)  # as on most processors
    refuse(kind, f"{where}.* module {kind.__name__}:", micro_batches=count)


@pytest.mark.parametrize(("kind", "differ"), [(OfOne, True), (Scored, False)])
def test_one_that_no_cut_reaches_or_that_is_the_same_everywhere_is_taken(monkeypatch, kind, differ):
    monkeypatch.setattr(by_place, "differs", lambda *call: differ)
    with trainer(parts(kind), "sequential", micro_batches=1) as training:
        assert len(list(training.run(batches(1)))) == 1 and training.guard.checks


def test_the_machine_decides_by_the_width_that_a_cut_leaves():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(3), dtype=torch.float32) * 3
    pieces = torch.cat([torch.sigmoid(each.clone()) for each in x.split(1)])
    assert differs(SIGMOID, ANY, torch.float32, 1) == (not torch.equal(torch.sigmoid(x), pieces))
    assert not differs(SIGMOID, ANY, torch.float32, 64)  # whole vectors of every processor
    assert not differs(torch.ops.aten.tanh.default, ANY, torch.float32, 1)


def test_calls_are_those_of_tensors_of_one_shape():
    x = torch.ones(3, 2, dtype=torch.float32)
    power = torch.ops.aten.pow.Tensor_Scalar
    assert Call.of(power, (x, 1.5), {}, x).arguments == ((0, None), (1, 1.5))
    assert Call.of(torch.ops.aten.pow.Tensor_Tensor, (x, x[:1]), {}, x) is None
    assert Call.of(torch.ops.aten.mul.Tensor, (x, x), {}, x) is None
    for also in (torch.ops.aten.gelu_backward.default, torch.ops.aten.elu_.default):
        assert Call.of(also, (x, x), {}, x) is not None


def test_another_path_through_the_model_says_nothing(monkeypatch):
    widths = []
    monkeypatch.setattr(by_place, "differs", lambda *call: not widths.append(call[-1]))
    whole, part, other = (
        Call(func, ANY, torch.float32, count, None)
        for func, count in ((SIGMOID, 6), (SIGMOID, 4), (torch.ops.aten.silu.default, 1))
    )
    assert first_by_place([whole], [part]) is whole
    assert first_by_place([whole], [other]) is None and first_by_place([whole], [whole]) is None
    assert widths == [2]
