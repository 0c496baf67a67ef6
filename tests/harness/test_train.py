"""Promise: the trained bits depend neither on mode, nor on world size, nor on a restart in between."""

import time
from dataclasses import replace

import pytest
from test_digests import write_ratings

from tritonrec import checkpoint
from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, PrecisionTiers, TablePolicy
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.pipeline import ExchangeConfig, Trainer, WindowConfig

pytestmark = pytest.mark.multi_rank


@pytest.fixture(scope="module")
def reference(job):
    return train(Communicators.local(), Run(job, "reference", WindowConfig(1), steps=7), quiet=True)


def same(a, b):
    return all(a[name] == b[name] for name in ("step", "loss", "metrics", "baseline", "digest"))


def test_window_consistency_differs_from_the_reference_by_rounding_only(pool, job):
    # Its own reference shares its stages: a sum that both forget would show nowhere else.
    job = replace(job, lr=0.05)
    single = Communicators.local()
    reference = train(single, Run(job, "reference", WindowConfig(1), "sgd", steps=7), quiet=True)
    window = Run(job, "nestpipe", WindowConfig(3, "window"), "sgd", steps=7)
    for summary in pool.run(train, 2, window, True):
        assert summary["loss"] == pytest.approx(reference["loss"], rel=1e-6)


def train_with_a_slow_caller(communicators, run):
    """`train`, but rank 1's own thread is late with every loss, while its lanes go on with later batches."""
    progress = Trainer.progress

    def late(trainer, *arguments):
        result = progress(trainer, *arguments)
        if communicators.rank == 1:
            time.sleep(0.1)
        return result

    Trainer.progress = late
    try:
        return train(communicators, run, quiet=True)
    finally:
        Trainer.progress = progress


@pytest.mark.if_changed
def test_two_copies_of_the_tables_with_every_switch_give_the_digits_of_the_reference_and_save_one(
    pool, job, reference, tmp_path
):
    switches = WindowConfig(3, depth=3, exchange=ExchangeConfig(first_use=True, taper=0.5, skip_fetch=True))
    run = Run(job, "nestpipe", switches, steps=4, checkpoint=str(tmp_path), save_every=2, full_every=2)
    pool.run(train, 2, run, True, replicas=2)
    resumed = pool.run(train, 2, replace(run, steps=7, resume=True), True, replicas=2)
    assert all(same(summary, reference) for summary in resumed)
    assert all(summary["tables"]["rows"] == reference["tables"]["rows"] for summary in resumed)
    alone = Run(job, "dbp", WindowConfig(2), steps=9, checkpoint=str(tmp_path), resume=True)
    longer = train(Communicators.local(), Run(job, "reference", WindowConfig(1), steps=9), quiet=True)
    assert same(train(Communicators.local(), alone, quiet=True), longer)


def test_the_callers_collectives_do_not_meet_those_of_the_lanes(pool, job, reference):
    run = Run(job, "nestpipe", WindowConfig(2), steps=7)
    assert same(pool.run(train_with_a_slow_caller, 2, run)[0], reference)


def test_evaluating_in_between_changes_nothing(job, reference):
    run = Run(job, "nestpipe", WindowConfig(2), steps=7, evaluate_every=3)
    assert same(train(Communicators.local(), run, quiet=True), reference)


@pytest.mark.if_changed
def test_resuming_at_another_world_size_changes_nothing(pool, job, reference, tmp_path):
    run = Run(job, "nestpipe", WindowConfig(2), steps=4, checkpoint=str(tmp_path))
    pool.run(train, 3, run, True)
    resumed = pool.run(train, 2, replace(run, mode="dbp", steps=7, resume=True), True)
    assert same(resumed[0], reference)


POLICY = TablePolicy(Eviction("lru", capacity=60, every=2), admission=2, precision=PrecisionTiers(2, every=3))


