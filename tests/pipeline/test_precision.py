"""Promise: in 16 bits, too, every mode ends at the bits of its reference, and the loss scale changes none."""

import math
from dataclasses import fields, replace
from itertools import product
from random import Random

import pytest
import torch
from speeds import slow_except
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from trainer_parts import JOB, Ranker, assert_part_of, batches, of_rank, parts, same, trained, trainer

from tritonrec.distributed import Communicators
from tritonrec.embedding import Placement
from tritonrec.pipeline import STAGED, ExchangeConfig, LossScaling, Trainer, WindowConfig
from tritonrec.pipeline.precision import LossScaler, rounded_rows
from tritonrec.settings import KEY, with_values

MOVING = LossScaling(2.0**24, growth_interval=2)
"""Too large at the start, so that it falls, and then rises again."""
FALLING = LossScaling(2.0**18, 4.0, 0.25, 2)
PRECISIONS = {"bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16", "loss_scaling": MOVING}}


class Cast(Ranker):
    """Gradients pass the dtype of autocast; `seen` has that dtype, and whether it is on in backward."""

    def hidden(self, batch, rows):
        hidden = super().hidden(batch, rows)
        if torch.is_autocast_enabled("cpu"):
            low = hidden.to(torch.get_autocast_dtype("cpu"))
            self.seen.append(low.dtype)
            low.register_hook(lambda _: self.seen.append(torch.is_autocast_enabled("cpu")))
            hidden = low.float()
        return hidden


def run(mode, consistency="batch", model=Cast, count=6, **window):
    made = parts(model)
    got, results = trained(made, mode, consistency, batches(count), **window)
    return got, [(result.loss_scale, result.skipped, result.grad_norm) for result in results], made[0].seen


MODES_AND_LEVELS = list(product(STAGED, ("batch", "window")))


@pytest.mark.parametrize(
    ("mode", "consistency", "precision"),
    slow_except(
        [("nestpipe", "batch", "fp16"), ("fwp", "window", "bf16")],
        [(*each, precision) for each, precision in product(MODES_AND_LEVELS, PRECISIONS)],
    ),
)
def test_every_mode_is_its_reference(mode, consistency, precision):
    options = PRECISIONS[precision]
    expected, ends, _ = run("reference" if consistency == "batch" else "sequential", consistency, **options)
    got, found, seen = run(mode, consistency, **options)
    assert same(got, expected) and found == ends
    assert not same(got, run(mode, consistency)[0])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {each for each in seen if isinstance(each, (torch.dtype, bool))} == {dtype, False}


class Checkpointed(Cast):
    """Computes its forward again in backward, where autocast is off."""

    def hidden(self, batch, rows):
        return checkpoint(super().hidden, batch, rows, use_reentrant=False)


@pytest.mark.parametrize("precision", slow_except(["fp16"], PRECISIONS))
def test_what_backward_computes_again_is_in_the_precision_of_forward(precision):
    plain, ends, _ = run("nestpipe", **PRECISIONS[precision])
    got, found, _ = run("nestpipe", model=Checkpointed, **PRECISIONS[precision])
    assert same(got, plain) and found == ends


def test_the_scale_falls_after_an_overflow_and_rises_after_a_while():
    _, ends, _ = run("nestpipe", **PRECISIONS["fp16"], count=8)
    scales, skipped = [end[0] for end in ends], [end[1] for end in ends]
    assert scales[0] == 2.0**24 and skipped[0] and not all(skipped)
    first = skipped.index(False)
    assert scales[: first + 1] == [2.0 ** (24 - step) for step in range(first + 1)]
    assert scales[first + 2] == 2 * scales[first]
    assert all(math.isinf(norm) == left for _, left, norm in ends)


def test_the_scale_moves_as_that_of_torch():
    random = Random(3)
    scaler = LossScaler(LossScaling(2.0**5, 4.0, 0.25, 3))
    scale, tracker = torch.tensor(2.0**5), torch.zeros((), dtype=torch.int32)
    for _ in range(60):
        found_inf = random.random() < 0.2
        scaler.update(found_inf)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(found_inf)), 4.0, 0.25, 3)
        assert (scaler.scale, scaler.growth_tracker) == (float(scale), int(tracker))
    for grown in (False, True):
        for _ in range(400):
            scaler.update(not grown)
        assert scaler.scale == (2.0**60 if grown else 2.0**-60)


