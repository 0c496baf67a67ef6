"""Promise: a model gets samples and the caller's settings, and has to return a loss per sample."""

import re

import pytest
import torch
from trainer_parts import (
    DIM,
    EVERY,
    EVERY_MODE,
    STAGED_MODES,
    NoParameters,
    Ranker,
    batches,
    parts,
    same,
    state,
    trained,
    trainer,
)

from tritonrec import nn, verify
from tritonrec.embedding import FeatureConfig
from tritonrec.pipeline.diagnosis import diagnose
from tritonrec.pipeline.model_call import CallerSettings
from tritonrec.pipeline.results import note_outputs

FEATURES = [FeatureConfig("item", DIM)]
REFERENCE = {"batch": "reference", "window": "sequential"}


class Returning(Ranker):
    """Returns what `of` makes of the losses."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, batch, rows, seed):
        return self.of(super().forward(batch, rows, seed))


WRONG = {
    "scalar": (lambda losses: losses.sum(), r"of shape \(\d,\); it returned shape \(\)"),
    "tuple": (lambda losses: (losses, losses), r"of shape \(\d,\); it returned tuple"),
    "none": (lambda losses: None, r"it returned NoneType"),
    "column": (lambda losses: losses[:, None], r"it returned shape \(\d, 1\)"),
    "fewer": (lambda losses: losses[1:], r"it returned shape \(\d,\)"),
    "double": (lambda losses: losses.double(), r"it returned torch\.float64: convert it with \.float\(\)"),
    "bfloat16": (lambda losses: losses.bfloat16(), r"it returned torch\.bfloat16"),
    "integers": (lambda losses: losses.long(), r"it returned torch\.int64"),
    "detached": (lambda losses: losses.detach(), r"with a gradient; it returned one without"),
}


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize(("of", "said"), WRONG.values(), ids=WRONG)
def test_anything_but_a_loss_per_sample_is_refused(mode, of, said):
    made = parts(lambda: Returning(of))
    before = [parameter.detach().clone() for parameter in made[0].parameters()]
    errors = (TypeError, ValueError, RuntimeError)
    with pytest.raises(errors, match=rf"must return one loss per sample.*{said}"):
        trained(made, mode, "batch", batches(2))
    assert same(list(made[0].parameters()), before) and not made[2].state


@pytest.mark.parametrize(("of", "said"), WRONG.values(), ids=WRONG)
def test_verify_reports_anything_but_a_loss_per_sample(of, said):
    report = verify(lambda: Returning(of), batches(2), FEATURES, modes=("nestpipe",), micro_batches=(2,))
    assert not report.passed
    assert [case.mode for case, _ in report.cases] == ["reference"]
    assert re.match(rf"the model must return one loss per sample.*{said}", report.cases[0][1])


class Switching(Ranker):
    """Switches a module in its forward, and maybe back."""

    def __init__(self, back=False):
        super().__init__()
        self.back = back

    def forward(self, batch, rows, seed):
        self.norm.train(False)
        losses = super().forward(batch, rows, seed)
        self.norm.train(self.back)
        return losses


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_a_module_that_a_call_switches_is_switched_back_by_it(mode, consistency):
    made = parts(lambda: Switching(back=True))
    assert len(trained(made, mode, consistency, batches(2))[1]) == 2 and made[0].norm.training
    with pytest.raises(RuntimeError, match=r"module norm was switched by eval\(\) during a call"):
        trained(parts(Switching), mode, consistency, batches(2))


class Freezing(Ranker):
    """Freezes or thaws a parameter in its forward, and maybe puts it back."""

    def __init__(self, frozen=False, back=False):
        super().__init__()
        self.mix.bias.requires_grad_(not frozen)
        self.back = back

    def forward(self, batch, rows, seed):
        trained = self.mix.bias.requires_grad
        self.mix.bias.requires_grad_(not trained)
        losses = super().forward(batch, rows, seed)
        self.mix.bias.requires_grad_(trained == self.back)
        return losses


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_a_parameter_that_a_call_freezes_is_thawed_by_it(mode, consistency, frozen):
    made = parts(lambda: Freezing(frozen, back=True))
    bias = made[0].mix.bias
    assert len(trained(made, mode, consistency, batches(2))[1]) == 2 and bias.requires_grad != frozen
    words = rf"parameter mix.bias was switched by requires_grad_\({frozen}\) during a call"
    with pytest.raises(RuntimeError, match=words):
        trained(parts(lambda: Freezing(frozen)), mode, consistency, batches(2))


class NeedsSamples(Ranker):
    """As torch's MultiheadAttention: cannot take a batch without samples."""

    def forward(self, batch, rows, seed):
        return super().forward(batch, rows, seed).view(-1, batch.num_samples).view(batch.num_samples)

    def hidden(self, batch, rows):
        if not batch.num_samples:
            raise RuntimeError("cannot reshape tensor of 0 elements")
        return super().hidden(batch, rows)


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_micro_batches_without_samples_never_reach_the_model(mode, consistency):
    many = {} if mode == "reference" else {"micro_batches": 16}
    made = parts(NeedsSamples)
    got, results = trained(made, mode, consistency, batches(3), accumulate=2, **many)
    assert all(samples for _step, samples in made[0].seen)
    assert [len(result.losses) for result in results] == [7, 7, 7]
    few = {} if mode == "reference" else {"micro_batches": 7}
    assert same(got, trained(parts(), mode, consistency, batches(3), accumulate=2, **few)[0])
    if consistency == "batch":
        assert same(got, trained(parts(), "reference", consistency, batches(3), accumulate=2)[0])


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_a_batch_without_samples_trains_nothing_and_stops_nothing(mode, consistency):
    first, second, third = batches(3)
    empty = second.select(torch.arange(0))
    made = parts(NeedsSamples, "sgd")
    got, results = trained(made, mode, consistency, [first, empty, third])
    assert [result.loss for result in results][1] == 0 and len(results[1].losses) == 0
    assert same(got, trained(parts(optimizer="sgd"), mode, consistency, [first, third])[0])


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_a_model_without_dense_parameters_trains_its_rows(mode, consistency):
    got, results = trained(parts(NoParameters), mode, consistency, batches(4))
    assert same(got, trained(parts(NoParameters), REFERENCE[consistency], consistency, batches(4))[0])
    assert len(got[1]) and results[0].loss > results[-1].loss - 1
    weights = trained(parts(NoParameters), mode, consistency, [])[0]
    assert not same(got, weights)