@pytest.mark.if_changed
def test_changes_saved_beside_training_add_up_to_the_state(pool, job, tmp_path):
    """Deltas at three ranks, one update of two batches at a time; another layout and world size go on."""
    job = replace(job, policy=POLICY, batch_size=7, num_negatives=1)
    window = WindowConfig(1, accumulate=2)
    reference = train(Communicators.local(), Run(job, "reference", window, steps=14), quiet=True)
    run = Run(
        job, "nestpipe", replace(window, micro_batches=2), steps=8,
        checkpoint=str(tmp_path), save_every=2, full_every=3,
    )  # fmt: skip
    pool.run(train, 3, run, True)
    rest = replace(run, job=replace(job, slots=8, chunk_rows=16), mode="fwp", steps=14, resume=True)
    resumed = pool.run(train, 2, rest, True)
    assert (
        same(resumed[0], reference) and checkpoint.CheckpointStream(tmp_path).layers == 1
    )  # every third save, also across the restart
    assert reference["tables"]["evicted"] > 0 and reference["tables"]["promoted"] > 0


def test_an_update_cannot_be_resumed_in_its_middle(job, tmp_path):
    run = Run(job, "nestpipe", WindowConfig(2), steps=3, checkpoint=str(tmp_path))
    train(Communicators.local(), run, quiet=True)
    late = replace(run, window=WindowConfig(2, accumulate=2), steps=4, resume=True)
    with pytest.raises(ValueError, match="accumulate 1 in the checkpoint, 2 now"):
        train(Communicators.local(), late)
    with pytest.raises(ValueError, match="is at step 3, inside an update of 2 batches"):
        train(Communicators.local(), replace(late, changed=("accumulate",)))


@pytest.mark.if_changed
def test_grm_trains_alike_merged_or_not_at_any_world_size(pool, job, tmp_path):
    grm = replace(job, data=write_ratings(tmp_path), model="grm", max_exposed=3)
    expected = train(
        Communicators.local(),
        Run(replace(grm, merge=False), "reference", WindowConfig(1), steps=6),
        quiet=True,
    )
    got = pool.run(train, 3, Run(grm, "nestpipe", WindowConfig(2), steps=6), True)
    assert same(got[0], expected)
    assert {"GAUC/click", "GAUC/conversion"} < set(expected["metrics"])
    assert 0 < expected["metrics"]["GAUC/click"] < 1
    assert got[0]["lookups"]["lookups"] == 6 * 3 * 2  # items and actions in one table, users in another


def test_a_run_goes_on_with_the_settings_that_are_named(job, tmp_path):
    here, run = Communicators.local(), Run(job, "dbp", WindowConfig(2), steps=2, checkpoint=str(tmp_path))
    train(here, run, True)
    other = replace(run, job=replace(job, lr=0.5, eps=0.25), steps=3, resume=True)
    with pytest.raises(ValueError, match=r"lr 0\.\d+ in the checkpoint, 0\.5 now.*--changed lr,rule"):
        train(here, other, True)
    with pytest.raises(ValueError, match=r"eps 1e-08 in the checkpoint, 0\.25 now"):
        train(here, replace(other, changed=("lr",)), True)
    train(here, replace(other, changed=("lr", "rule")), True)
    assert max(checkpoint.steps(tmp_path)) == 3
    slow = replace(run, job=replace(job, ema=0.9), checkpoint=str(tmp_path / "average"))
    train(here, slow, True)
    fast = replace(slow, job=replace(job, ema=0.5), steps=3, resume=True)
    with pytest.raises(ValueError, match=r"ema 0\.9 in the checkpoint, 0\.5 now.*--changed average"):
        train(here, fast, True)
    train(here, replace(fast, changed=("average",)), True)
    sizes = replace(job.sizes, layers=job.sizes.layers + 1)
    with pytest.raises(ValueError, match=r"sizes\.layers .*or another directory$"):
        train(here, replace(run, job=replace(job, sizes=sizes), steps=4, resume=True), True)


