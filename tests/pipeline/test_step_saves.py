"""Promise: a run saves a step while later windows are in flight, in every bit of a save between windows."""

import random
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
from speeds import slow_except
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from trainer_parts import Ranker, batches, parts, same, state, trainer

from tritonrec import checkpoint
from tritonrec.checkpoint import CheckpointError, CheckpointStream, writer
from tritonrec.distributed import Communicators
from tritonrec.embedding import (
    Eviction,
    Placement,
    PrecisionTiers,
    TablePolicy,
)
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import SCHEDULES, StageFailedError, Trainer, WindowConfig
from tritonrec.pipeline.stage import signature_of
from tritonrec.pipeline.step_saves import settle, take_dense, take_rows
from tritonrec.settings import with_values

STEPS, EVERY = 11, 3
LRU = TablePolicy(Eviction("lru", capacity=40, every=2), admission=2, precision=PrecisionTiers(3, every=3))
POLICIES = {"plain": TablePolicy(), "lru": LRU, "ttl": TablePolicy(Eviction("ttl", ttl=2))}


class Moving(Ranker):
    """Each of its calls writes a buffer: what a later window's forward leaves in it is of a later state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch, rows, seed):
        self.calls += 1
        return super().forward(batch, rows, seed)


class Source:
    """Batches with a position, read ahead like any."""

    def __init__(self, given):
        self.given, self.step = given, 0

    def __iter__(self):
        while self.step < len(self.given):
            self.step += 1
            yield self.given[self.step - 1]

    def state_dict(self):
        return {"step": self.step, "seen": torch.arange(self.step)}

    def load_state_dict(self, state):
        self.step = state["step"]


@contextmanager
def training(communicators, mode, policy="plain", seed=None, **window):
    """A trainer with rows that grow, and everything around its model that a checkpoint has."""
    made = parts(Moving, policy=POLICIES[policy])
    model, _, optimizer = made
    consistency = window.pop("consistency", "window")  # "batch" counts calls of its guard too
    config = with_values(WindowConfig(1 if mode == "reference" else 3, consistency, seed=4), window)
    draw = random.Random(seed)
    delay = None if seed is None else lambda task: draw.choice((0, 0, 0.002, 0.01))
    with Trainer(
        *made, communicators, mode, config, delay=delay, trust_model=True,
        scheduler=ExponentialLR(optimizer, 0.9), average=AveragedModel(model),
    ) as trained:  # fmt: skip
        yield trained, made


def train(communicators, folder, mode, full_every=1, flown=False, first=0, **made):
    """The state at the end, and by step how many windows were in flight when its result came."""
    source = Source(batches(STEPS, rank=communicators.rank, world_size=communicators.world_size))
    with training(communicators, mode, **made) as (trained, model_and_all):
        meta, seen = {}, {}
        with trained.saver(folder, meta, full_every, source) as saver:
            if first:
                assert trained.load(folder, loader=source) == first
            given = {"saver": saver, "save_every": EVERY} if flown else {"pause_every": EVERY}
            for result in trained.run(source, **given):
                seen[result.step] = len(trained.in_flight())
                meta["loss"] = result.loss  # of the step that is saved
                if not flown and (result.step + 1) % EVERY == 0:
                    saver.save(result.step + 1)
        return state(model_and_all), seen


def wait_for(true):
    """The lanes go on meanwhile."""
    until = time.monotonic() + 60
    while not true() and time.monotonic() < until:
        time.sleep(0.01)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.if_changed
@pytest.mark.multi_rank
@pytest.mark.parametrize(
    "mode, world, policy, full_every",
    slow_except(
        [("nestpipe", 2, "lru", 3), ("dbp", 1, "ttl", 2), ("nestpipe", 1, "lru", 1)],
        [
            (mode, world, policy, full_every)
            for mode in ("reference", "sequential", *SCHEDULES)
            for world in ((1,) if mode == "reference" else (1, 2))
            for policy in POLICIES
            for full_every in (1, 2, 3)
        ],
    ),
)
def test_what_is_saved_in_flight_are_the_files_of_a_drained_save(tmp_path, mode, world, policy, full_every):
    """The bytes of the newest two and of all that these need: rows, states, scores, position and metadata."""
    consistency = "batch" if mode == "reference" else "window"
    found = {}
    for kind in ("drained", "flown"):
        found[kind] = run_ranks(
            world,
            lambda ranks, kind=kind: train(
                ranks, tmp_path / kind, mode, full_every, kind == "flown", policy=policy,
                seed=None if kind == "drained" else ranks.rank + 7, consistency=consistency,
            ),
        )  # fmt: skip
    assert files(tmp_path / "flown") == files(tmp_path / "drained")
    assert checkpoint.steps(tmp_path / "flown")[-2:] == [6, 9]
    for (ended, _), (expected, seen) in zip(found["flown"], found["drained"], strict=True):
        assert same(ended, expected) and seen[2] == seen[5] == 0
    # Nothing is waited for where the mode has windows in flight.
    ahead = mode in ("dbp", "nestpipe")
    assert all((seen[2] > 0, seen[5] > 0) == (ahead, ahead) for _, seen in found["flown"])
    if full_every > 1:
        assert CheckpointStream(tmp_path / "flown").layers == (2 if full_every == 2 else 3) - (
            full_every == 2
        )


@pytest.mark.multi_rank
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_from_it_in_the_same_bits(tmp_path, world):
    made = {"policy": "lru", "consistency": "batch"}

    def whole(ranks):
        return train(ranks, tmp_path / "run", "nestpipe", 3, True, **made)[0]

    ended = run_ranks(world, whole)
    again = run_ranks(
        3 - world, lambda ranks: train(ranks, tmp_path / "run", "nestpipe", flown=True, first=9, **made)[0]
    )
    dense = slice(-len(ended[0]) + 2, None)  # keys and rows are a rank's, the others are all ranks'
    assert same(ended[0][dense], again[0][dense])
    order = [torch.cat([each[0] for each in ranks]).argsort() for ranks in (ended, again)]
    for part in (0, 1):
        rows, others = (torch.cat([each[part] for each in ranks]) for ranks in (ended, again))
        assert torch.equal(rows[order[0]], others[order[1]])


@pytest.mark.parametrize("mode", ["dbp", "nestpipe"])
def test_the_stages_take_what_they_have_anyway(mode):
    """So the proof of the schedule is one of the saves too."""
    for stage, taking in (("retrieve", take_rows), ("dense_update", take_dense), ("write_back", settle)):
        own = {(each.place, each.rows, each.batch) for each in SCHEDULES[mode][stage].touches}
        taken = {(each.place, each.rows, each.batch) for each in signature_of(taking).accesses}
        assert taken - own == {("taken", "none", 0)}
    lookup = SCHEDULES[mode]["retrieve"].after  # `settle` of batch s comes before rows of s can be evicted
    assert any((each.stage, each.batch) == ("write_back", 2) for each in lookup)


def test_a_run_that_cannot_says_so_and_saves_between_windows(tmp_path):
    local = Communicators.local()
    train(local, tmp_path / "drained", "nestpipe", skip_fetch=True)
    with pytest.warns(UserWarning, match="empties the pipeline first: skip_fetch keeps rows in the buffers"):
        _, seen = train(local, tmp_path / "flown", "nestpipe", flown=True, skip_fetch=True)
    assert seen[2] == seen[5] == 0 < seen[3] and files(tmp_path / "flown") == files(tmp_path / "drained")


@pytest.mark.multi_rank
def test_replicas_are_averaged_before_a_save(tmp_path):
    def work(ranks):
        with (
            trainer(parts(), communicators=ranks, average_every=2) as trained,
            trained.saver(tmp_path) as saver,
        ):
            given = batches(6, rank=ranks.rank, world_size=ranks.world_size)
            list(trained.run(given, saver=saver, save_every=3))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run_ranks(2, work, replicas=2)
    assert any("replicas are averaged" in str(each.message) for each in said)
    assert checkpoint.steps(tmp_path) == [3, 6]


def test_rows_on_disk_are_read_after_the_window_is_written(tmp_path):
    found = []
    for kind in ("drained", "flown"):
        (tmp_path / f"rows-{kind}").mkdir()
        placement = Placement("disk", path=str(tmp_path / f"rows-{kind}"), memory="2KiB")
        with (
            trainer(parts(policy=LRU, placement=placement)) as trained,
            trained.saver(tmp_path / kind, full_every=3) as saver,
        ):
            given = {"pause_every": EVERY} if kind == "drained" else {"saver": saver, "save_every": EVERY}
            for result in trained.run(batches(STEPS), **given):
                if kind == "drained" and (result.step + 1) % EVERY == 0:
                    saver.save(result.step + 1)
        found.append(files(tmp_path / kind))
    assert found[0] == found[1]


def test_updates_of_several_batches_are_saved_after_the_last_one(tmp_path):
    with trainer(parts(), accumulate=2) as trained, trained.saver(tmp_path / "a") as saver:
        for every in (-2, 1, 3):
            with pytest.raises(
                ValueError, match=f"save_every must be 0 or a multiple of accumulate=2, got {every}"
            ):
                next(trained.run(batches(4), saver=saver, save_every=every))
        meta = saver.meta = {}
        for result in trained.run(batches(7), saver=saver, save_every=2):
            meta["step"] = result.step
        saver.wait()
        assert (
            checkpoint.steps(tmp_path / "a") == [4, 6] and CheckpointStream(tmp_path / "a").meta["step"] == 5
        )


def test_a_saver_and_its_steps_go_together(tmp_path):
    with trainer(parts()) as trained, trainer(parts()) as other, trained.saver(tmp_path) as saver:
        for given in ({"saver": saver}, {"save_every": 2}):
            with pytest.raises(ValueError, match="go together"):
                next(trained.run(batches(4), **given))
        with pytest.raises(ValueError, match="the saver is another trainer's"):
            next(other.run(batches(4), saver=saver, save_every=2))
        assert [result.step for result in trained.run(batches(2))] == [0, 1]


def test_ranks_that_save_elsewhere_are_told(tmp_path):
    def work(ranks):
        with trainer(parts(), communicators=ranks) as trained, trained.saver(tmp_path) as saver:
            given = batches(6, rank=ranks.rank, world_size=ranks.world_size)
            list(trained.run(given, saver=saver, save_every=4 + ranks.rank))

    with pytest.raises(StageFailedError, match="rank 1 has save_every=5 and rank 0 has save_every=4"):
        run_ranks(2, work)


def test_a_caller_who_stops_at_the_result_has_it_saved(tmp_path):
    """The state is that of the step, though later windows are trained before it is written."""
    with (
        training(Communicators.local(), "nestpipe") as (trained, _),
        trained.saver(tmp_path / "flown") as saver,
    ):
        for result in trained.run(batches(8), saver=saver, save_every=3):
            if result.step == 2:
                break
        assert trained.in_flight() == [3, 4] and not checkpoint.steps(tmp_path / "flown")
        wait_for(lambda: not trained._executor.in_flight())  # their rows are written
        saver.wait()
        assert checkpoint.steps(tmp_path / "flown") == [3]
        assert [result.step for result in trained.run([])] == [3, 4]  # that of 5 waits for the save of 2
    with training(Communicators.local(), "nestpipe") as (trained, _):
        list(trained.run(batches(3)))
        trained.save(tmp_path / "drained")
    assert files(tmp_path / "flown") == files(tmp_path / "drained")


def test_an_error_of_the_caller_ends_what_was_taken(tmp_path):
    with training(Communicators.local(), "nestpipe") as (trained, (_, tables, _)):
        with pytest.raises(OSError, match="of the caller"), trained.saver(tmp_path) as saver:
            for result in trained.run(batches(8), saver=saver, save_every=3):
                if result.step == 2:
                    raise OSError("of the caller")
        assert not tables.groups[0].table._snapshots and not checkpoint.steps(tmp_path)


def test_a_state_whose_saver_was_left_before_its_step_is_written_by_nobody(tmp_path):
    with training(Communicators.local(), "nestpipe") as (trained, (_, tables, _)):
        with trained.saver(tmp_path / "left") as saver:
            for result in trained.run(batches(8), saver=saver, save_every=3):
                if result.step == 1:  # step 2 is in flight, with what is taken for it
                    break
        assert [result.step for result in trained.run([])][:1] == [2]
        assert saver.taken is None and not checkpoint.steps(tmp_path / "left")
        assert not tables.groups[0].table._snapshots
        trained.save(tmp_path / "later")


def test_metadata_that_fails_keeps_no_turn_and_no_rows(tmp_path):
    with training(Communicators.local(), "nestpipe") as (trained, (_, tables, _)):
        with trained.saver(tmp_path, full_every=5) as saver:
            list(trained.run(batches(3), saver=saver, save_every=3))
            saver.wait()
            list(trained.run(batches(6)[3:]))
            saver.meta = None
            with pytest.raises(TypeError):
                saver.save(6)
            assert not tables.groups[0].table._snapshots
            saver.meta = {}
            saver.save(6)
            saver.wait()
        assert CheckpointStream(tmp_path).layers == 1  # the changes that were taken are in no checkpoint


def test_a_state_that_was_taken_and_lost_is_followed_by_a_whole_checkpoint(tmp_path):
    """The changes that it took are in no checkpoint, and rows are copied for it no more."""
    with training(Communicators.local(), "nestpipe", "lru") as (trained, (_, tables, _)):
        table = tables.groups[0].table

        def broken(count):
            yield from batches(10)[6:count]
            raise OSError("a disk is gone")

        with trained.saver(tmp_path, full_every=5) as saver:
            list(trained.run(batches(6), saver=saver, save_every=3))
            with pytest.raises(OSError, match="a disk is gone"):
                list(trained.run(broken(9), saver=saver, save_every=3))
            wait_for(lambda: table._snapshots)  # up to the lookup of step 8
            assert trained.in_flight() == [6, 7, 8] and table._snapshots
            trained.close()
            assert not table._snapshots
    with (
        training(Communicators.local(), "nestpipe", "lru") as (trained, _),
        trained.saver(tmp_path, full_every=5) as saver,
    ):
        assert trained.load(saver) == 6
        list(trained.run(batches(9)[6:], saver=saver, save_every=3))
        saver.wait()
        assert CheckpointStream(tmp_path).layers == 3
        trained.load(tmp_path)  # not through the saver, which may have lost changes of before
        list(trained.run(batches(12)[9:], saver=saver, save_every=3))
        saver.wait()
        assert CheckpointStream(tmp_path).layers == 1


def test_a_save_that_fails_is_an_error_of_the_next_and_the_run_goes_on(tmp_path, monkeypatch):
    write, failing = writer.save_file, []

    def full(*given, **options):
        if failing:
            raise OSError(28, "No space left on device")
        return write(*given, **options)

    monkeypatch.setattr(writer, "save_file", full)
    with training(Communicators.local(), "nestpipe") as (trained, _), trained.saver(tmp_path) as saver:
        results = []
        with pytest.raises(CheckpointError, match="No space left"):
            for result in trained.run(batches(12), saver=saver, save_every=3):
                results.append(result.step)
                if result.step == 4:
                    failing.append(True)
        failing.clear()
        assert checkpoint.steps(tmp_path) == [3]
        ahead = len(trained.in_flight())
        # The batch that was read when the error came is trained next.
        more = [
            each.step
            for each in trained.run(batches(12)[len(results) + ahead + 1 :], saver=saver, save_every=3)
        ]
        assert results + more == [*range(12)]
    assert checkpoint.steps(tmp_path)[-1] == 12
