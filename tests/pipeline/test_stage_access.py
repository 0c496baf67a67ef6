"""Promise: a stage accesses what its signature declares, all of it and nothing else, in every mode."""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import replace
from typing import NewType

import pytest
import test_window_loss as in_batch
import torch
from stage_recorder import Recorder
from test_early_dense import Deep
from trainer_parts import Ranker, batches, parts, same, state, trained

from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, PrecisionTiers, TablePolicy
from tritonrec.pipeline import NESTPIPE, StageFailedError, Trainer, WindowConfig, schedule_of, stages
from tritonrec.pipeline.places import Routes
from tritonrec.pipeline.stage import Edge, Stage, stage
from tritonrec.settings import with_values

POLICY = TablePolicy(Eviction("lru", capacity=40, every=2), admission=2, precision=PrecisionTiers(3, every=3))
CLIPPED = {"max_grad_norm": 0.02}
WINDOWS = {
    "sequential": [{}, {"accumulate": 2, "consistency": "window"}],
    "dbp": [{}, {"skip_fetch": True}],
    "fwp": [{}, {"first_use": True, "clustering": True}, CLIPPED],
    "nestpipe": [
        {}, {"first_use": True, "clustering": True}, {"dedup": "none"}, {"skip_fetch": True}, CLIPPED,
        {"accumulate": 2, "consistency": "window"}, {"skip_fetch": True, "first_use": True},
    ],
}  # fmt: skip
CASES = [(mode, window) for mode, windows in WINDOWS.items() for window in windows]
FORMS = [each for each in vars(stages).values() if isinstance(each, Stage)]


def recorded(mode, window, communicators=None, schedule=None, policy=POLICY, model=Ranker):
    """State after a run whose places are recorded, what was touched, and the schedule."""
    communicators = communicators or Communicators.local()
    made, config = parts(model, policy=policy), with_values(WindowConfig(3, seed=4), window)
    rank, world = communicators.rank, communicators.world_size
    with Trainer(*made, communicators, mode, config, schedule=schedule) as training:
        recorder = Recorder(training.program)
        list(training.run(batches(6, rank=rank, world_size=world)))
        return state(made), recorder.touched, training.program.schedule


@pytest.fixture(scope="module")
def local():
    """By case: state, touched, schedule."""
    return {f"{mode} {window}": recorded(mode, window) for mode, window in CASES}


@pytest.mark.if_changed
@pytest.mark.parametrize(("mode", "window"), CASES)
def test_a_run_with_recorders_has_the_same_bits(local, mode, window):
    consistency = window.get("consistency", "batch")
    other = "sequential" if consistency == "window" else "reference"
    one = {} if consistency == "window" else {"micro_batches": 1}
    kept = {name: window[name] for name in ("accumulate", "max_grad_norm") if name in window}
    expected, _ = trained(parts(policy=POLICY), other, consistency, batches(6), **kept, **one)
    assert same(local[f"{mode} {window}"][0], expected)


def test_what_a_schedule_grants_is_accessed_in_it(local):
    """But for process groups, of which one rank needs few."""
    granted, touched = {}, {}
    for _, accesses, schedule in local.values():
        key = schedule.name, schedule.keeps_rows
        granted[key] = {
            (each.function.__name__, access)
            for each in schedule.stages
            for access in each.touches
            if not access.group
        }
        touched.setdefault(key, set()).update(accesses)
    for key, accesses in granted.items():
        never = sorted(f"{name}: {access}" for name, access in accesses - touched[key])
        assert not never, (key, never)


def touched_by_a_loss_of_the_window():
    config = WindowConfig(3, seed=4)
    with Trainer(*in_batch.parts(), Communicators.local(), "nestpipe", config) as training:
        recorder = Recorder(training.program)
        list(training.run(in_batch.batch(step) for step in range(4)))
        return recorder.touched


def on_ranks(communicators, window, policy=None, model=Ranker):
    return recorded("nestpipe", window, communicators, policy=policy, model=model)[:2]