def test_one_setting_begins_goes_on_and_ends(job, reference, tmp_path, capsys):
    """Started again and again, as by a scheduler, with `resume` "auto": the bits of the run in one go."""
    log = tmp_path / "log.jsonl"
    run = Run(job, "nestpipe", WindowConfig(2), checkpoint=tmp_path / "run", resume="auto", json_lines=log)
    began = train(Communicators.local(), replace(run, steps=3), quiet=True)
    assert began["steps_run"] == 3
    assert train(Communicators.local(), replace(run, steps=7), quiet=True)["steps_run"] == 4
    before = log.read_text()
    ended = train(Communicators.local(), replace(run, steps=7))
    assert ended["steps_run"] == 0 and ended["metrics"] and log.read_text() == before
    assert {**ended, "loss": reference["loss"]}.items() >= {**reference, "lookups": ended["lookups"],
        "steps_run": 0, "seconds_per_step": None, "tables": ended["tables"]}.items()  # fmt: skip
    assert "has ended at step 7" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the checkpoint is at step 7; ask for more steps than that, not 5"):
        train(Communicators.local(), replace(run, steps=5), quiet=True)
    with pytest.raises(ValueError, match="resuming needs the directory of a checkpoint"):
        train(Communicators.local(), replace(run, checkpoint=None), quiet=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_another_run_saves_into_is_refused_before_the_first_step(job, tmp_path, resume):
    """Also before it is read: the other run removes files meanwhile."""
    run = Run(job, "nestpipe", WindowConfig(2), steps=2, checkpoint=str(tmp_path), resume=resume)
    refused = pytest.raises(checkpoint.CheckpointError, match=f"{tmp_path} is in use: process")
    with checkpoint.Saver(tmp_path), refused:
        train(Communicators.local(), run, quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_refuse_a_directory_that_another_run_saves_into(pool, job, tmp_path):
    run = Run(job, "nestpipe", WindowConfig(2), steps=2, checkpoint=str(tmp_path), resume=True)
    with checkpoint.Saver(tmp_path), pytest.raises(Exception, match=f"{tmp_path} is in use: process"):
        pool.run(train, 2, run, True)
    assert list(tmp_path.iterdir()) == []


def test_every_setting_that_differs_is_named_with_both_values(job, tmp_path):
    run = Run(job, "nestpipe", WindowConfig(2), steps=2, checkpoint=str(tmp_path))
    train(Communicators.local(), run, quiet=True)
    other = replace(
        job,
        sizes=replace(job.sizes, dim=2 * job.sizes.dim, qk_dim=3, recompute=("silu",)),
        policy=TablePolicy(admission=3),
        seed=7,
        slots=8,
    )
    with pytest.raises(ValueError) as caught:
        train(Communicators.local(), replace(run, job=other, steps=3, resume=True), True)
    found = str(caught.value).partition("settings: ")[2].partition("; use the same")[0].split("; ")
    assert found == [
        "policy.admission 1 in the checkpoint, 3 now",
        "seed 0 in the checkpoint, 7 now",
        f"sizes.dim {job.sizes.dim} in the checkpoint, {2 * job.sizes.dim} now",
    ]
    other = replace(job, sizes=replace(job.sizes, qk_dim=3))
    with pytest.raises(ValueError, match=f"settings: sizes.qk_dim {job.sizes.qk_dim} in the checkpoint, 3 n"):
        train(Communicators.local(), replace(run, job=other, steps=3, resume=True), True)
    with pytest.raises(ValueError, match="with other settings: optimizer adam in the checkpoint, sgd now"):
        train(Communicators.local(), replace(run, optimizer="sgd", steps=3, resume=True), True)
    with pytest.raises(ValueError, match="holds checkpoints of another run"):
        train(Communicators.local(), run, True)


def test_a_checkpoint_of_something_else_cannot_resume(job, tmp_path):
    checkpoint.save(tmp_path, 1, {}, {}, {"seed": 5})
    run = Run(job, "reference", WindowConfig(1), steps=2, checkpoint=str(tmp_path), resume=True)
    with pytest.raises(ValueError, match="was not saved by tritonrec train"):
        train(Communicators.local(), run, quiet=True)


def test_a_trace_of_all_ranks_is_written(pool, job, tmp_path):
    from tritonrec.trace import read

    file = tmp_path / "run.pftrace"
    pool.run(train, 2, Run(job, "nestpipe", WindowConfig(2), steps=3, trace=str(file)), True)
    trace = read(file)
    assert {span.rank for span in trace.spans} == {0, 1}
    assert trace.metadata["mode"] == "nestpipe"
    assert [path.name for path in tmp_path.iterdir()] == ["run.pftrace"]