class Cast(Ranker):
    """A matrix product of torch, which autocast computes in another dtype."""

    def __init__(self):
        super().__init__()
        self.products = []

    def forward(self, batch, rows, seed):
        losses = super().forward(batch, rows, seed)
        item = rows["item"][: batch.num_tokens]
        product = item[:, None, :] @ item[:, :, None]
        made = torch.ones(1)
        self.products.append((product.dtype, made.dtype, made.device.type))
        return losses + nn.sum_by_sample(product.float().view(-1), batch.offsets)


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_autocast_of_the_caller_holds_in_every_mode(mode, consistency):
    def run(kind, on):
        made = parts(Cast)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            got, _ = trained(made, kind, consistency, batches(3))
        assert {each[0] for each in made[0].products} == {torch.bfloat16 if on else torch.float32}
        return got

    got = run(mode, True)
    assert same(got, run(REFERENCE[consistency], True)) and not same(got, run(REFERENCE[consistency], False))


class Mixed(Ranker):
    """One layer of torch, whose float32 gradient only the consistency "window" takes."""

    def __init__(self):
        super().__init__()
        self.plain = torch.nn.Linear(DIM, DIM)

    def hidden(self, batch, rows):
        return self.plain(super().hidden(batch, rows)).float()


@pytest.mark.parametrize("mode", STAGED_MODES)
def test_autocast_casts_the_weights_of_every_step(mode):
    """autocast keeps cast weights until its context ends, and here it spans the steps."""

    def steps(spans):
        made = parts(Mixed)
        with trainer(made, mode, "window") as training:
            if spans:
                with torch.autocast("cpu", torch.bfloat16):
                    list(training.run(batches(3)))
            else:
                for batch in batches(3):
                    with torch.autocast("cpu", torch.bfloat16):
                        training.step(batch)
        return state(made)

    assert same(steps(True), steps(False))


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused_by_name(mode, context):
    with trainer(parts(), mode) as training:
        with context(), pytest.raises(RuntimeError, match=rf"training under torch\.{context.__name__}\(\)"):
            training.step(batches(1)[0])
        assert training.step(batches(1)[0]).step == 0
        source = training.run(batches(4)[1:])
        next(source)
        with context():
            assert [result.step for result in training.run([])] == training_left(mode)


def training_left(mode):
    return [2, 3] if mode in ("dbp", "nestpipe") else []


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_the_default_device_is_for_the_model_alone(mode, consistency):
    expected, _ = trained(parts(Cast), mode, consistency, batches(3))
    made, read = parts(Cast), batches(3)
    with torch.device("meta"), trainer(made, mode, consistency) as training:
        list(training.run(read))
    assert {each[2] for each in made[0].products} == {"meta"}
    assert same(state(made), expected)


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_deterministic_algorithms_change_no_bit(mode, consistency):
    expected, _ = trained(parts(), mode, consistency, batches(3))
    made = parts()
    torch.use_deterministic_algorithms(True)
    try:
        got, _ = trained(made, mode, consistency, batches(3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(got, expected)


def test_a_model_that_returns_a_scalar_has_no_rows_to_compare():
    assert diagnose(Returning(torch.sum), batches(1)[0], FEATURES).module is None


def test_a_model_without_dense_parameters_is_saved_and_restored(tmp_path):
    made, again = parts(NoParameters), parts(NoParameters)
    with trainer(made) as training:
        list(training.run(batches(2)))
        training.save(tmp_path)
    with trainer(again) as training:
        assert training.load(tmp_path) == 2
    assert same(
        trained(again, "dbp", "batch", batches(3)[2:])[0], trained(made, "fwp", "batch", batches(3)[2:])[0]
    )


def test_the_caller_s_default_device_is_the_model_s():
    cpu = torch.device("cpu")
    assert CallerSettings.of_this_thread(cpu) == CallerSettings() and CallerSettings().plain
    with torch.device("meta"):
        settings = CallerSettings.of_this_thread(cpu)
    assert settings == CallerSettings(device=torch.device("meta")) and not settings.plain


def test_what_is_recorded_is_alike_within_a_batch_and_may_differ_in_the_next():
    outputs, rows = {}, torch.ones(2, 3)
    note_outputs(outputs, 0, {"score": rows}, 2)
    note_outputs(outputs, 3, {"other": rows}, 2)
    for micro_batch, recorded in ((1, {"score": rows[0]}), (2, {"score": rows})):
        with pytest.raises(ValueError, match=r"the model records (score|other) of some micro-batches with"):
            note_outputs(outputs, micro_batch, recorded, 2)
