"""Promise: legal odd batches train, bad input is one clear error, and every door leads to the same bits."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from speeds import slow_except
from trainer_parts import DIM, JOB, batches, optimizer_of, parts, same, state, trainer

from tritonrec.data import JaggedBatch
from tritonrec.distributed import Communicators
from tritonrec.pipeline import (
    MODES,
    PIPELINED,
    ExchangeConfig,
    NotBatchInvariantError,
    StageFailedError,
    Trainer,
    WindowConfig,
)  # fmt: skip
from tritonrec.settings import with_values
from tritonrec.trace import Recorder


def batch_of(step, *lengths):
    tokens = sum(lengths)
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    ids = torch.arange(tokens) * 7 - 20
    return JaggedBatch.from_sequences(
        step, torch.arange(len(lengths)), offsets, ids, ids, ids + 1, torch.stack([ids + 3, -ids], 1)
    )


@pytest.mark.parametrize("mode", slow_except(["reference", "nestpipe"], MODES))
def test_step_run_and_progress_are_one_thing(mode):
    ended = []
    for door in ("step", "run", "progress"):
        made = parts()
        with trainer(made, mode) as training:
            if door == "step":
                results = [training.step(batch) for batch in batches()]
            elif door == "run":
                results = list(training.run(batches()))
            else:
                source, results = iter(batches()), []
                with pytest.raises(StopIteration):
                    while True:
                        results.append(training.progress(source))
        assert [result.step for result in results] == [*range(6)]
        ended.append(state(made))
    assert same(ended[0], ended[1]) and same(ended[1], ended[2])


@pytest.mark.parametrize("mode", PIPELINED)
def test_leaving_a_run_early_finishes_what_was_read(mode):
    whole, left = parts(), parts()
    read = []
    with trainer(left, mode) as training:
        for result in training.run(read.append(batch) or batch for batch in batches()):
            if result.step == 0:
                break
    with trainer(whole, mode) as training:
        for batch in read:
            training.step(batch)
    assert same(state(left), state(whole))


def test_a_step_does_not_answer_for_an_earlier_batch():
    with trainer(parts()) as training:
        source = iter(batches())
        training.progress(source)
        with pytest.raises(RuntimeError, match=r"3 windows are under way.* list\(trainer.run"):
            training.step(batches()[0])
        assert [result.step for result in training.run([])] == [1, 2, 3]
        assert training.step(batches(5)[4]).step == 4


def test_a_closed_trainer_says_so():
    training = trainer(parts())
    results = training.run(batches())
    next(results)
    training.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(results)
    with pytest.raises(RuntimeError, match="was closed"):
        training.step(batches()[0])


@pytest.mark.parametrize("mode", PIPELINED)
@pytest.mark.parametrize(
    "lengths",
    [(), (0,), (0, 0, 0), (1,), (1, 0, 1), (9, 0, 1, 4)],
    ids=["empty_batch", "empty_sequence", "all_empty", "one_item", "with_gap", "mixed"],
)
def test_odd_batches_are_legal_and_exact(mode, lengths):
    # The odd batch comes second, so that it also meets buffers in use.
    run = [batch_of(0, 3, 5), batch_of(1, *lengths), batch_of(2, 2, 2, 1)]
    expected, got = parts(), parts()
    with trainer(expected, "reference") as training:
        reference = [training.step(batch) for batch in run]
    with trainer(got, mode, micro_batches=2) as training:
        results = list(training.run(run))
    assert same(state(expected), state(got))
    for a, b in zip(reference, results, strict=True):
        assert torch.equal(a.losses[a.sample_ids.argsort()], b.losses[b.sample_ids.argsort()])


def test_wrong_offsets_name_the_field():
    batch = batch_of(0, 2, 2)
    wrong = replace(batch, features=replace(batch.features, offsets=torch.tensor([0, 3, 2])))
    for mode, error in (("reference", ValueError), ("nestpipe", StageFailedError)):
        with trainer(parts(), mode) as training, pytest.raises(error, match="offsets must not decrease"):
            training.step(wrong)


@pytest.mark.parametrize("consistency", ["window", "batch"])
def test_a_nan_in_a_gradient_names_the_tensor(consistency):
    made = parts()
    ids = batch_of(0, 3).lookups()["item"].ids.unique()
    values = made[1].initial_rows("item", ids)
    values[1, 2] = float("nan")
    made[1].load("item", ids, values)
    named = r"(gradient|weight|bias|position).* nan"
    with trainer(made, consistency=consistency) as training, pytest.raises(StageFailedError, match=named):
        training.step(batch_of(0, 3))


def test_fixed_point_overflow_names_the_tensor():
    made = JOB.build("sgd")
    ids = batch_of(0, 3).lookups()["item"].ids.unique()
    made[1].load("item", ids, made[1].initial_rows("item", ids) * 1e12)
    with (
        trainer(made) as training,
        pytest.raises(StageFailedError, match=r"ExactSumError: .*use fewer fraction bits"),
    ):
        training.step(batch_of(0, 3))


def test_an_ordinary_gradient_is_refused_at_batch_consistency():
    made = parts()
    plain = torch.nn.Linear(DIM, DIM)
    model = made[0]

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.plain = model, plain

        def forward(self, batch, rows, seed):
            return self.inner(batch, {"item": self.plain(rows["item"])}, seed)

    mixed = Mixed()
    together = (mixed, made[1], optimizer_of(mixed))
    named = r"parameter plain\.weight (got )?an ordinary float32 gradient"
    for mode, error in (("reference", TypeError), ("nestpipe", StageFailedError)):
        for options, kind in (({}, NotBatchInvariantError), ({"trust_model": True}, error)):
            with trainer(together, mode, **options) as training, pytest.raises(kind, match=named):
                training.step(batch_of(0, 3))
    with trainer(together, "nestpipe", consistency="window") as training:
        plain.zero_grad()
        assert training.step(batch_of(0, 3)).losses.isfinite().all()


def test_sync_is_one_rank_one_micro_batch_batch_level():
    with pytest.raises(ValueError, match="one process with the whole batch"):
        Trainer(*parts(), Communicators.local(), "reference", WindowConfig(2))
    with pytest.raises(ValueError, match="reference of 'batch'"):
        Trainer(*parts(), Communicators.local(), "reference", WindowConfig(1, "window"))
    for options in ({"depth": 2}, {"average_every": 2}):
        with pytest.raises(ValueError, match="no depth, no average_every"):
            Trainer(*parts(), Communicators.local(), "reference", with_values(WindowConfig(1), options))
    with pytest.raises(ValueError, match="mode must be one of"):
        trainer(parts(), "fast")


@pytest.mark.parametrize(("mode", "said"), [*product(PIPELINED, (0, 2)), ("sequential", 0), ("reference", 0)])
def test_a_window_is_frozen_for_four_micro_batches_where_they_overlap_unless_said_otherwise(mode, said):
    model, tables, optimizer = parts()
    recorder = Recorder(0, 1)
    config, calls = WindowConfig(said) if said else None, []
    model.register_forward_hook(lambda *given: calls.append(given))
    with Trainer(
        model, tables, optimizer, Communicators.local(), mode, config, recorder, trust_model=True
    ) as training:
        result = training.step(batch_of(0, 3, 2, 1, 4, 2))
    expected = said or (4 if mode in ("fwp", "nestpipe") else 1)
    assert len(calls) == expected
    assert training.config.micro_batches == recorder.metadata["micro_batches"] == expected
    assert result.exchanges == recorder.metadata.get("exchanges", "")
    if mode != "reference":
        assert f"a window of {expected} micro-batches: no table has its rows on several" in result.exchanges


WRONG = [
    ({"micro_batches": -1}, "micro_batches .* got -1"), ({"accumulate": 0}, "accumulate .* got 0"),
    ({"depth": -1}, "depth .* got -1"), ({"consistency": "exact"}, "got 'exact'"),
    ({"dedup": "twice"}, "got 'twice'"), ({"exchanges": "one"}, "of auto, once, joined, each, got 'one'"),
    ({"exchange_sums": "some"}, "sums must be one of auto, packed, whole, got 'some'"),
    ({"precision": "fp8"}, "WindowConfig: precision must be one of float32, bf16, fp16, got 'fp8'"),
    ({"exchange_precision": "int8"}, "ExchangeConfig: precision must be one of float32, bf16, fp16"),
    ({"precision": "fp16", "average_every": 2}, "use 'bf16', or exact replicas"),
    ({"taper": -0.1}, "got -0.1"), ({"taper": 1.5}, "got 1.5"),
    ({"first_use": True, "dedup": "lookup"}, "got 'lookup'"),
    ({"skip_fetch": True, "dedup": "exchange"}, "got 'exchange'"),
    ({"first_use": True, "micro_batches": 257}, "takes at most 256 micro-batches in a window, got 257"),
    ({"max_grad_norm": -1.0}, r"max_grad_norm must be in \[0, inf\], got -1"),
    ({"max_grad_value": math.nan}, "max_grad_value must be in .*, got nan"),
    ({"max_grad_norm": 1.0, "average_every": 2}, "clip none of them"),
    ({"clustering_swaps": True}, "clustering_swaps is of clustered samples: set clustering"),
    ({"moment_scaling": True}, "moment_scaling is of replicas that are averaged: set average_every"),
    ({"late_states": True}, "late_states is of replicas that are averaged: set average_every"),
    ({"average_holders": True}, "average_holders is of replicas that are averaged: set average_every"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), WRONG, ids=str)
def test_settings_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        with_values(WindowConfig(), options)


@pytest.mark.parametrize(
    ("options", "around", "cut"),
    [
        ({}, (True, 2, False), (4, 0.9)), ({"exchanges": "joined"}, (True, 2, True), (4, 0.9)),
        ({"taper": 0.3, "micro_batches": 8}, (True, 2, False), (8, 0.3)),
        ({"taper": 1.0}, (True, 2, False), (4, 1.0)),
        ({}, (True, 2, True), (4, 1.0)),  # messages that processors copy travel beside nothing
        ({"exchanges": "once"}, (True, 2, False), (4, 1.0)), ({}, (True, 1, False), (4, 1.0)),
        ({"consistency": "window"}, (True, 2, False), (4, 1.0)), ({}, (False, 2, False), (1, 1.0)),
    ],
)  # fmt: skip
def test_the_ends_of_a_window_are_smaller_where_exchanges_travel_beside_its_computation(options, around, cut):
    found = with_values(WindowConfig(), options).cut(*around)
    assert (found.micro_batches, found.exchange.taper) == cut


def test_a_window_with_first_use_has_as_many_micro_batches_as_a_byte_has_numbers():
    assert WindowConfig(256, exchange=ExchangeConfig(first_use=True)).window_micro_batches == 256


@pytest.mark.parametrize("mode", ["reference", "nestpipe"])
def test_a_model_loaded_after_its_optimizer_was_made_is_trained_from_what_was_loaded(mode):
    def trained(load_first):
        model, tables, optimizer = parts()
        other = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
        model.load_state_dict(other)
        if load_first:
            optimizer = optimizer_of(model)
        with trainer((model, tables, optimizer), mode) as training:
            list(training.run(batches()))
        return state((model, tables, optimizer)), list(model.parameters())

    expected, parameters = trained(load_first=True)
    got, same_parameters = trained(load_first=False)
    assert same(got, expected) and same(same_parameters, parameters)