def test_the_defaults_are_those_of_torch():
    ours, torchs = LossScaling(), torch.amp.GradScaler("cpu")
    state = torchs.state_dict()
    assert vars(ours) == {name: state.get(name, torchs.get_scale()) for name in vars(ours)}


@pytest.mark.parametrize(
    ("mode", "consistency", "scale"),
    slow_except(
        [("nestpipe", "batch", 2.0**20), ("fwp", "window", 2.0**20)],
        [
            (*each, scale)
            for each, scale in product([("reference", "batch"), *MODES_AND_LEVELS], (1.0, 2.0**20, 2.0**32))
        ],
    ),
)
def test_scaling_rounds_nothing(mode, consistency, scale):
    """A model that computes in float32 has the same bits with any scale, and the same norm."""
    fp16 = {"precision": "fp16", "loss_scaling": LossScaling(scale)}
    plain, ends, _ = run(mode, consistency, Ranker, 3, max_grad_norm=0.3)
    got, found, _ = run(mode, consistency, Float32, 3, max_grad_norm=0.3, **fp16)
    assert same(got[: len(plain)], plain) and [end[1:] for end in found] == [end[1:] for end in ends]


class Float32(Ranker):
    def forward(self, batch, rows, seed):
        with torch.autocast("cpu", enabled=False):
            return super().forward(batch, rows, seed)


@pytest.mark.parametrize("terms", [0, 1, 2, 3, 4, 5, 1023, 1024, 1025])
def test_the_mean_loss_is_scaled(terms):
    """By a power of two that is at most its scale, and more than half of it."""
    scaler = LossScaler(LossScaling(2.0**16))
    assert 2.0**15 < 2.0 ** scaler.exponent(terms, 36) * max(terms, 1) <= 2.0**16
    scaler.scale = 2.0**60
    assert scaler.exponent(terms, 36) == 36
    scaler.scale = 2.0**-60
    assert scaler.exponent(terms, 36) == -26


def test_a_restart_keeps_the_scale(tmp_path):
    fp16 = PRECISIONS["fp16"]
    made, again = parts(Cast), parts(Cast)
    with trainer(made, **fp16) as training:
        before = list(training.run(batches(5)))
        training.save(tmp_path)
        after = list(training.run(batches(8)[5:]))
        expected = [each.clone() for each in training.dense.tensors().values()]
    scales = [end[0] for end in run("dbp", count=8, **fp16)[1]]
    assert [result.loss_scale for result in before + after] == scales
    with trainer(again, **fp16) as training:
        training.load(tmp_path)
        resumed = list(training.run(batches(8)[5:]))
        assert same(list(training.dense.tensors().values()), expected)
    assert [result.loss_scale for result in resumed] == scales[5:]
    with (
        trainer(parts(Cast), precision="bf16") as training,
        pytest.raises(ValueError, match=r"got .* scaler"),
    ):
        training.load(tmp_path)


def test_ranks_agree_on_the_state_of_the_scaler():
    made = parts(Cast)
    with trainer(made, precision="fp16") as training:
        state = training.dense.tensors()
    assert float(state["scaler/scale"]) == 2.0**16 and float(state["scaler/growth_tracker"]) == 0


SHARED = {
    "bf16": {"precision": "bf16", "exchange_precision": "bf16"},
    "fp16": {"precision": "fp16", "exchange_precision": "fp16", "loss_scaling": FALLING},
    "first use": {"exchange_precision": "bf16", "first_use": True, "skip_fetch": True},
}


@pytest.mark.multi_rank
@pytest.mark.parametrize(
    ("world_size", "replicas", "options"),
    slow_except(
        [(2, 1, "fp16")],
        [(*each, options) for each, options in product([(1, 1), (2, 1), (2, 2), (4, 2)], SHARED)],
    ),
)
def test_any_number_of_ranks_is_the_reference(pool, world_size, replicas, options):
    window = with_values(WindowConfig(3, seed=4), SHARED[options])
    alone = with_values(window, {"micro_batches": 1, "first_use": False, "skip_fetch": False})
    whole = of_rank(Communicators.local(), alone, "reference", 4)
    assert len({end[2] for end in whole[0]}) == (2 if options == "fp16" else 1)
    for found in pool.run(of_rank, world_size, window, "nestpipe", 4, replicas=replicas):
        assert_part_of(found, whole)