@pytest.mark.slow
@pytest.mark.multi_rank
def test_every_declared_access_happens_and_replicas_keep_to_theirs(local, pool):
    touched = set().union(*(accesses for _, accesses, _ in local.values()), touched_by_a_loss_of_the_window())
    for window in ({}, {"first_use": True, "skip_fetch": True}, {"average_every": 2}, CLIPPED):
        ranks = pool.run(on_ranks, 2, window, replicas=2)
        touched |= set().union(*(accesses for _, accesses in ranks))
        assert same(ranks[0][0], ranks[1][0])
    for window in ({}, {"skip_fetch": True}):  # a replica of one rank asks nobody for rows or sizes
        touched |= set().union(*(accesses for _, accesses in pool.run(on_ranks, 2, window, POLICY)))
    for window in ({}, {"first_use": True}):
        touched |= set().union(*(accesses for _, accesses in pool.run(on_ranks, 4, window, POLICY, nodes=2)))
    touched |= set().union(*(each[1] for each in pool.run(on_ranks, 2, {"exchanges": "each"}, POLICY, Deep)))
    called = [each for each in FORMS if not each.within]
    declared = {(each.function.__name__, access) for each in called for access in each.touches}
    never = sorted(f"{name}: {access}" for name, access in declared - touched)
    assert not never, never


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.function.__name__)
def test_a_stage_reaches_nothing_but_its_parameters(form):
    found = inspect.getclosurevars(form.function)
    assert not found.nonlocals
    allowed = types.ModuleType | NewType | int | str | Stage  # `exchange` names a stage and a setting
    state = [
        name for name, value in found.globals.items() if not (callable(value) or isinstance(value, allowed))
    ]
    assert not state


# The recorders see a wrong declaration.


def refused(of: Stage, spoil, **window):
    """The error of a run in which a stage calls `spoil` with what it was passed.

    Each micro-batch has rows of its own, as one rank alone has them only without its second dedup.
    """
    window = {"dedup": "exchange", **window}

    @functools.wraps(of.function)
    def function(**given):
        result = of.function(**given)
        spoil(**given)
        return result

    with pytest.raises(StageFailedError) as caught:
        recorded("nestpipe", window, schedule=NESTPIPE.with_stages(replace(of, function=function)))
    return str(caught.value)


def test_a_stage_that_writes_what_it_reads_is_found():
    said = refused(stages.h2d, lambda samples, **_: samples[0].sample_ids.add_(1))
    assert "h2d, which declares samples as read, has changed it" in said
    said = refused(stages.exchange, lambda buffer, **_: buffer[0].add_(1))
    assert "exchange, which declares buffer as read, has changed it" in said
    said = refused(NESTPIPE["compute"], lambda dense, **_: dense.model.parameters["mix.weight"].data.add_(1))
    assert "compute, which declares dense as read, has changed it" in said


def test_a_row_or_micro_batch_beyond_the_declared_ones_is_found():
    said = refused(stages.copy_kept_rows, lambda buffer, **_: buffer[0].add_(1))
    assert "declares buffer as write, has changed row" in said
    said = refused(stages.exchange, lambda embeddings, **_: embeddings[0].add_(1))
    assert "declares embeddings as write, has changed row" in said
    said = refused(NESTPIPE["compute"], lambda gradients, **_: gradients[0].add_(1))
    assert "declares gradients as update, has changed row" in said
    said = refused(NESTPIPE["compute"], lambda losses, **_: losses.update({2: losses[0]}))
    assert "declares losses as write, has changed" in said


def test_tables_are_reached_by_the_declared_access_alone():
    rows = torch.arange(2)
    said = refused(stages.retrieve, lambda storage, **_: storage[0].update(rows, torch.zeros(2, 18)))
    assert "update of the tables is no read" in said
    said = refused(stages.h2d, lambda context, **_: context.tables.groups[0].table.gather(rows, rows))
    assert "has no attribute 'gather'" in said


def test_an_access_that_the_table_does_not_grant_is_refused_when_the_program_is_made():
    touches = tuple(access for access in NESTPIPE["exchange"].touches if access.place != "buffer")
    with pytest.raises(TypeError, match=r"exchange needs .*buffer.* does not grant"):
        recorded("nestpipe", {}, schedule=NESTPIPE._with("exchange", touches=touches))


def test_an_access_that_never_happens_is_found():
    idle = stages.write_back
    more = replace(idle, touches=(*idle.touches, *stages.h2d.touches[:1]))
    declared = {(more.function.__name__, access) for access in more.touches}
    touched = recorded("nestpipe", {}, schedule=NESTPIPE.with_stages(more))[1]
    assert declared - touched == {("write_back", stages.h2d.touches[0])}


def test_a_place_without_an_access_is_no_declaration():
    def prefetch(routes: Routes) -> None: ...

    with pytest.raises(TypeError, match="declare routes as Read, Write or Update"):
        stage("prefetch", (Edge("h2d"),))(prefetch)


def test_a_mode_grants_replicas_only_with_replicas():
    assert not schedule_of("nestpipe", WindowConfig()).replicated
    assert schedule_of("nestpipe", WindowConfig(), 2).replicated
