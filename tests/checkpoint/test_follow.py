"""Promise: a run that goes on saves what it changes upon what it has loaded, and each checkpoint is whole."""

from pathlib import Path

import pytest
import torch
from simulated import random_table, same
from trainer_parts import batches, parts, trainer

from tritonrec import checkpoint
from tritonrec.checkpoint import CheckpointStream, Saver, load, saver
from tritonrec.embedding import (
    Eviction,
    Placement,
    PrecisionTiers,
    TablePolicy,
)
from tritonrec.harness.verify.thread_ranks import run_ranks

ROWS = 3000
ALL = TablePolicy(
    Eviction("lru", capacity=ROWS - 10, every=2), admission=2, precision=PrecisionTiers(2, every=3)
)


def made(tmp_path, storage, lr=0.05):
    placement = Placement("disk", path=str(tmp_path), memory="2KiB") if storage == "disk" else None
    return parts(policy=ALL, placement=placement, lr=lr)


def fill(tables, communicators):
    keys = torch.arange(1000, 1000 + ROWS)
    own = keys[checkpoint.slice_of(keys) * communicators.world_size >> 16 == communicators.rank]
    tables.load("item", own, torch.rand(ROWS, tables.groups[0].table.row_width)[own - 1000])


def tables_in(folder, step):
    """All rows by table and column, whatever layers they are in."""
    stream, found = CheckpointStream(folder, step), {}
    for name in stream.columns:
        read = [*stream.rows(name)]
        found[name] = {column: torch.cat([each[column] for each in read]) for column in read[0]}
    return found


def bytes_of(folder):
    return sum(path.stat().st_size for path in Path(folder).glob("item*.safetensors"))


@pytest.mark.if_changed
@pytest.mark.parametrize("storage", ["host", "disk"])
def test_runs_at_other_world_sizes_add_changes_to_one_table(tmp_path, storage):
    """Each also saves all of it elsewhere; earlier checkpoints go, and the last one is whole without them."""
    for stretch, ranks in enumerate((2, 1, 3, 3)):
        all_made = [made(tmp_path, storage) for _ in range(ranks)]

        def run(communicators, all_made=all_made, stretch=stretch):
            own, rank = all_made[communicators.rank], communicators.rank
            torch.manual_seed(9)
            with (
                trainer(own, communicators=communicators) as training,
                training.saver(tmp_path / "run", full_every=0) as saving,
            ):
                if stretch:
                    assert training.load(saving) == 2 * stretch
                else:
                    fill(own[1], communicators)
                ahead = batches(8, rank=rank, world_size=communicators.world_size)
                list(training.run(ahead[2 * stretch : 2 * stretch + 2]))
                saving.save(training.next_step)
                saving.wait()
                training.save(tmp_path / f"whole{stretch}")

        run_ranks(ranks, run)
        step = 2 * stretch + 2
        whole = tmp_path / f"whole{stretch}"
        found, expected = tables_in(tmp_path / "run", step), tables_in(whole, step)
        assert found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in found)
        assert CheckpointStream(tmp_path / "run").layers == stretch + 1
        folder = f"step-{step:012d}"
        written = bytes_of(tmp_path / "run" / folder) / bytes_of(whole / folder)
        assert written == 1 if stretch == 0 else written < 0.25
        if stretch:
            (tmp_path / "run" / f"step-{step - 2:012d}.json").unlink()
    assert len([*(tmp_path / "run").glob("step-*[0-9]")]) == 4  # files of all four saves are in use


def test_settings_that_change_take_a_whole_checkpoint(tmp_path):
    for lr, changed in ((0.05, ()), (0.1, {"lr"})):
        with (
            trainer(made(tmp_path, "host", lr)) as training,
            training.saver(tmp_path, full_every=0) as saving,
        ):
            if changed:
                training.load(saving, changed=changed)
            list(training.run(batches(4)[training.next_step : training.next_step + 2]))
            saving.save(training.next_step)
    assert checkpoint.steps(tmp_path) == [2, 4] and CheckpointStream(tmp_path).layers == 1


def test_a_run_that_goes_on_may_save_before_it_trains(tmp_path):
    with trainer(made(tmp_path, "host")) as training, training.saver(tmp_path, full_every=0) as saving:
        list(training.run(batches(2)))
        saving.save(2)
        training.load(saving)
        saving.save(2, {"more": 1})
    found = CheckpointStream(tmp_path)
    assert found.layers == 1 and found.meta["more"] == 1


@pytest.mark.parametrize("most", [256, 3])
def test_a_checkpoint_is_whole_once_changes_outweigh_it(tmp_path, monkeypatch, most):
    """Changes of a fifth of the rows, four of which have fewer bytes than all, and five more."""
    monkeypatch.setattr(saver, "MOST_LAYERS", most)
    table, kinds = random_table(4, 5000), []
    with Saver(tmp_path, full_every=0) as saving:
        for step in range(1, 12):
            table["rows"][:1000] += step
            kinds.append(saving.next_is_full())
            if kinds[-1]:
                saving.save(step, {}, {"t": table}, {})
            else:
                changed = {column: values[:1000] for column, values in table.items()}
                saving.save(step, {}, {"t": changed}, {}, erased={"t": table["keys"][:0]})
    full = [step for step, kind in enumerate(kinds) if kind]
    assert full == ([0, 6] if most == 256 else [0, 3, 6, 9])
    order = table["keys"].argsort()
    assert same(load(tmp_path).tables["t"], {name: values[order] for name, values in table.items()})


def test_an_empty_table_is_no_base(tmp_path):
    with Saver(tmp_path, full_every=0) as saving:
        for step in (1, 2):
            assert saving.next_is_full()
            saving.save(step, {}, {"t": random_table(1, 0)}, {})


def test_every_third_is_whole_across_runs(tmp_path):
    """A run of each save; a chain that is longer than this run would have made it ends at once."""
    table, kinds = random_table(4, 50), []
    none = {"t": table["keys"][:0]}
    for step, every in enumerate((3, 3, 3, 3, 3, 3, 2)):
        with Saver(tmp_path, full_every=every) as saving:
            if step:
                stream = CheckpointStream(tmp_path)
                saving.follow(stream.saved, stream.layers)
            kinds.append(saving.next_is_full())
            saving.save(step, {}, {"t": table}, {}, **({} if kinds[-1] else {"erased": none}))
    assert kinds == [True, False, False, True, False, False, True]


def test_a_saver_is_of_one_trainer_and_of_one_folder(tmp_path, monkeypatch):
    """Another trainer's would take its own changes for those of what was loaded."""
    with trainer(made(tmp_path, "host")) as one, trainer(made(tmp_path, "host")) as two:
        monkeypatch.chdir(tmp_path)
        saver = one.saver("run", full_every=4)
        with saver:
            list(one.run(batches(2)))
            saver.save(2)
            saver.wait()
            with pytest.raises(ValueError, match="the saver is another trainer's"):
                two.load(saver)
            (tmp_path / "elsewhere").mkdir()
            monkeypatch.chdir(tmp_path / "elsewhere")
            assert one.load(saver) == 2