@pytest.mark.multi_rank
@pytest.mark.parametrize("replicas", slow_except([1], [1, 2]))
def test_rows_in_16_bits_take_half_the_bytes(pool, replicas):
    """And gradients those that they take without."""
    found = {}
    for precision in ("float32", "bf16"):
        window = WindowConfig(3, seed=4, exchange=ExchangeConfig(precision=precision))
        ranks = pool.run(of_rank, 2 * replicas, window, "fwp", 1, replicas=replicas)
        found[precision] = [rank[3] for rank in ranks]
    for float32, bf16 in zip(found["float32"], found["bf16"], strict=True):
        assert float32.embedding_bytes == 2 * bf16.embedding_bytes > 0
        assert bf16.rows == float32.rows and bf16.key_bytes == float32.key_bytes


@pytest.mark.parametrize("storage", slow_except(["cached"], ["device", "cached"]))
def test_rows_are_rounded_wherever_they_are_stored(storage):
    window = WindowConfig(3, seed=4, exchange=ExchangeConfig(precision="fp16", skip_fetch=True))
    job = replace(JOB, placement=Placement(storage, cache_rows=20))
    alone = WindowConfig(seed=4, exchange=ExchangeConfig(precision="fp16"))
    expected = of_rank(Communicators.local(), alone, "reference", 4)
    got = of_rank(Communicators.local(), window, steps=4, job=job)
    assert got[0] == expected[0] and same(got[1], expected[1]) and same(got[2], expected[2])
    assert not same(got[1], of_rank(Communicators.local(), WindowConfig(3, seed=4), steps=4)[1])


def test_rows_are_rounded_to_even_and_stay_finite():
    rows = torch.tensor([[1 + 2**-11, 1 + 3 * 2**-11, 1e5, -1e38, math.nan, 2.0**-25]])
    fp16 = rounded_rows(rows, "fp16")
    assert fp16.dtype == torch.float16
    assert fp16[0, :4].tolist() == [1, 1 + 2**-9, 65504, -65504] and fp16[0, 4].isnan() and not fp16[0, 5]
    most = torch.tensor([[torch.finfo(torch.float32).max]])
    assert rounded_rows(most, "bf16").isfinite().all()
    assert rounded_rows(rows, "float32") is rows


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 1000.0},
        {"init_scale": math.inf},
        {"init_scale": math.nan},
        {"growth_factor": 1.0},
        {"growth_factor": 3.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
    ],
)
def test_what_is_no_power_of_two_is_refused(options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))} must be (a power of two|in \[)"):
        LossScaling(**options)


def test_a_scale_may_begin_at_one():
    assert LossScaling(init_scale=1.0).init_scale == 1.0
    (field,) = (each for each in fields(LossScaling) if each.name == "init_scale")
    assert field.metadata[KEY].least == 1  # of the command line


@pytest.mark.parametrize("precision", slow_except(["bf16"], ["float32", "bf16"]))
def test_a_trainer_evaluates_as_it_trains(precision):
    made = JOB.build("adam")
    loader = JOB.epochs()
    average = AveragedModel(made[0])
    seen = []
    average.module.layers[0].register_forward_hook(
        lambda module, *_: seen.append((torch.is_autocast_enabled("cpu"), module.training))
    )
    window = WindowConfig(2, precision=precision)
    with Trainer(*made, Communicators.local(), "nestpipe", window, average=average) as training:
        list(training.run([loader.batch(0)]))
        found = training.evaluate(loader, (10, 20))
        assert {*training.evaluate(loader)} == {"HR@10", "NDCG@10"}
        with training.autocast():
            assert torch.is_autocast_enabled("cpu") == (precision == "bf16")
        source = training.run(loader.batch(step) for step in range(1, 6))
        next(source)
        with pytest.raises(RuntimeError, match="in flight"):
            training.evaluate(loader)
        list(source)
    assert {*found} == {"HR@10", "NDCG@10", "HR@20", "NDCG@20"} and found["HR@10"] <= found["HR@20"] <= 1
    assert {*seen} == {(precision == "bf16", False)} and average.module.training


def test_a_result_names_its_values():
    step = trained(parts(Cast), "nestpipe", "batch", batches(1), precision="fp16")[1][0]
    assert step.values() == {
        "loss": step.loss, "grad_norm": step.grad_norm, "loss_scale": 2.0**16, "lr": 0.05
    }  # fmt: skip
    plain = trained(parts(), "nestpipe", "batch", batches(1))[1][0]
    assert plain.values() == {"loss": plain.loss, "lr": 0.05}
    both = replace(plain, learning_rates=(0.1, 0.2))
    assert both.values() == {"loss": plain.loss, "lr/0": 0.1, "lr/1": 0.2}
